"""Terminal output of the demo of questions about images: answers as tables, and scores."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from mmdecode.demo.vision.page import Answers, Given, ImageSet, drafting, headline, outcome
from mmdecode.runs.console import console, print_line


def show(report: Answers) -> None:
    """Prints headline, answers and scores of the demo."""
    print_line(re.sub("<[^>]*>", "", headline(report)), console, "bold")
    print_line(outcome(report), console)
    for part in report.sets:
        console.print(table_of(part, report.methods))
    console.print(
        "[green]right[/], [red]wrong[/], [bold underline]another answer[/] than the plain one; of "
        "a caption: objects named of those there, + objects made up",
        highlight=False,
    )
    scores = Table("", *report.scores[report.methods[0]])
    for method in report.methods:
        scores.add_row(method, *report.scores[method].values())
    console.print(scores)
    drafted = drafting(report)
    verdict = "every token the same" if drafted["same"] else "[red]tokens differ[/]"
    console.print(
        f"captions again with {report.draft}: {drafted['passes']:,} passes in place of "
        f"{drafted['undrafted']:,}, {verdict}",
        highlight=False,
    )


def table_of(part: ImageSet, methods: Sequence[str]) -> Table:
    """The answers of a set of images, in at most 80 columns for five methods."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("question", max_width=29)
    for name in ("true", *methods):
        table.add_column(name, overflow="fold")
    table.title, table.title_justify = part.title, "left"
    for entry in part.images:
        table.add_row(entry.name, style="bold")
        for one in entry.asked:
            first = one.answers[0].text
            cells = [_cell(given, other=given.text != first) for given in one.answers]
            caption = one.answers[0].hallucinated is not None
            table.add_row(one.text, "" if caption else one.truth, *cells)
        table.add_section()
    return table


def _cell(given: Given, other: bool) -> Text:
    """Returns the table cell of an answer; of a caption its numbers of objects, which are short."""
    style = "green" if given.right else "red"
    text = given.text
    if given.hallucinated is not None:
        text = given.note.partition(" named")[0].replace(" of ", "/")
        text += f" +{given.hallucinated}" * bool(given.hallucinated)
    return Text(text, style=f"{style} bold underline" if other else style)

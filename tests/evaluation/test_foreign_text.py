"""Ids and texts of any kind in reports: pages show them, and neither execute them nor break."""

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from mmdecode.asr.correction.n_best_lists import NBestList
from mmdecode.evaluation import evaluate
from mmdecode.evaluation.images.report import ImageReport, Measured
from mmdecode.evaluation.images.runs import ImageRow
from mmdecode.evaluation.images.samples import Likelihood, TokenTest
from mmdecode.evaluation.nbest.methods import Output, parts_of
from mmdecode.evaluation.nbest.n_best import Aligner
from mmdecode.evaluation.nbest.report import NBestReport, NBestReports
from mmdecode.evaluation.report.layout import markdown
from mmdecode.evaluation.speech.samples import Sample
from mmdecode.evaluation.speech.silence import SilenceReport
from mmdecode.evaluation.speech.word_report import WERReport
from mmdecode.evaluation.vision.benchmarks import YesNoTask
from mmdecode.evaluation.vision.caption_report import CaptionReport
from mmdecode.evaluation.vision.choice_report import ChoiceReport
from mmdecode.evaluation.vision.items import CaptionItem, ChoiceItem, YesNoItem, read_items
from mmdecode.evaluation.vision.task import zoo_image
from mmdecode.evaluation.vision.yes_no_report import YesNoReport
from tests.support.commands import invoke
from tests.support.files import json_lines, write_json_lines
from tests.support.pages import Checked, checked

TEXTS = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "' onmouseover='alert(1)' x='",
    "</title></style></script>-->",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "nul\0, bell\a, escape\x1b[31m",
    "\U0001f600 \U0001f469\u200d\U0001f680 \u202eright to left \u4e2d\u6587",
    "two\nlines\r\n\u2028 | and\ttwo `cells`",
    "$\\frac{$ $x_1$",
    "half a character \ud83d",
    "../../etc/passwd",
    "_ " + "long " * 200,
)
SCORED = {"resamples": 5, "conditions": {text: [text] for text in TEXTS}}
MODES = ("plain", TEXTS[0], *TEXTS[-5:])


class Attributes(Checked):
    """Also collects the names of all attributes, and texts."""

    def __init__(self):
        super().__init__()
        self.names, self.texts, self.scripts = set(), [], 0

    def handle_starttag(self, tag, attrs):
        super().handle_starttag(tag, attrs)
        self.names |= {name for name, _ in attrs}
        self.scripts += tag == "script"

    def handle_data(self, data):
        self.texts.append(data)


def questions():
    """A question for each text, with an answer of each mode."""
    for mode in MODES:
        for text in TEXTS:
            known = {"id": text, "image": text, "question": text, "mode": mode, "output": text}
            yield text, known


def failed(text):
    return {"error": text, "output": ""} if text is TEXTS[0] else {}


def yes_no():
    rows = [
        YesNoItem(
            target="yes" if number % 2 else "no",
            sets=(TEXTS[number % 4 * 3],),
            margin=1.0,
            **known | failed(text),
        )
        for number, (text, known) in enumerate(questions())
    ]
    return YesNoReport(rows, images=zoo_image, **SCORED)


def captions(folder):
    rows = [CaptionItem(objects=("dog",), **known | failed(t)) for t, known in questions()]
    return CaptionReport(rows, images=folder, **SCORED)


def choices(folder):
    rows = [
        ChoiceItem(options=(text, "x"), target=text, group=text, **known | failed(text))
        for text, known in questions()
    ]
    return ChoiceReport(rows, images=folder, **SCORED)


def samples(kind="", speech=True):
    return [
        Sample(
            id=kind + text,
            mode=mode,
            text=f"one {text}" * speech,
            pred_text=f"two {text}" if text is not TEXTS[0] else "",
            audio_filepath=text,
            group=text,
            duration=2.0,
            time=0.1,
            windows=1,
            repetitive_windows=0,
            error=text if text is TEXTS[0] else None,
        )
        for mode in MODES
        for text in TEXTS
    ]


def word_errors():
    return WERReport(samples(), normaliser="none", punctuation=True, **SCORED)


def silence():
    rows = [row for text in TEXTS for row in samples(f"non-speech/{text}/", speech=False)]
    return SilenceReport([*rows, *samples(f"speech/{TEXTS[0]}/")], **SCORED)


def n_best():
    lists = [NBestList(id=t, reference=f"one {t}", hypotheses=(f"two {t}", t)) for t in TEXTS]
    parts = parts_of(lists, 0.0, 0.0)
    found = {mode: Output(texts=list(TEXTS)) for mode in TEXTS}
    return NBestReports(
        [NBestReport(text, parts, found, Aligner("none"), **SCORED) for text in TEXTS[:3]]
    )


def images():
    dice = np.random.default_rng(0)
    test = TokenTest(tokens=4, surprise=0.0, p=1.0, pairs_p=None)
    modes = ["plain", *(text for text in TEXTS[:-1] if text.isprintable() and "/" not in text)]
    modes += [TEXTS[0].replace("/", "-"), TEXTS[-1][:99]]  # names of files too

    def one(mode):
        made = {"codes": [1] * 4, "commits": [1] * 4, "passes": 3, "seconds": 0.1}
        rows = [
            ImageRow(mode=mode, condition=text, ordinal=number, **made)
            for text in TEXTS
            for number in range(2)
        ]
        return Measured(
            rows=rows,
            codes=dice.integers(0, 4, (len(rows), 2, 2)),
            likelihood=Likelihood(
                per_image=9 + dice.normal(size=len(rows)),
                tokens=4,
                outside=np.zeros(len(rows)),
                all=test,
                first=None,
            ),
            judged=None,
            points=None,
            shown=dice.integers(0, 255, (4, 8, 8, 3), dtype=np.uint8),
        )

    class Made(ImageReport):
        def _measured(self):
            yield from ((mode, one(mode)) for mode in modes)

    adapter = SimpleNamespace(codebook=lambda: None, layout=SimpleNamespace(ids=range(4)))
    recorder = SimpleNamespace(
        model=SimpleNamespace(adapter=adapter),
        generators={mode: SimpleNamespace(guarantee=mode) for mode in modes},
    )
    failed = [ImageRow(mode="plain", condition=text, ordinal=9, error=text) for text in TEXTS]
    return Made(recorder, failed, permutations=9, **SCORED)


def refuse_unescaped(page):
    """Refuses a page that has tags or attributes of the texts, or lacks a text."""
    checked(page)
    found = Attributes()
    found.feed(page)
    assert not any(name.startswith("on") for name in found.names)
    assert found.scripts == page.count("<script>") <= 1 and "src=x" not in found.fetched
    assert not [url for url in found.fetched if not url.startswith(("data:", "#"))]
    shown = "".join(found.texts)
    assert "<script>alert(1)</script>" in shown and "{{ 7 * 7 }}{% raw %}" in shown


KINDS = {
    "pope": lambda folder: yes_no(),
    "chair": captions,
    "spatial": choices,
    "wer": lambda folder: word_errors(),
    "silence": lambda folder: silence(),
    "nbest": lambda folder: n_best(),
    "images": lambda folder: images(),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_reports_show_any_text_and_execute_none(kind, tmp_path):
    report = KINDS[kind](tmp_path)
    report.save(tmp_path / "out")
    refuse_unescaped((tmp_path / "out" / "report.html").read_text())
    assert "<script" not in report._repr_html_().replace("&lt;script", "")
    for table in report.tables():
        assert markdown(table).count("\n") == len(table) + 2
    json.loads((tmp_path / "out" / "summary.json").read_text())


def test_rows_of_any_text_are_scored_again(tmp_path):
    run, out = functools.partial(invoke, "evaluate"), tmp_path / "out"
    asked = ["--data", "zoo", "--split", "random", "--limit", len(TEXTS), "--greedy"]
    asked += ["--no-controls", "--device", "cpu", "--resamples", 5, "--out", out]
    assert run("pope", "--model", "zoo:llava-scenes", *asked).exit_code == 0
    rows = json_lines(out / "items.jsonl")
    changed = [
        row | dict.fromkeys(("id", "image", "question"), text) | {"output": TEXTS[0]}
        for row, text in zip(rows, TEXTS, strict=True)
    ]
    (out / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    done = run("pope", "--rescore", out, "--resamples", 5)
    assert done.exit_code == 0, done.output
    page = (out / "report.html").read_text()
    checked(page)
    assert "&lt;script&gt;alert" in page and "<script>alert" not in page
    assert [item.id for item in read_items(out, YesNoItem)] == list(TEXTS)


@pytest.mark.parametrize("task", ["wer", "nbest"])
def test_rows_of_any_text_are_scored_from_files(task, tmp_path):
    row = {"text": f"one {TEXTS[0]}", "pred_text": f"two {TEXTS[4]}", "output": "one"}
    rows = [row | {"id": t, "input": [f"two {t}", t]} for t in TEXTS if t.isprintable()]
    write_json_lines(tmp_path / "rows.jsonl", rows)
    given = ["--resamples", 5, "--normalizer", "none", "--out", tmp_path / "out"]
    option = "--hypotheses" if task == "wer" else "--data"
    done = invoke("evaluate", task, option, tmp_path / "rows.jsonl", *given)
    assert done.exit_code == 0, done.output
    checked((tmp_path / "out" / "report.html").read_text())


@pytest.mark.slow
def test_questions_of_a_task_of_ones_own_may_hold_any_text(tmp_path):
    items = [
        YesNoItem(id=text, image=f"scene_{number}.png", question=text, target="yes")
        for number, text in enumerate(TEXTS)
    ]
    (tmp_path / "questions.json").write_text(json.dumps(TEXTS))
    for item in items:
        (tmp_path / item.image).write_bytes(zoo_image(item.image))
    task = YesNoTask(name=TEXTS[0], items=lambda path, left_out: items, about=TEXTS[0])
    asked = {"model": "zoo:llava-scenes", "device": "cpu", "data": str(tmp_path), "resamples": 5}
    out = tmp_path / "out"
    report = evaluate(task, **asked, sample=False, controls=False, output=out)
    assert [item.id for item in read_items(out, YesNoItem)] == list(TEXTS)
    refuse_unescaped((out / "report.html").read_text())
    again = evaluate(task, **asked, sample=False, controls=False, output=out, resume=True)
    assert again.table() == report.table() == evaluate(task, rescore=out, resamples=5).table()

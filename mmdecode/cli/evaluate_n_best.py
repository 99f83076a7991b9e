"""``mmdecode evaluate nbest``: word errors of selection and correction of N-best lists."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdecode.cli.flags import Device, Dtype, Overwrite, Quantize, model_help
from mmdecode.cli.output import JsonFlag, emit_json, show_tables
from mmdecode.cli.progress import progress_bar
from mmdecode.runs.console import console, only_our_output, print_line

if TYPE_CHECKING:
    from mmdecode.asr.correction.n_best_lists import NBestList
    from mmdecode.evaluation.nbest.methods import Method, ModelRow, Parts
    from mmdecode.runs.journal import Journal

SHOWN = 5  # failures listed one by one
Rows = dict[tuple[str, str], dict[str, "ModelRow"]]
"""Model outputs by (set, source), then by the list's id; see `ModelRow`."""


def nbest(
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="N-best lists: a .json or .jsonl file of HyPoradise, also .gz; results.jsonl of "
            "mmdecode transcribe --n-best; or a shipped set: ls_clean, ls_other, cv. Repeat it for "
            "more; default: the shipped sets."
        ),
    ] = None,
    references: Annotated[
        Path | None,
        typer.Option(help="Manifest with the reference texts of lists that have none."),
    ] = None,
    normalizer: Annotated[
        str,
        typer.Option(
            help="Text normaliser: none, basic, whisper (English) or leaderboard, which also "
            "matches compounds with their parts.",
        ),
    ] = "whisper",
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="Methods, separated by commas: mbr, mbr+scores (minimum Bayes risk), table "
            "(learned replacements), lm:MODEL, lm-total:MODEL, lm+scores:MODEL (language model "
            "scores). The first hypotheses (1best) are always included. Repeat it for more."
        ),
    ] = None,
    corrector: Annotated[
        list[str] | None,
        typer.Option(
            help=model_help("A generative corrector, causal or seq2seq", "google/flan-t5-base")
            + " Repeat it for more."
        ),
    ] = None,
    train_share: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of the lists that a corrector was trained on; not tested."
        ),
    ] = 0.0,
    dev_share: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of the lists to fit settings on; not tested."),
    ] = 0.5,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only this many lists, for a smoke test.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for model outputs, tables, texts and HTML page."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue in --out; same lists only.")
    ] = False,
    overwrite: Overwrite = False,
    resamples: Annotated[int, typer.Option(min=1, help="Number of bootstrap samples.")] = 10_000,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size, in lists or texts.")] = 16,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    seed: Annotated[int, typer.Option(help="Seed of every bootstrap.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Word errors of selection and correction of N-best lists, compared with oracles.

    Oracle o_nb takes the best hypothesis of each list, o_cp the best text made of a list's words.
    Lists are split into parts by their ids: thresholds, weights and the table of replacements are
    fitted on the development part, and results are reported on the rest. Model outputs are appended
    to rows.jsonl in --out during the run.

    For example:

      mmdecode evaluate nbest

      mmdecode evaluate nbest --data test_atis.json --normalizer none --methods mbr,table --out run

      mmdecode evaluate nbest --data cv --corrector my-folder --methods table,lm:gpt2 --out run
    """
    import transformers

    import mmdecode
    from mmdecode.errors import OptionError
    from mmdecode.evaluation.nbest.methods import ROWS, Method, outputs, parts_of
    from mmdecode.evaluation.nbest.n_best import Aligner
    from mmdecode.evaluation.nbest.report import NBestReport, joined_rows, save_reports
    from mmdecode.runs.files import claimed
    from mmdecode.runs.journal import refuse_taken

    if resume and output is None:
        raise OptionError("--resume continues what a run wrote to --out; give that folder")
    if output is not None:
        refuse_taken(output, ROWS, resume, overwrite)
    asked = [name for text in methods or ["mbr,table"] for name in text.split(",") if name]
    asked += [f"corrector:{name}" for name in corrector or []]
    wanted = [Method.of(name) for name in dict.fromkeys(asked)]
    aligner = Aligner(normalizer)
    sets = {
        name: parts_of(lists[:limit], train_share, dev_share)
        for name, lists in _sets(data, references).items()
    }
    chosen = {} if quantize is None else {"quantize": quantize}
    conditions = {
        "methods": asked,
        "train_share": train_share,
        "dev_share": dev_share,
        "limit": limit,
        "dtype": dtype,
        **chosen,
        "mmdecode": mmdecode.__version__,
        "transformers": transformers.__version__,
    }
    with claimed(output) if output else contextlib.nullcontext():
        rows = _rows(
            wanted, sets, output, resume, overwrite, device, dtype, quantize, batch_size, limit
        )
        reports = []
        for name, parts in sets.items():
            found = {
                method.name: outputs(
                    method, parts, aligner, rows.get((name, method.source or ""), {})
                )
                for method in wanted
                if method.name != "1best"
            }
            reports.append(
                NBestReport(
                    name,
                    parts,
                    found,
                    aligner,
                    resamples=resamples,
                    seed=seed,
                    conditions=conditions,
                )
            )
        files = save_reports(reports, output, overwrite) if output else []
    failures = [
        {"data": one.data, "method": name, "id": which, "error": error}
        for one in reports
        for name, output in one.outputs.items()
        for which, error in output.failed.items()
    ]
    if json:
        summaries = [one.summary for one in reports]
        emit_json({"task": "nbest", "sets": summaries, "failures": failures, "files": files})
    else:
        show_tables([joined_rows(reports)])
        for report in reports:
            print_line(report.about())
            for comparison in report.comparisons:
                print_line(f"  {comparison}")
    if limit:
        print_line(f"--limit {limit}: a smoke test, not a result to report", console, "yellow")
    for path in files:
        print_line(str(path), console, "bold")
    for one in failures[:SHOWN]:
        print_line("failed ({method}): {data}: {id}: {error}".format(**one), console, "red")
    if failures:
        print_line(f"{len(failures)} failed; their first hypotheses count", console)
        raise typer.Exit(1)


COMMANDS = (nbest,)


def _sets(data: Sequence[str] | None, references: Path | None) -> dict[str, list[NBestList]]:
    """Reads the sets of N-best lists; the name of a set is the name of its file."""
    from mmdecode.asr.correction.n_best_lists import read_lists
    from mmdecode.asr.output.manifest import read_manifest
    from mmdecode.errors import OptionError
    from mmdecode.evaluation.nbest.n_best import SHIPPED, with_references

    entries = read_manifest(references, audio=False, text=True) if references else []
    found: dict[str, list[NBestList]] = {}
    for given in data or SHIPPED:
        path = Path(given)
        if given in SHIPPED and not path.exists():
            path = SHIPPED[given]
        name = path.name.partition(".")[0]
        if name in found:
            raise OptionError(f"two files of --data have the name {name!r}; rename one file")
        lists = read_lists(path)
        found[name] = with_references(lists, entries) if references else lists
    return found


def _rows(
    methods: Sequence[Method],
    sets: Mapping[str, Parts],
    output: Path | None,
    resume: bool,
    overwrite: bool,
    device: str | None,
    dtype: str,
    quantize: str | None,
    batch_size: int,
    limit: int | None,
) -> Rows:
    """Outputs of the methods' models for the development and test lists."""
    from mmdecode.evaluation.nbest.methods import ROWS, read_model_rows
    from mmdecode.runs.journal import Journal

    journal: Journal[ModelRow] | None = None
    if output is not None:
        hashes = {name: _hash(parts) for name, parts in sets.items()}
        settings = {"lists": hashes, "dtype": dtype, "limit": limit}
        if quantize is not None:  # as before there was a choice
            settings["quantize"] = quantize
        journal = Journal(
            output / ROWS,
            read_model_rows,
            lambda row: (row.data, row.source, row.id),
            settings,
            resume,
            overwrite,
        )
    found: Rows = {}
    for row in journal.done.values() if journal else ():
        if row.error is not None:
            continue  # it is tried again
        found.setdefault((row.data, row.source), {})[row.id] = row
    try:
        for source in dict.fromkeys(method.source for method in methods if method.source):
            for row in _made(source, sets, found, device, dtype, quantize, batch_size):
                found.setdefault((row.data, source), {})[row.id] = row
                if journal:
                    journal.add(row)
    finally:
        if journal:
            journal.close()
    return found


def _made(
    source: str,
    sets: Mapping[str, Parts],
    found: Rows,
    device: str | None,
    dtype: str,
    quantize: str | None,
    batch_size: int,
) -> Iterator[ModelRow]:
    """Runs one model on the lists that have no output of it yet."""
    from mmdecode.asr.correction.corrector import Corrector
    from mmdecode.asr.correction.selection import TextScorer
    from mmdecode.evaluation.nbest.methods import corrected, scored
    from mmdecode.runs.items import Watch

    todo = {
        name: [
            one
            for one in (*parts.development, *parts.test)
            if one.id not in found.get((name, source), {})
        ]
        for name, parts in sets.items()
    }
    if not any(todo.values()):
        return
    only_our_output()
    kind, _, model = source.partition(":")
    load: Any = (Corrector if kind == "corrector" else TextScorer).from_pretrained
    made = corrected if kind == "corrector" else scored
    # thresholds are laid on preferences later, on the development part
    options: dict[str, Any] = {"copy_below": -math.inf} if kind == "corrector" else {}
    if quantize is not None:
        options["quantize"] = quantize
    loaded = load(model, device=device, dtype=dtype, batch_size=batch_size, **options)
    watch = Watch()
    with progress_bar() as bar:
        task = bar.add_task(source, total=sum(map(len, todo.values())))
        for name, lists in todo.items():
            for row in made(loaded, lists, name, source, watch):
                yield row
                bar.advance(task)


def _hash(parts: Parts) -> str:
    """Checksum of all lists of a set."""
    lists = sorted((*parts.before, *parts.test), key=lambda one: one.id)
    return hashlib.blake2b(repr(lists).encode(), digest_size=8).hexdigest()

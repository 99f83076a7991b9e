"""Task ``nbest``: word errors of selection and correction of N-best lists."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdecode.errors import OptionError
from mmdecode.evaluation.task import ENGINE, Run, Task
from mmdecode.runs.items import Noted, Watch

if TYPE_CHECKING:
    from mmdecode.asr.correction.n_best_lists import NBestList
    from mmdecode.evaluation.nbest.methods import ModelRow, Parts
    from mmdecode.evaluation.report.report import Report
    from mmdecode.runs.rows import RowJournal


@dataclass(frozen=True, kw_only=True)
class NBestTask(Task):
    """Methods that make one text of each list; the rows are the outputs of their models."""

    def open(self, given: Mapping[str, Any]) -> Run:
        """Reads and splits the lists; models are loaded one after the other; see `Task.open`."""
        import transformers

        import mmdecode
        from mmdecode.evaluation.nbest.methods import (
            Method,
            ModelRow,
            outputs,
            parts_of,
            read_model_rows,
        )
        from mmdecode.evaluation.nbest.n_best import Aligner
        from mmdecode.evaluation.nbest.report import NBestReport, NBestReports
        from mmdecode.runs.rows import RowJournal

        listed = given["methods"] or ["mbr,table"]
        asked = [name for text in listed for name in text.split(",") if name]
        asked += [f"corrector:{name}" for name in given["corrector"] or []]
        methods = [Method.of(name) for name in dict.fromkeys(asked)]
        aligner = Aligner(given["normalizer"])
        found, limit = _sets(given["data"], given["references"]), given["limit"]
        if limit is not None and limit >= max(map(len, found.values())):
            limit = None  # leaves nothing out
        sets = {
            name: parts_of(lists[:limit], given["train_share"], given["dev_share"])
            for name, lists in found.items()
        }
        chosen = {} if given["quantize"] is None else {"quantize": given["quantize"]}
        conditions = {
            "methods": asked,
            **{name: given[name] for name in ("train_share", "dev_share", "dtype")},
            "limit": limit,
            **chosen,
            "mmdecode": mmdecode.__version__,
            "transformers": transformers.__version__,
        }
        settings = {
            "lists": {name: _hash(parts) for name, parts in sets.items()},
            "dtype": given["dtype"],
            "limit": limit,
            **chosen,
        }
        sources = list(dict.fromkeys(method.source for method in methods if method.source))
        work = [
            _Work(source, name, one)
            for source in sources
            for name, parts in sets.items()
            for one in parts.scored
        ]
        resampling = {name: given[name] for name in self.scoring}

        def report(rows: Sequence[ModelRow]) -> Report:
            by_source: dict[tuple[str, str | None], dict[str, ModelRow]] = {}
            for row in rows:
                by_source.setdefault((row.data, row.source), {})[row.id] = row
            reports = []
            for name, parts in sets.items():
                found = {
                    one.name: outputs(one, parts, aligner, by_source.get((name, one.source), {}))
                    for one in methods
                }
                made = NBestReport(name, parts, found, aligner, conditions=conditions, **resampling)
                reports.append(made)
            return NBestReports(reports)

        return Run(
            report=report,
            record=partial(_recorded, work, _Models(given)),
            items=work,
            name=lambda one: one.name,
            failed=lambda one, error: [
                ModelRow(data=one.data, source=one.source, id=one.list.id, error=error)
            ],
            journal=lambda folder, *how: RowJournal(
                folder / self.rows,
                read_model_rows,
                lambda row: (row.data, row.source, row.id),
                settings,
                *how,
            ),
            total=len(work),
            doing="scoring lists",
        )


def _sets(data: Sequence[str] | None, references: Path | None) -> dict[str, list[NBestList]]:
    """Reads the sets of N-best lists; the name of a set is the name of its file."""
    from mmdecode.asr.correction.n_best_lists import read_lists
    from mmdecode.asr.output.manifest import read_manifest
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


@dataclass(frozen=True)
class _Work:
    """A list for a model, and the name of its set."""

    source: str
    data: str
    list: NBestList

    @property
    def key(self) -> tuple[str, str, str]:
        """Set, model and id, which tell rows apart."""
        return self.data, self.source, self.list.id

    @property
    def name(self) -> str:
        """The key as one text."""
        return json.dumps(self.key, ensure_ascii=False)


def _recorded(
    work: Sequence[_Work],
    models: _Models,
    journal: RowJournal[ModelRow] | None,
    progress: Callable[[Any], None],
    *,
    items: Sequence[_Work] | None = None,
    noted: Noted = contextlib.nullcontext,
) -> list[ModelRow]:
    """Outputs of the methods' models for the development and test lists, see `Run.record`.

    Without ``items``, rows of other models in the journal come first.
    """
    rows = [row for row in journal.rows.values() if row.error is None] if journal else []
    known = {(row.data, row.source, row.id) for row in rows}
    todo = [one for one in (work if items is None else items) if one.key not in known]
    for source, lists in itertools.groupby(todo, key=lambda one: one.source):
        for row in _made(models, source, list(lists), noted):
            rows.append(row)
            if journal:
                journal.add(row)
            progress(row)
    if items is None:
        models.clear()
        return rows
    found = {(row.data, row.source, row.id): row for row in rows}
    return [found[one.key] for one in items]


class _Models:
    """The model in use: models are loaded one after the other, so that one is in memory."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._options = {name: given[name] for name in ("device", "dtype", "batch_size")}
        if given["quantize"] is not None:
            self._options["quantize"] = given["quantize"]
        self._loaded: dict[str, tuple[Any, Watch]] = {}

    def __call__(self, source: str) -> tuple[Any, Watch]:
        """Returns the model of a source, with the state of its failures."""
        from mmdecode.asr.correction.corrector import Corrector
        from mmdecode.asr.correction.selection import TextScorer

        if source not in self._loaded:
            self.clear()
            kind, _, model = source.partition(":")
            if kind == "corrector":  # thresholds are laid on preferences later, in development
                loaded: Any = Corrector.from_pretrained(
                    model, **self._options, copy_below=-math.inf
                )
            else:
                loaded = TextScorer.from_pretrained(model, **self._options)
            self._loaded[source] = loaded, Watch()
        return self._loaded[source]

    def clear(self) -> None:
        """Forgets the model."""
        self._loaded.clear()


def _made(models: _Models, source: str, work: Sequence[_Work], noted: Noted) -> Iterator[ModelRow]:
    """Runs one model on lists, set by set."""
    from mmdecode.evaluation.nbest.methods import corrected, scored

    model, watch = models(source)
    made: Any = corrected if source.startswith("corrector:") else scored
    for data, found in itertools.groupby(work, key=lambda one: one.data):
        some = list(found)
        watch.noted = _renamed(noted, {one.list.id: one.name for one in some})
        yield from made(model, [one.list for one in some], data, source, watch)


def _renamed(noted: Noted, names: Mapping[str, str]) -> Noted:
    return lambda ids: noted([names[name] for name in ids])


def _hash(parts: Parts) -> str:
    """Checksum of all lists of a set."""
    lists = sorted((*parts.before, *parts.test), key=lambda one: one.id)
    return hashlib.blake2b(repr(lists).encode(), digest_size=8).hexdigest()


NBEST = NBestTask(
    name="nbest",
    about="""Word errors of selection and correction of N-best lists, compared with oracles.

    Oracle o_nb takes the best hypothesis of each list, o_cp the best text made of a list's words.
    Lists are split into parts by their ids: thresholds, weights and the table of replacements are
    fitted on the development part, and results are reported on the rest. Model outputs are appended
    to rows.jsonl in --out during the run.

    For example:

      mmdecode evaluate nbest

      mmdecode evaluate nbest --data test_atis.json --normalizer none --methods mbr,table --out run

      mmdecode evaluate nbest --data cv --corrector my-folder --methods table,lm:gpt2 --out run
    """,
    options={
        "data": None,
        "references": None,
        "normalizer": "whisper",
        "methods": None,
        "corrector": None,
        "train_share": 0.0,
        "dev_share": 0.5,
        "limit": None,
        "output": None,
        "resume": False,
        "overwrite": False,
        "resamples": 10_000,
        "batch_size": 16,
        "device": "auto",
        "dtype": "auto",
        "quantize": None,
        "seed": 0,
        **ENGINE,
    },
    helps={
        "data": "N-best lists: a .json or .jsonl file of HyPoradise, also .gz; results.jsonl of "
        "mmdecode transcribe --n-best; or a shipped set: ls_clean, ls_other, cv. Repeat it for "
        "more; default: the shipped sets.",
        "normalizer": "Text normaliser: none, basic, whisper (English) or leaderboard, which also "
        "matches compounds with their parts.",
        "resume": "Continue in --out; same lists only.",
    },
    rows="rows.jsonl",
    failed="their first hypotheses count",
)

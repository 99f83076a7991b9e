"""``mmdecode results``: how far a job got, why items failed, and going on with it."""

import contextlib
import csv
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from mmdecode.errors import InputError, OptionError
from mmdecode.runs import journal as journals
from mmdecode.runs.journal import Journal
from mmdecode.runs.status import status_of
from mmdecode.runs.tables import read_rows, write_table
from mmdecode.runs.units import UNIT, Prepared
from mmdecode.zoo.speech import speech_test
from tests.support.commands import invoke, json_of
from tests.support.files import json_lines


@dataclass(frozen=True)
class Word:
    text: str


class Words(Journal[Word]):
    """A line for each word; nothing is computed."""

    def id_of(self, item):
        return item.text


def begun(folder, texts, **how):
    """The journal of a run, ready to be written to."""
    journal = Words(folder, {"a": 1}, [Word(text) for text in texts], **how)
    return journal.open(journal.prepare())


def line(text, **more):
    return {"id": text, "long": [len(text)], **more}


@pytest.fixture
def stopped(tmp_path):
    """Two done, one failed, two missing."""
    (tmp_path / "out").mkdir()
    journal = begun(tmp_path / "out", "abcde", command=["ask", "--out", "out"])
    for text, more in (("a", {}), ("b", {"error": "no b", "kind": "InputError"}), ("c", {})):
        journal.append(Word(text), line(text, **more))
    journal.close()
    return tmp_path / "out"


def test_what_is_done_failed_and_missing_is_shown(stopped):
    done = invoke("results", stopped)
    assert done.exit_code == 1
    assert done.stdout.startswith("2 done, 1 failed, 2 missing\n")
    assert "| InputError | 1 |" in done.stdout and "failed: b: no b" in done.stdout
    assert "--retry" in done.stderr
    found = json_of(invoke("results", stopped, "--json"))
    assert (found["done"], found["missing"]) == (2, ["d", "e"])
    assert found["failed"] == [{"id": "b", "error": "no b"}]
    assert found["settings"] == {"a": 1} and found["command"] == ["ask", "--out", "out"]
    journal = begun(stopped, "abcde", resume=True)
    for text in "bde":
        journal.append(Word(text), line(text))
    journal.finish()
    whole = invoke("results", stopped)
    assert whole.exit_code == 0 and whole.stdout == "5 done, 0 failed, 0 missing\n"


@pytest.mark.parametrize("share", [["--shard", "1/2"], ["--shard=1/2"]])
def test_a_shard_is_retried_with_the_work_of_all_shards(share, tmp_path, monkeypatch):
    begun(tmp_path, "ab", command=["ask", *share, "--model", "m"]).close()
    called = []

    def instead(args, cwd):
        called.append(args[3:])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", instead)
    invoke("results", tmp_path, "--retry")
    assert called == [["ask", "--model", "m", "--resume"]]


def test_commands_are_shown_as_a_shell_takes_them(tmp_path, monkeypatch):
    folder, words = tmp_path / "my answers", ["ask", "a.png", "-q", "Is it $5?", "--resume"]
    folder.mkdir()
    begun(folder, "a", command=words).close()
    shown = invoke("results", folder).stderr.replace("\n", "")
    assert f"mmdecode results '{folder}' --retry" in shown
    called = []

    def instead(args, cwd):
        called.append(args[3:])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", instead)
    shown = invoke("results", folder, "--retry").stderr
    assert "mmdecode ask a.png -q 'Is it $5?' --resume" in shown.replace("\n", "")
    assert called == [words]


@pytest.mark.parametrize("kind", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_results_become_tables_that_are_read_again(kind, stopped, tmp_path):
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    table = tmp_path / f"table.{kind}"
    assert invoke("results", stopped, "--table", table).exit_code == 1
    rows = [row for _, row in read_rows(table)]
    assert [row["id"] for row in rows] == ["a", "b", "c"] and rows[1]["error"] == "no b"
    assert rows[0]["long"] == ("[1]" if kind in ("csv", "tsv") else [1])
    if kind == "csv":
        with table.open(newline="") as file:
            assert next(csv.reader(file)) == ["id", "long", "error", "kind"]


def test_a_table_of_another_kind_and_a_file_of_others_are_refused(stopped, tmp_path):
    theirs = tmp_path / "theirs.csv"
    theirs.write_text("theirs")
    with pytest.raises(OptionError, match="there already"):
        write_table(theirs, [])
    with pytest.raises(OptionError, match=r"expected a file \.csv, "):
        write_table(tmp_path / "table.xlsx", [])
    assert theirs.read_text() == "theirs"


def test_what_is_no_folder_of_a_job_is_refused(tmp_path):
    for text in (None, "{", "{}", '{"settings": {}, "work": 3}'):
        if text is not None:
            (tmp_path / "run.json").write_text(text)
        with pytest.raises(InputError, match="expected --out of transcribe") as caught:
            status_of(tmp_path)
        assert ("an evaluation" in str(caught.value)) == (text is not None)


# Units of work


def test_a_unit_that_was_interrupted_is_whole_again_and_new_inputs_are_new_units(tmp_path):
    texts = [f"{number:02d}" for number in range(2 * UNIT + 3)]
    first = begun(tmp_path, texts[: 2 * UNIT], batch_size=2)
    assert [len(unit.items) for unit in first.units()] == [2 * UNIT]
    for text in texts[:5]:
        first.append(Word(text), line(text))
    first.close()
    with contextlib.closing(begun(tmp_path, texts, batch_size=1, resume=True)) as again:
        units = again.units()
        assert [(len(unit.items), unit.batch_size) for unit in units] == [(2 * UNIT, 2), (3, 1)]
        for unit in units:
            for word in unit.items:
                again.append(word, line(word.text, second=True))
        again.finish()
    found = json_lines(tmp_path / "results.jsonl")
    assert [row["id"] for row in found] == texts
    assert ["second" in row for row in found] == [False] * 5 + [True] * (len(texts) - 5)


def test_what_failed_and_what_ended_a_process_are_units_of_their_own(tmp_path):
    first = begun(tmp_path, "abcd", batch_size=2)
    first.append(Word("a"), line("a"))
    first.append(Word("b"), line("b", error="no"))
    first.append(Word("c"), line("c", error="no"))
    first.append(Word("d"), line("d", error="no"))
    first.close()
    (tmp_path / ".decoding-0").write_text(json.dumps({"alone": {}, "batch": ["d"]}))
    again = begun(tmp_path, "abcd", batch_size=2, resume=True)
    assert [[word.text for word in unit.items] for unit in again.units()] == [["b", "c"], ["d"]]
    again.close()


def test_workers_share_units_and_their_lines_are_merged(tmp_path):
    texts = [f"{number:02d}" for number in range(3 * UNIT)]
    leader = Words(tmp_path, {"a": 1}, [Word(text) for text in texts])
    prepared = leader.prepare()
    workers = [
        Words(tmp_path, {"a": 1}, leader.items).open(Prepared(*prepared), rank) for rank in "01"
    ]
    units = workers[0].units()
    assert [len(unit.items) for unit in units] == [UNIT] * 3
    for worker, share in zip(workers, (units[1:], units[:1]), strict=True):
        for unit in share:
            for word in unit.items:
                worker.append(word, line(word.text))
        worker.close()
    leader.finish()
    assert [row["id"] for row in json_lines(tmp_path / "results.jsonl")] == texts


def batches_of_this_run(earlier, ids, batch_size, shares):
    return [(batch_size, list(ids))]


def written_again(self, item, line, own=Journal.append):
    self.done.discard(self.id_of(item))
    own(self, item, line)


@pytest.mark.parametrize(
    ("name", "mistake", "noticed_by"),
    [
        (
            "cut",
            batches_of_this_run,
            test_a_unit_that_was_interrupted_is_whole_again_and_new_inputs_are_new_units,
        ),
        (
            "append",
            written_again,
            test_a_unit_that_was_interrupted_is_whole_again_and_new_inputs_are_new_units,
        ),
        (
            "merge",
            lambda self, *how: None,
            test_workers_share_units_and_their_lines_are_merged,
        ),
    ],
)
def test_a_broken_journal_is_noticed(name, mistake, noticed_by, tmp_path, monkeypatch):
    monkeypatch.setattr(Journal if hasattr(Journal, name) else journals, name, mistake)
    with pytest.raises((AssertionError, FileNotFoundError)):
        noticed_by(tmp_path)


# Going on


def mmdecode(folder, *words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mmdecode", *map(str, words)]
    how = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, cwd=folder, env=environment, **how)


def test_retry_runs_the_command_in_its_folder_and_continues(stopped, monkeypatch):
    seen = []

    def run(words, cwd):
        seen.append((words[1:], cwd))
        return subprocess.CompletedProcess(words, 3)

    monkeypatch.setattr(subprocess, "run", run)
    assert invoke("results", stopped, "--retry").exit_code == 3
    words = ["-m", "mmdecode", "ask", "--out", "out", "--resume"]
    assert seen == [(words, os.getcwd())]
    begun(stopped, "abcde", resume=True).close()  # of Python: no command
    with pytest.raises(OptionError, match="does not say which command wrote it"):
        invoke("results", stopped, "--retry", catch_exceptions=False)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_retry_runs_the_same_command_for_what_failed(tmp_path):
    good = speech_test()[0].path
    (tmp_path / "bad.ogg").write_text("no audio")
    first = mmdecode(
        tmp_path, "transcribe", good, "bad.ogg", "--model", "zoo:whisper-synth", "--out", "out",
        "--max-new-tokens", 4, "--format", "txt",
    )  # fmt: skip
    assert first.returncode == 1, first.stderr
    before = json_lines(tmp_path / "out" / "results.jsonl")
    (tmp_path / "bad.ogg").write_bytes(speech_test()[1].path.read_bytes())
    done = mmdecode(tmp_path.parent, "results", tmp_path / "out", "--retry")
    assert done.returncode == 0, done.stderr
    assert "1 transcribed, 1 done before" in done.stderr
    after = json_lines(tmp_path / "out" / "results.jsonl")
    assert after[0] == before[0] and "error" in before[1] and "error" not in after[1]

"""Results that survive: kills, other numbers of processes, odd names, a second run at once."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile

from mmdecode.asr.audio.reading import Source, blocks, recording
from mmdecode.asr.output import jobs
from mmdecode.asr.output.jobs import ResultFolder
from mmdecode.asr.output.manifest import Entry, read_manifest
from mmdecode.asr.results import Failure, Segment, Transcript
from mmdecode.errors import InputError, MissingExtraError, OptionError
from mmdecode.runs import journal
from mmdecode.runs import lines as parts
from mmdecode.runs.crashes import InFlight, suspects_in, watched
from mmdecode.runs.distributed import Shard, Team, local_device, shard_of
from mmdecode.runs.files import LISTING, claimed, note_settings
from mmdecode.runs.units import Prepared
from tests.support.faults import ERRORS, failure_of
from tests.support.files import contents, json_lines

HERE = Path(__file__).parent
ENTRIES = [Entry(id=f"{name}/a.wav", audio=f"{name}/a.wav") for name in "wxyz"]


def transcribed(source, text="one", index=0):
    return Transcript(
        source=source,
        index=index,
        text=text,
        segments=[Segment(start_s=0.0, end_s=2.0, text=text, tokens=[1])],
        language=None,
        duration_s=2.0,
        tokens=[1],
        stats={"windows": 1},
    )


def failed(source, error="no"):
    return Failure(source=source, index=0, error=error, kind="InputError")


def prepare(folder, settings, resume, entries, formats=(), overwrite=False):
    how = {"resume": resume, "overwrite": overwrite}
    return ResultFolder(folder, settings, entries, formats, **how).prepare()


def opened(folder, entries, formats=("txt",), settings=None, rank=None, alone=None, **how):
    """The folder of one process, of a run that the leading one has prepared."""
    one = ResultFolder(folder, settings or {"a": 1}, entries, formats, resume=True, **how)
    return one.open(Prepared(set(), set(), alone or {}, []), None if rank is None else str(rank))


def merge(folder, entries):
    ResultFolder(folder, {"a": 1}, entries).merge()


def write(folder, results, entries=ENTRIES, resume=False, rank=None, end=True):
    """One process of a run; without an end it was killed."""
    folder.mkdir(exist_ok=True)
    if rank in (None, 0):
        prepare(folder, {"a": 1}, resume, entries)
    with contextlib.closing(opened(folder, entries, rank=rank)) as one:
        for result in results:
            one.add(result)
    if end:
        merge(folder, entries)
    return one


def lines(folder):
    return json_lines(folder / "results.jsonl")


def test_results_end_in_the_order_of_the_input_and_with_its_indices_and_names(tmp_path):
    write(tmp_path / "a", [transcribed(e.id) for e in reversed(ENTRIES)])
    found = lines(tmp_path / "a")
    assert [(e["source"], e["index"], e["name"]) for e in found] == [
        ("w/a.wav", 0, "a"), ("x/a.wav", 1, "a-2"), ("y/a.wav", 2, "a-3"), ("z/a.wav", 3, "a-4"),
    ]  # fmt: skip
    write(tmp_path / "b", [transcribed(ENTRIES[3].id)], end=False)
    write(tmp_path / "b", [transcribed(e.id) for e in ENTRIES[:3]], resume=True)
    assert contents(tmp_path / "b") == contents(tmp_path / "a")


def test_parts_of_several_processes_are_merged_also_by_the_next_run(tmp_path):
    write(tmp_path / "a", [transcribed(e.id) for e in ENTRIES])
    out = tmp_path / "b"
    write(out, [transcribed(ENTRIES[2].id)], rank=0, end=False)
    write(out, [transcribed(ENTRIES[1].id)], rank=1, end=False)
    (out / ".7-0.tmp").write_text("half")
    with (out / "parts" / "rank-1.jsonl").open("a") as file:
        file.write('{"source": "w/a.wav", "na')
    assert sorted(p.name for p in (out / "parts").iterdir()) == [
        LISTING,
        "rank-0.jsonl",
        "rank-1.jsonl",
    ]
    assert write(out, [], resume=True, end=False).done == {"x/a.wav", "y/a.wav"}
    write(out, [transcribed(ENTRIES[0].id), transcribed(ENTRIES[3].id)], resume=True)
    assert contents(out) == contents(tmp_path / "a")


def test_a_failure_is_kept_once_until_a_transcript_replaces_it(tmp_path):
    source = ENTRIES[1].id
    write(tmp_path, [failed(source)])
    for _ in range(2):
        assert write(tmp_path, [failed(source)], resume=True, end=False).done == set()
        assert [e["error"] for e in lines(tmp_path)] == ["no"]
    write(tmp_path, [failed(source, "why")], resume=True)
    assert [e["error"] for e in lines(tmp_path)] == ["why"]
    write(tmp_path, [transcribed(source)], resume=True)
    assert write(tmp_path, [], resume=True).done == {source}
    assert [e.get("text") for e in lines(tmp_path)] == ["one"]
    write(tmp_path, [failed(source)], resume=True)
    assert [e.get("text") for e in lines(tmp_path)] == ["one"], "a failure replaced a transcript"


def test_results_of_a_larger_input_stay(tmp_path):
    write(tmp_path, [transcribed(e.id) for e in ENTRIES])
    write(tmp_path, [], ENTRIES[2:3], resume=True)
    assert [e["source"][0] for e in lines(tmp_path)] == ["y", "w", "x", "z"]
    more = [Entry(id="v/a.wav", audio="v/a.wav"), *ENTRIES]
    write(tmp_path, [transcribed("v/a.wav")], more, resume=True)
    assert [e["name"] for e in lines(tmp_path)] == ["a-5", "a", "a-2", "a-3", "a-4"]


def test_the_results_are_a_manifest(tmp_path):
    write(tmp_path, [transcribed(ENTRIES[0].id, "hello"), failed(ENTRIES[1].id)])
    first, second = read_manifest(tmp_path / "results.jsonl")
    assert (first.id, first.text, first.duration_s) == ("w/a.wav", "hello", 2.0)
    assert first.audio == os.path.abspath("w/a.wav")
    assert second.text is None


PART = Entry(id="p", audio="a.wav", offset_s=1.23456789, duration_s=2.0)


def test_a_part_keeps_its_offset_in_the_results(tmp_path):
    write(tmp_path, [transcribed("p")], [PART])
    [found] = read_manifest(tmp_path / "results.jsonl")
    assert (found.id, found.offset_s, found.duration_s) == ("p", 1.23456789, 2.0)
    assert write(tmp_path, [], [PART], resume=True).done == {"p"}
    write(tmp_path / "whole", [transcribed(ENTRIES[0].id)])
    assert "offset" not in lines(tmp_path / "whole")[0]


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({"audio": "x/a.wav"}, {"audio": "y/a.wav"}, r"audio was '/.*x/a.wav', is '/.*y/a.wav'"),
        ({"audio": "s", "stdin": True}, {"audio": "s"}, "audio was None, is"),
        ({"audio": "a"}, {"audio": "a", "offset_s": 1.0}, "offset was None, is 1.0"),
        ({"audio": "a", "offset_s": 1.0}, {"audio": "a"}, "offset was 1.0, is None"),
        (
            {"audio": "a", "offset_s": 1.0, "duration_s": 2.0},
            {"audio": "a", "offset_s": 1.0, "duration_s": 2.00001},
            "duration was 2.0, is 2.00001",
        ),
        ({"audio": "a"}, {"audio": "a", "language": "german"}, "language was 'en', is 'de'"),
        ({"audio": "a"}, {"audio": "a", "language": "<|EN|>", "duration_s": 9.0}, None),
    ],
)
@pytest.mark.parametrize("end", [True, False])
def test_an_id_that_names_another_recording_now_is_refused(tmp_path, before, now, words, end):
    result = dataclasses.replace(transcribed("a"), language="en")
    write(tmp_path, [result], [Entry(id="a", **before)], rank=0, end=end)
    (tmp_path / ".reading-0.tmp").write_bytes(b"a")
    kept = contents(tmp_path)
    entries = [Entry(id="b", audio="b"), Entry(id="a", **now)]
    if words is None:
        assert prepare(tmp_path, {"a": 1}, True, entries).suspects == {"a"}
        return
    with pytest.raises(OptionError, match=rf"id 'a', .*{words}.*choose another --out"):
        prepare(tmp_path, {"a": 1}, True, entries)
    assert contents(tmp_path) == kept
    prepare(tmp_path, {"a": 1}, True, entries[:1])


def test_languages_do_not_matter_where_one_was_asked_for_of_all(tmp_path):
    entry, settings = Entry(id="a", audio="a", language="de"), {"language": "en"}
    result = dataclasses.replace(transcribed("a"), language="en")
    prepare(tmp_path, settings, False, [entry])
    folder = opened(tmp_path, [entry], settings=settings)
    folder.add(result)
    folder.close()
    prepare(tmp_path, settings, True, [entry])
    assert [e["id"] for e in lines(tmp_path)] == ["a"]


def test_the_path_of_what_failed_may_be_corrected(tmp_path):
    write(tmp_path, [failed("a")], [Entry(id="a", audio="x/a.wav")])
    found = write(tmp_path, [transcribed("a")], [Entry(id="a", audio="y/a.wav")], resume=True)
    assert found.done == {"a"}
    assert [e["audio"] for e in lines(tmp_path)] == [os.path.abspath("y/a.wav")]


def test_a_folder_of_another_kind_of_run_is_refused(tmp_path):
    note_settings(tmp_path, {"data": "test.jsonl"})
    kept = contents(tmp_path)
    for resume, words in ((False, "earlier run"), (True, "other settings")):
        with pytest.raises(OptionError, match=words):
            prepare(tmp_path, {"a": 1}, resume, ENTRIES)
    assert contents(tmp_path) == kept


def test_names_that_are_not_utf_8_are_written_and_found_again(tmp_path):
    odd = [Entry(id="a\udcff.wav", audio="a\udcff.wav")]
    write(tmp_path, [transcribed(odd[0].id)], odd)
    assert write(tmp_path, [], odd, resume=True).done == {"a\udcff.wav"}


def test_a_second_run_is_kept_out_while_one_is_at_work(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "WAIT_S", 0.2)
    with claimed(tmp_path), pytest.raises(OptionError, match="another run"), claimed(tmp_path):
        pass
    with claimed(tmp_path):
        prepare(tmp_path, {}, False, ENTRIES)
    orphan = opened(tmp_path, ENTRIES, [], rank=1)  # its leading process was killed
    with pytest.raises(OptionError, match="another run"):
        merge(tmp_path, ENTRIES)
    orphan.close()
    merge(tmp_path, ENTRIES)


def test_a_line_that_is_no_result_is_named(tmp_path):
    write(tmp_path, [transcribed(ENTRIES[0].id)])
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write("what?\n")
    with pytest.raises(InputError, match=r"results\.jsonl, line 2"):
        prepare(tmp_path, {"a": 1}, True, ENTRIES)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_is_an_error_with_a_hint(tmp_path):
    one = write(tmp_path, [], end=False)
    with open("/dev/full", "ab", buffering=0) as full:
        one._file = full
        with pytest.raises(InputError, match=r"No space left.*--resume"):
            one.add(transcribed(ENTRIES[0].id))


# What the tests above would not be worth if they could not fail


@pytest.mark.parametrize("stage", ["format", "write"])
@pytest.mark.parametrize("name", ERRORS)
def test_a_recording_whose_files_cannot_be_made_fails_alone(name, stage, tmp_path, monkeypatch):
    bad, put, text = ENTRIES[1].id, jobs.write_file, jobs.FORMATS["txt"]

    def written(path, *given):
        if stage == "write" and path.name == "a-2.txt":
            raise ERRORS[name]()
        put(path, *given)

    def made(transcript, layout):
        if stage == "format" and transcript.source == bad:
            raise ERRORS[name]()
        return text(transcript, layout)

    monkeypatch.setattr(jobs, "write_file", written)
    monkeypatch.setitem(jobs.FORMATS, "txt", made)
    if name == "OSError":  # a disk that fails is the job's
        with pytest.raises(InputError, match="cannot write to"):
            write(tmp_path, [transcribed(e.id) for e in ENTRIES])
        return
    write(tmp_path, [transcribed(e.id) for e in ENTRIES])
    found = {line["source"]: line for line in lines(tmp_path)}
    message, kind = failure_of(name)
    assert message in found[bad]["error"] and found[bad]["kind"] == kind
    assert [one for one in found if "error" in found[one]] == [bad]


def test_a_folder_instead_of_a_file_fails_its_recording_alone(tmp_path):
    prepare(tmp_path, {"a": 1}, False, ENTRIES)
    (tmp_path / "a-2.txt").mkdir()
    folder = opened(tmp_path, ENTRIES)
    found = [folder.add(transcribed(entry.id)) for entry in ENTRIES]
    folder.close()
    assert [isinstance(one, Failure) for one in found] == [False, True, False, False]
    assert "is a folder" in found[1].error and folder.done == {e.id for e in ENTRIES} - {
        found[1].source
    }


class Unordered(ResultFolder):
    """Names in the order of the ends."""

    def add(self, result):
        names = jobs.Names(self._name(s) for s in self.done)
        self._names[result.source] = names.new(result.source)
        return super().add(result)

    def _name(self, source):
        return self._names.get(source, source)


class Unplaced(ResultFolder):
    """Places among what was left to do."""

    def add(self, result):
        found = super().add(result)
        self._order = dict.fromkeys(self._order, 0)
        return found


@pytest.mark.parametrize("broken", [Unordered, Unplaced, "sorted", "lines"])
def test_a_broken_folder_is_seen(monkeypatch, tmp_path, broken):
    if broken == "sorted":
        monkeypatch.setattr(journal.Lines, "ordered", lambda self, first: list(self))
    elif broken == "lines":  # no line is found again
        monkeypatch.setattr("mmdecode.runs.lines.lines_in", lambda *of: iter(()))
    else:
        monkeypatch.setitem(globals(), "ResultFolder", broken)
    with pytest.raises(AssertionError):
        test_results_end_in_the_order_of_the_input_and_with_its_indices_and_names(tmp_path)


# Recordings that crash their decoder


def test_a_journal_names_the_recording_whose_block_is_decoded_and_no_other(tmp_path):
    path = tmp_path / ".reading-0.tmp"
    note = InFlight(path)
    seen = []

    def read():
        for _ in range(2):
            seen.append(suspects_in([path]))
            yield 16_000, None
        raise InputError("a: is broken; mend it")

    blocks = watched(Source("a\udcff", read), note, "a", jobs.READ, "mend it").read()
    for _ in range(2):
        next(blocks)
        assert suspects_in([path]) == []
    with pytest.raises(InputError):
        next(blocks)
    assert suspects_in([path]) == []
    assert seen == [["a\udcff"]] * 2
    note.close()
    assert not path.exists()


@pytest.mark.timeout(120)
def test_a_recording_that_crashed_a_run_is_a_failure_of_the_next(tmp_path, kit):
    for name in ("bad.wav", "good.wav"):
        soundfile.write(tmp_path / name, kit.noise(1.0), kit.rate)
    # a decoder that the shipped clips crash
    crash = "import os, sys\nif 'bad' in sys.argv[1]: os.abort()\n"
    out = tmp_path / "out"
    entries = [Entry(id=name, audio=str(tmp_path / f"{name}.wav")) for name in ("bad", "good")]
    out.mkdir()
    prepare(out, {}, False, entries)
    (out / "parts").mkdir()
    (out / ".reading-0.tmp").write_text("bad")
    (out / "parts" / ".reading-1.tmp").write_text("")
    assert prepare(out, {}, True, entries).suspects == {"bad"}
    assert not list(out.rglob(".reading*"))
    for entry in entries:
        note = InFlight(tmp_path / "note", [entry.id])
        source = watched(recording(entry.audio, entry.id), note, entry.audio, crash, "mend it")
        if entry.id == "bad":
            with pytest.raises(InputError, match=r"bad\.wav: crashes the library"):
                next(source.read())
        else:
            assert sum(len(block) for block in blocks(source, kit.rate)) == kit.rate
        note.close()


# Several processes


LAUNCHED = {
    "torchrun": ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}, Shard(1, 3)),
    "one process": ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, None),
    "left over": ({"WORLD_SIZE": "2"}, None),
    "array": (
        {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "5"},
        Shard(3, 4),
    ),
    "array by steps": (
        {
            "SLURM_ARRAY_TASK_ID": "20",
            "SLURM_ARRAY_TASK_COUNT": "3",
            "SLURM_ARRAY_TASK_STEP": "10",
        },
        Shard(3, 3),
    ),
    "array with gaps": ({"SLURM_ARRAY_TASK_ID": "9", "SLURM_ARRAY_TASK_COUNT": "2"}, OptionError),
}


@pytest.mark.parametrize(("variables", "expected"), LAUNCHED.values(), ids=LAUNCHED)
def test_launchers_number_shards(variables, expected, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if expected is OptionError:
        with pytest.raises(OptionError, match="10/2"):
            shard_of(None)
    else:
        assert shard_of(None) == expected
    assert shard_of("2/8") == Shard(2, 8) and shard_of("1/1") is None


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/0", "-1/2", ""])
def test_what_is_no_shard_is_refused(text):
    with pytest.raises(OptionError, match="expected INDEX/COUNT"):
        shard_of(text)


def test_each_process_of_a_machine_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert local_device("auto") == "auto"
    monkeypatch.setenv("LOCAL_RANK", "3")
    asked = {"auto": "cuda:1", None: "cuda:1", "cuda": "cuda:1", "cuda:0": "cuda:0", "cpu": "cpu"}
    assert {name: local_device(name) for name in asked} == asked
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert local_device("auto") == "auto"


def test_alone_nothing_is_launched(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")  # left over from something else
    team = Team("cuda:3")
    assert (team.rank, team.size, team.device, team.leads) == (0, 1, "cuda:3", True)
    assert team.gather(1) == [1]
    team.leave()


def test_several_processes_without_accelerate_are_refused(monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtraError, match="accelerate"):
        Team("cpu")


@pytest.fixture
def recordings(tmp_path, kit):
    folder = tmp_path / "audio"
    folder.mkdir()
    for number in range(5):
        soundfile.write(folder / f"{number}.wav", kit.noise(0.5 + number, seed=number), kit.rate)
    (folder / "broken.mp3").write_text("no audio")
    return folder


def transcribe(*arguments, processes=None):
    launcher = "-m torch.distributed.run --nproc_per_node".split()
    command = [*launcher, str(processes)] if processes else []
    command += ["-m", "mmdecode", "transcribe", *map(str, arguments)]
    plain = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE.parents[1])}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env={**os.environ, **plain}
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_write_what_one_writes_and_one_continues_what_two_began(
    recordings, folder, tmp_path
):
    options = ["--model", folder, "--device", "cpu", "--max-new-tokens", "5"]
    alone, out = tmp_path / "alone", tmp_path / "out"
    assert transcribe(recordings, *options, "--out", alone).returncode == 1
    done = transcribe(recordings, *options, "--out", out, processes=2)
    assert done.returncode == 1
    assert done.stderr.count("all shards are merged, 1 failed") == 1, done.stderr
    assert done.stderr.count("failed: ") == 1
    assert contents(out) == contents(alone)
    # as if both had been killed when each had ended some
    entries = (out / "results.jsonl").read_bytes().splitlines(keepends=True)
    (out / "results.jsonl").unlink()
    (out / "parts").mkdir()
    (out / "parts" / "rank-0.jsonl").write_bytes(entries[4] + entries[0])
    (out / "parts" / "rank-1.jsonl").write_bytes(entries[3] + entries[1][:40])
    again = transcribe(recordings, *options, "--out", out, "--resume")
    assert "2 transcribed, 3 done before, 1 failed" in again.stderr
    assert contents(out) == contents(alone)


# Files that are not ours, and recordings that changed


def test_a_text_that_we_did_not_write_is_refused_before_anything_is_made(tmp_path, kit):
    (tmp_path / "call1.txt").write_text("written by hand")
    entry = Entry(id="call1.wav", audio=str(tmp_path / "call1.wav"))
    with pytest.raises(OptionError, match=r"call1\.txt: there already, and not written by mmdec"):
        prepare(tmp_path, {}, False, [entry], ["txt"])
    assert [path.name for path in tmp_path.iterdir()] == ["call1.txt"]
    assert (tmp_path / "call1.txt").read_text() == "written by hand"
    prepare(tmp_path, {}, False, [entry], ["txt"], overwrite=True)
    folder = opened(tmp_path, [entry], settings={"b": 1}, overwrite=True)
    folder.add(transcribed("call1.wav"))
    folder.close()
    assert (tmp_path / "call1.txt").read_text() != "written by hand"


def test_a_recording_that_changed_under_its_path_is_transcribed_again(tmp_path):
    audio, out = tmp_path / "a.wav", tmp_path / "out"
    audio.write_bytes(b"first")
    entries = [Entry(id="a.wav", audio=str(audio))]

    def run():
        prepared = prepare(out, {}, True, entries, ["txt"])
        folder = opened(out, entries)
        todo = [entry for entry in entries if entry.id not in folder.done]
        for entry in todo:
            source = Source(entry.id, lambda: iter([(8_000, audio.read_bytes())]))
            [(_, content)] = folder.sources.noting(source, folder.inputs(entry)).read()
            folder.add(transcribed(entry.id, content.decode()))
        folder.close()
        merge(out, entries)
        return prepared.changed

    out.mkdir()
    assert run() == set()
    [line] = lines(out)
    assert (line["size"], len(line["digest"])) == (5, 32)
    os.utime(audio)  # another time alone is no change
    assert run() == set()
    audio.write_bytes(b"other")  # of the same size
    assert run() == {"a.wav"}
    [line] = lines(out)
    assert line["text"] == "other" and "other" in (out / "a.txt").read_text()
    audio.unlink()  # what vanished stays
    assert run() == set() and len(lines(out)) == 1


def test_what_processes_ended_over_is_noted_once_whatever_their_number(tmp_path):
    entries = [Entry(id=name, audio=name) for name in "abc"]
    write(tmp_path, [transcribed("c")], entries, rank=0, end=False)
    for rank, over in ((0, ["a", "c"]), (3, ["b"])):
        note = {"alone": {"c": 1}, "batch": over}
        home = tmp_path / "parts" if rank else tmp_path
        (home / f".decoding-{rank}").write_text(json.dumps(note))
    for _ in range(3):  # each resumed by one process, and stopped before it decodes anything
        assert prepare(tmp_path, {"a": 1}, True, entries).alone == {"a": 0, "b": 1}
        assert [file.name for file in tmp_path.glob(".decoding-*")] == [".decoding-0"]
    prepared = prepare(tmp_path, {"a": 1}, True, entries)
    processes = [
        opened(tmp_path, entries, [], rank=rank, alone=prepared.alone) for rank in range(2)
    ]
    for process, name in zip(processes, "ab", strict=True):
        process.add(transcribed(name))
        process.close()
    ResultFolder(tmp_path, {"a": 1}, entries).finish()
    assert not [*tmp_path.glob(".decoding-*")]
    assert [line["id"] for line in lines(tmp_path)] == ["a", "b", "c"]

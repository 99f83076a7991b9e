"""Processes that each decode a share of a folder, at any times, give the files of one process."""

import contextlib
import json
import os
import threading
from pathlib import Path

import pytest

from mmdecode.errors import InputError, OptionError
from mmdecode.runs import locks, work
from mmdecode.runs.distributed import Shard
from mmdecode.runs.files import claimed
from mmdecode.runs.journal import Journal
from mmdecode.runs.locks import Claim, make_folder
from mmdecode.runs.units import Unit
from mmdecode.runs.work import run
from tests.runs.stand_in import folder_of, load, names
from tests.support.files import contents, json_lines

CLIPS = names(40, **{"raise": 7})


def shard(out, index, count=3, clips=CLIPS, loader=load, **how):
    return run(folder_of(out, clips, **how), loader, shard=Shard(index, count))


@contextlib.contextmanager
def prepared_by_another(out):
    """A folder that the first of three shards has prepared and still has."""
    with claimed(out, shared=True) as claim:
        first = folder_of(out, CLIPS, resume=True)
        first.begin()
        first.shares = 3
        prepared = first.plan()
        claim.share()
        yield prepared


@pytest.fixture
def whole(tmp_path):
    run(folder_of(tmp_path / "whole", CLIPS), load)
    return contents(tmp_path / "whole")


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (2, 2, 3, 1)])
def test_shards_one_after_the_other(order, whole, tmp_path):
    out = tmp_path / "out"
    tallies = [shard(out, index) for index in order]
    assert [tally.others_failed for tally in tallies[:-1]] == [None] * (len(order) - 1)
    assert sum(tally.done for tally in tallies) == 39
    assert [tally.fine for tally in tallies] == [True] * (len(order) - 1) + [False]
    assert contents(out) == whole
    assert "shard 1/3: " in tallies[order.index(1)].counted("done")
    assert "all shards are merged, 1 failed" in tallies[-1].counted("done")


def test_shards_at_once(whole, tmp_path):
    out, tallies, gate = tmp_path / "out", {}, threading.Barrier(3)

    def slowly():
        gate.wait(20)  # all have the folder
        return load(0.01)

    def go(index):
        tallies[index] = shard(out, index, loader=slowly)

    threads = [threading.Thread(target=go, args=(index,)) for index in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert contents(out) == whole
    assert sorted(tally.others_failed is None for tally in tallies.values()) == [False, True, True]
    assert sum(tally.done for tally in tallies.values()) == 39


def test_one_that_joins_decodes_its_share_alone_and_merges_nothing(whole, tmp_path):
    out = tmp_path / "out"
    with prepared_by_another(out):
        tally = shard(out, 2, clips=[*CLIPS, "new-1"])  # new: for a later run
        assert tally.others_failed is None
        parts = [path.name for path in (out / "parts").glob("rank-*")]
        assert parts == ["rank-2.jsonl"] and not json_lines(out / "results.jsonl")
        with pytest.raises(OptionError, match="another run is writing"), claimed(out):
            pass
    run(folder_of(out, CLIPS, resume=True), load)
    assert contents(out) == whole


def test_one_that_has_given_the_folder_back_does_not_take_it_again(tmp_path, monkeypatch):
    """The last one, which merges, could find it taken just then, and nobody would merge."""
    alone, answers = Claim.alone, []
    monkeypatch.setattr(Claim, "alone", lambda self: answers.append(alone(self)) or answers[-1])
    with prepared_by_another(tmp_path):
        answers.clear()
        shard(tmp_path, 2)
        assert answers == [False, False]  # when it begins and when it ends


@pytest.mark.parametrize("another", [False, True])
def test_a_shard_that_fails_removes_what_it_made_unless_another_has_the_folder(another, tmp_path):
    out = tmp_path / "out"

    def fails():
        if another:  # it comes before this one ends
            stack.enter_context(claimed(out, shared=True))
        raise MemoryError

    with contextlib.ExitStack() as stack:
        with pytest.raises(MemoryError):
            shard(out, 1, loader=fails)
        assert out.exists() == another
        assert not another or (out / "run.json").exists()


def test_what_a_shard_ended_over_is_known_to_its_next_process(tmp_path):
    out = tmp_path / "out"
    with prepared_by_another(out) as prepared:
        [mine, *_] = prepared.work[1::3]
        bad = mine[1][1]
        (out / "parts").mkdir(exist_ok=True)
        note = {"alone": {bad: 1}, "batch": [bad]}
        (out / "parts" / ".decoding-2").write_text(json.dumps(note))
        tally = shard(out, 2)
    [failure] = tally.failures.values()
    assert failure.source == bad
    assert "2 times while it decoded this input alone" in failure.error


def test_a_shard_that_was_killed_in_a_line_goes_on_after_it(whole, tmp_path):
    out = tmp_path / "out"
    with prepared_by_another(out) as prepared:
        killed = folder_of(out, CLIPS)
        killed.open(prepared._replace(work=prepared.work[1::3]), "2")
        for unit in killed.units()[:2]:
            list(work.decoded(killed, load(), unit, lambda amount: None))
        killed.close()
        with (out / "parts" / "rank-2.jsonl").open("a") as file:
            file.write('{"source": "clip')
        tally = shard(out, 2)
        done = sum(len(ids) for _, ids in prepared.work[1::3]) - 4
        assert (tally.done_before, tally.done) == (4, done)
    for index in (1, 3):
        shard(out, index)
    assert contents(out) == whole


def test_what_another_shard_is_at_is_no_crash(tmp_path):
    out = tmp_path / "out"
    with prepared_by_another(out) as prepared:
        living = folder_of(out, CLIPS)
        living.open(prepared._replace(work=prepared.work[::3]), "1")
        theirs = prepared.work[0][1][:1]
        with living.batches.decoding(theirs):
            one = folder_of(out, CLIPS, resume=True)
            one.begin()
            assert not one.joined("2").alone
            assert one.joined("1").alone == {theirs[0]: 1}  # were it an earlier process
        living.close()


def test_files_that_an_ended_worker_read_are_suspects_of_the_next(tmp_path):
    folder = folder_of(tmp_path, CLIPS)
    prepared = folder.prepare()
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / ".reading-0-1.tmp").write_bytes(b"clip-3\0clip-30")
    with contextlib.closing(folder.open(prepared, "0-2")):
        unit = Unit([folder.given[name] for name in ("clip-2", "clip-3")], 2)
        assert [one.items for one in folder.remaining(unit)] == [unit.items]
        assert set(folder.reading.suspects) == {"clip-3"}


def test_a_run_that_has_the_folder_alone_is_waited_for_and_then_named(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE_S", 0.3)
    with claimed(tmp_path), pytest.raises(OptionError, match="another run is writing"):
        shard(tmp_path, 1)
    monkeypatch.setattr(locks, "PATIENCE_S", 20.0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(claimed(tmp_path))
        threading.Timer(0.3, stack.pop_all().close).start()
        shard(tmp_path, 1, 2)


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    import fcntl

    def without(handle, kind):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without)
    with pytest.raises(InputError, match=r"has no locks \(No locks available\).*NFS 4"):
        run(folder_of(tmp_path / "out", CLIPS), load)


@pytest.mark.parametrize("out", ["s3://bucket/texts", "gs:/bucket", "https://a.org/b"])
def test_an_object_store_is_refused_by_name(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"bucket|a\.org") as caught:
        run(folder_of(Path(out), CLIPS), load)
    assert "is a URL; expected a folder" in str(caught.value) and not any(tmp_path.iterdir())


def test_a_shard_that_prints_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"shard 1/2 writes results to a folder; give --out"):
        run(folder_of(tmp_path, CLIPS), load, temporary=True, shard=Shard(1, 2))


def always(self):
    return True


@pytest.mark.parametrize(
    ("what", "name", "mistake"),
    [
        (Claim, "alone", always),
        (Journal, "merge", lambda self, *_: None),
    ],
)
def test_broken_sharing_is_noticed(what, name, mistake, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(what, name, mistake)
    with pytest.raises((AssertionError, OptionError, FileNotFoundError)):
        test_one_that_joins_decodes_its_share_alone_and_merges_nothing(whole, tmp_path)


def test_runs_that_leave_nothing_take_no_folder_from_those_that_begin(tmp_path):
    """An empty folder is removed by the one that made it, while others are about to lock it."""
    failed = []

    def begin():
        try:
            for _ in range(60):
                with claimed(tmp_path / "out", shared=True):
                    pass
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("inner", ["out", "out/inner"])
def test_a_folder_that_goes_while_it_is_made_is_made_again(inner, tmp_path, monkeypatch):
    create, removed = os.mkdir, []

    def mkdir(path, *args):
        """Removes the outer folder, once it is there and another one is about to be created."""
        if (tmp_path / "out").exists() and not removed:
            removed.append((tmp_path / "out").rmdir())
            raise FileExistsError if inner == "out" else FileNotFoundError
        create(path, *args)

    if inner == "out":
        (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "mkdir", mkdir)
    make_folder(tmp_path / inner)
    assert removed
    assert (tmp_path / inner).is_dir()


def test_a_file_where_a_folder_should_be_is_an_error(tmp_path):
    (tmp_path / "out").touch()
    for folder in ("out", "out/inner"):
        with pytest.raises((FileExistsError, NotADirectoryError)):
            make_folder(tmp_path / folder)


def test_a_shard_with_other_items_is_refused_and_changes_nothing(tmp_path):
    shard(tmp_path / "out", 1)
    before = contents(tmp_path / "out")
    with pytest.raises(
        OptionError, match="40 items, of which this shard was not given 36, such as clip-10;"
    ):
        shard(tmp_path / "out", 2, clips=CLIPS[:4])
    assert contents(tmp_path / "out") == before
    tally = shard(tmp_path / "out", 2, clips=CLIPS[:4], resume=True)
    assert tally.done_before + tally.done <= 4

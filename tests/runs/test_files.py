"""Files are written atomically, and never over files that are not ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmdecode.errors import OptionError
from mmdecode.runs import files
from mmdecode.runs.files import (
    LISTING,
    MAKER,
    claimed,
    is_own,
    note_settings,
    open_append,
    overwriting,
    refuse_foreign,
    refuse_foreign_in,
    write_file,
    write_folder,
)
from mmdecode.runs.locks import LOCK

MARKED = {
    "page.html": f'<!doctype html><meta name="generator" content="{MAKER}"><p>page',
    "table.md": f"<!-- made by {MAKER} -->\n| a |\n",
    "summary.json": f'{{"made_by": "{MAKER}"}}\n',
}


def test_a_new_file_is_written_with_its_folders(tmp_path):
    write_file(tmp_path / "a" / "b.txt", "text")
    assert (tmp_path / "a" / "b.txt").read_text() == "text"


def test_a_file_of_somebody_else_stays_and_is_named(tmp_path):
    (tmp_path / "call1.txt").write_text("by hand")
    with pytest.raises(OptionError, match=r"call1\.txt: there already.*--overwrite"):
        write_file(tmp_path / "call1.txt", "by machine")
    assert (tmp_path / "call1.txt").read_text() == "by hand"
    assert [path.name for path in tmp_path.iterdir()] == ["call1.txt"]


def test_overwrite_replaces_it(tmp_path):
    (tmp_path / "call1.txt").write_text("by hand")
    write_file(tmp_path / "call1.txt", "by machine", overwrite=True)
    assert (tmp_path / "call1.txt").read_text() == "by machine"


def test_a_file_of_ours_is_replaced_until_somebody_changes_it(tmp_path):
    path = tmp_path / "call1.txt"
    write_file(path, "first")
    write_file(path, "second")
    path.write_text("corrected by hand")
    with pytest.raises(OptionError, match="changed since"):
        write_file(path, "third")
    assert path.read_text() == "corrected by hand"


def test_a_file_of_ours_under_another_name_is_somebody_elses(tmp_path):
    write_file(tmp_path / "a.txt", "text")
    (tmp_path / "b.txt").write_text("text")
    assert is_own(tmp_path / "a.txt")
    assert not is_own(tmp_path / "b.txt")


@pytest.mark.parametrize("name", MARKED)
def test_a_file_whose_head_names_the_maker_is_ours_and_needs_no_listing(tmp_path, name):
    write_file(tmp_path / name, MARKED[name])
    write_file(tmp_path / name, MARKED[name] + "again")
    assert not (tmp_path / LISTING).exists()
    (tmp_path / name).write_text("mmdecode is named, but not as the maker")
    assert not is_own(tmp_path / name)


def test_a_crash_between_listing_and_writing_makes_nothing_ours(tmp_path):
    path = tmp_path / "call1.txt"
    code = """
import os, sys
from pathlib import Path
from mmdecode.runs.files import write_file
Path.replace = lambda *_: os._exit(9)
write_file(Path(sys.argv[1]), "by machine")
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=os.environ)
    assert done.returncode == 9 and not path.exists()
    path.write_text("by hand")
    assert not is_own(path)


def test_a_link_that_leads_nowhere_is_somebody_elses(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "unplugged" / "a.txt")
    with pytest.raises(OptionError, match="there already"):
        write_file(tmp_path / "a.txt", "text")
    assert (tmp_path / "a.txt").is_symlink()


def test_an_empty_file_has_nothing_to_lose(tmp_path):
    (tmp_path / "a.txt").touch()
    write_file(tmp_path / "a.txt", "text")
    assert (tmp_path / "a.txt").read_text() == "text"


def test_a_folder_instead_of_a_file_is_refused(tmp_path):
    (tmp_path / "a.html").mkdir()
    for overwrite in (False, True):
        with pytest.raises(OptionError, match="is a folder; expected a file"):
            write_file(tmp_path / "a.html", "text", overwrite)


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="no devices on this system")
def test_a_device_is_written_into_and_not_replaced():
    write_file(Path("/dev/null"), "text")
    assert not Path("/dev/null").is_file()


def test_names_as_long_as_can_be_and_with_line_breaks_can_be_written_twice(tmp_path):
    for name in ("x" * 255, "two\nlines"):
        write_file(tmp_path / name, "first")
        write_file(tmp_path / name, "second")
        assert (tmp_path / name).read_text() == "second"


def test_what_is_appended_to_stays_ours_whatever_it_holds(tmp_path):
    path = tmp_path / "results.jsonl"
    for line in (b"one\n", b"two\n"):
        with open_append(path) as file:
            file.write(line)
    assert path.read_bytes() == b"one\ntwo\n"
    write_file(path, "sorted")
    assert path.read_text() == "sorted"


def test_nothing_is_appended_to_a_file_of_somebody_else(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("theirs\n")
    with pytest.raises(OptionError, match="there already"):
        open_append(path)
    assert path.read_text() == "theirs\n"
    with overwriting(), open_append(path) as file:
        file.write(b"ours\n")
    assert path.read_text() == "ours\n"


def saved(folder):
    (folder / "config.json").write_text("{}")
    (folder / "vq").mkdir()
    (folder / "vq" / "model.safetensors").write_bytes(b"weights")


def test_a_folder_that_another_library_fills_follows_the_same_rule(tmp_path):
    out = tmp_path / "model"
    write_folder(out, saved)
    write_folder(out, saved)
    assert sorted(p.name for p in out.rglob("*.*") if p.name != LISTING) == [
        "config.json",
        "model.safetensors",
    ]
    (out / "config.json").write_text("changed by hand")
    with pytest.raises(OptionError, match=r"the computed files are in .*computed-\d+") as refused:
        write_folder(out, saved)
    assert (out / "config.json").read_text() == "changed by hand"
    kept = Path(str(refused.value).split("computed files are in ")[1])
    assert (kept / "vq" / "model.safetensors").read_bytes() == b"weights"
    write_folder(out, saved, overwrite=True)
    assert (out / "config.json").read_text() == "{}"
    assert not list(tmp_path.rglob(".*.tmp"))


def test_a_folder_whose_filling_fails_is_not_made(tmp_path):
    with pytest.raises(ZeroDivisionError):
        write_folder(tmp_path / "model", lambda folder: 1 / 0)
    assert not list(tmp_path.iterdir())


def test_a_folder_saved_with_parts_of_our_own_keeps_one_listing(tmp_path):
    def fill(folder):
        saved(folder)
        write_folder(folder / "drafter", saved)

    for _ in range(2):
        write_folder(tmp_path, fill)
    assert is_own(tmp_path / "drafter" / "vq" / "model.safetensors")
    assert is_own(tmp_path / "config.json")


def test_what_could_not_be_written_leaves_no_folder(tmp_path):
    def fails(folder):
        raise ZeroDivisionError

    def claims(folder):
        with claimed(folder):
            raise ZeroDivisionError

    out = tmp_path / "a" / "b"
    for attempt in (
        lambda: write_file(out / "c" / "x.txt", None),
        lambda: write_folder(out, fails),
        lambda: claims(out),
    ):
        with pytest.raises((ZeroDivisionError, TypeError)):
            attempt()
        assert not list(tmp_path.iterdir())


def test_the_folder_where_the_user_stands_can_be_filled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(Path(), saved)
    assert (tmp_path / "vq" / "model.safetensors").exists()


def test_many_foreign_files_are_named_up_to_five(tmp_path):
    paths = [tmp_path / f"{n}.txt" for n in range(7)]
    for path in paths[1:]:
        path.write_text("theirs")
    with pytest.raises(OptionError, match=r"1\.txt.*5\.txt and 1 more"):
        refuse_foreign(paths)
    refuse_foreign(paths[:1])
    refuse_foreign(paths, overwrite=True)


def test_a_folder_for_results_of_unknown_names_holds_none_of_somebody_else(tmp_path):
    refuse_foreign_in(tmp_path / "new")
    write_file(tmp_path / "card.json", "{}")
    refuse_foreign_in(tmp_path)
    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(OptionError, match=r"notes\.md"):
        refuse_foreign_in(tmp_path)
    with pytest.raises(OptionError, match="is a file; expected a folder"):
        refuse_foreign_in(tmp_path / "notes.md", overwrite=True)


def test_ten_thousand_files_are_asked_about_with_one_look_at_their_folder(tmp_path, monkeypatch):
    looks = []
    listdir = os.listdir
    monkeypatch.setattr(files.os, "listdir", lambda path: looks.append(path) or listdir(path))
    refuse_foreign(tmp_path / f"{n}.txt" for n in range(10_000))
    assert len(looks) == 1


def test_a_file_written_ten_thousand_times_is_read_from_the_end_of_its_listing(tmp_path):
    lines = "".join(f"{'0' * 32} {n}.txt\n" for n in range(10_000))
    (tmp_path / LISTING).write_text(lines)
    for n in range(200):
        write_file(tmp_path / "a.txt", f"{n}")
    sizes = [size for size, known in files._listings.values() if b"9999.txt" in known]
    assert sizes[0] >= len(lines)
    (tmp_path / LISTING).write_text("")
    assert not is_own(tmp_path / "a.txt")


def test_a_listing_that_replaces_another_is_read_from_its_beginning(tmp_path):
    first = tmp_path / "first"
    write_file(first / "a.txt", "a")
    open_append(first / "lines.jsonl").close()
    assert is_own(first / "a.txt")
    later = tmp_path / "later"
    for name in ("b.txt", "c.txt", "d.txt"):
        write_file(later / name, name)
    # as a file system does that gives the number of a removed file to the next one
    (first / LISTING).write_bytes((later / LISTING).read_bytes())
    (first / "b.txt").write_text("b.txt")
    assert is_own(first / "b.txt")
    assert not is_own(first / "a.txt")
    (first / "lines.jsonl").write_text("by hand")
    assert not is_own(first / "lines.jsonl")


def test_a_claim_removes_what_a_killed_run_had_begun_to_write_and_nothing_else(tmp_path):
    (tmp_path / ".123-0.tmp").write_text("half")
    (tmp_path / ".123-1.tmp").mkdir()
    (tmp_path / ".123-1.tmp" / "model.bin").write_text("half")
    (tmp_path / ".mine.tmp").write_text("mine")
    with claimed(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.tmp", LOCK]
    assert [path.name for path in tmp_path.iterdir()] == [".mine.tmp"]


def test_a_run_without_a_result_takes_with_it_what_it_made_and_nothing_else(tmp_path):
    out = tmp_path / "a" / "out"

    def fails(write):
        with pytest.raises(ZeroDivisionError), claimed(out):
            note_settings(out, {"seed": 0})
            with open_append(out / "results.jsonl") as file:
                file.write(write)
            raise ZeroDivisionError

    fails(b"")
    assert not list(tmp_path.iterdir())
    out.mkdir(parents=True)
    (out / "theirs").touch()
    (out / ".theirs").touch()
    fails(b"")
    assert {path.name for path in out.iterdir()} == {"theirs", ".theirs"}
    fails(b"a result\n")
    kept = {path.name for path in out.iterdir()}
    assert kept == {"theirs", ".theirs", "run.json", "results.jsonl", LISTING}
    fails(b"")
    assert {path.name for path in out.iterdir()} == kept

"""Captions of a stream: readable at any moment, in order, and never over another file."""

import os
import re
import signal
import time

import pytest

from mmdecode.asr.output.captions import Captions, refuse_existing
from mmdecode.asr.results import Word
from mmdecode.asr.streaming import Update
from mmdecode.errors import InputError, OptionError
from mmdecode.runs.files import write_file

TIME = r"(\d\d):(\d\d):(\d\d)\.(\d\d\d)"


def cues_of(data):
    """Start and end in ms, and text, of the complete cues of a WebVTT file."""
    head, *blocks = data.decode().split("\n\n")
    assert head == "WEBVTT"
    found = []
    for block in blocks[:-1]:  # what comes after the last empty line is not complete
        times, *lines = block.split("\n")
        match = re.fullmatch(f"{TIME} --> {TIME}", times)
        assert match and lines and all(lines), block
        h1, m1, s1, t1, h2, m2, s2, t2 = map(int, match.groups())
        start, end = ((h * 60 + m) * 60_000 + s * 1000 + t for h, m, s, t in
                      ((h1, m1, s1, t1), (h2, m2, s2, t2)))  # fmt: skip
        text = " ".join(lines).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        found.append((start, end, text))
    return found


def update(audio_s, committed, provisional="", ends=None):
    words, others = ([f" {word}" for word in text.split()] for text in (committed, provisional))
    timed = ends and [
        Word(text=word, start_s=start, end_s=end, confidence=1.0)
        for word, (start, end) in zip(words, ends, strict=True)
    ]
    return Update(
        audio_s=audio_s, ready_s=audio_s, committed=words, provisional=others, words=timed
    )


SPOKEN = [
    update(1, "", "Wie"),
    update(2, "Wie schön <das>", "--> ist"),
    update(3, "--> ist &", ""),
    update(4, "", ""),
    update(9, "", "Später"),
    update(10, "Später 你好", "mehr"),
    update(10.5, "mehr und noch viel mehr Wörter, als in eine Zeile gehen: " * 3, ""),
]


@pytest.fixture
def whole(tmp_path):
    captions = Captions(tmp_path / "a.vtt")
    for one in SPOKEN:
        captions.add(one)
    captions.close()
    return (tmp_path / "a.vtt").read_bytes()


def test_cues_hold_every_word_once_in_order_without_overlap(whole):
    found = cues_of(whole)
    text = " ".join(text for _, _, text in found)
    assert text.split() == "".join(one.text for one in SPOKEN).split()
    edges = [edge for start, end, _ in found for edge in (start, end)]
    assert edges == sorted(edges) and all(start < end for start, end, _ in found)


def test_without_word_times_a_cue_begins_where_its_words_were_first_shown(whole):
    found = cues_of(whole)
    assert [cue[:2] for cue in found[:3]] == [(0, 2000), (2000, 3000), (4000, 10_000)]


def test_a_file_that_is_cut_off_at_any_byte_is_readable_up_to_its_last_whole_cue(whole):
    found = cues_of(whole)
    counts = set()
    for length in range(len(b"WEBVTT\n\n"), len(whole) + 1):
        cut = whole[:length]
        known = cues_of(cut[: cut.rindex(b"\n\n") + 2])
        assert known == found[: len(known)]
        assert len(known) == cut.count(b"\n\n") - 1
        counts.add(len(known))
    assert counts == set(range(len(found) + 1))


def test_the_file_grows_with_every_update_that_commits_words(tmp_path):
    captions, counts = Captions(tmp_path / "a.vtt"), []
    for one in SPOKEN:
        captions.add(one)
        counts.append(len(cues_of((tmp_path / "a.vtt").read_bytes())))
    captions.close()
    assert counts[:6] == [0, 1, 2, 2, 2, 3] and counts[6] > 4


def test_cues_have_the_times_of_words_that_have_them(tmp_path):
    captions = Captions(tmp_path / "a.vtt")
    captions.add(update(3, "a b", ends=[(0.5, 0.9), (1.0, 1.4)]))
    captions.add(update(4, "c", ends=[(1.2, 1.3)]))  # timed before the end of the last cue
    captions.add(update(5, "d e", ends=[(2.0, 2.1), (2.2, 2.9)]))
    captions.close()
    found = cues_of((tmp_path / "a.vtt").read_bytes())
    assert found == [
        (500, 1400, "a b"),
        (1400, 1500, "c"),
        (2000, 2900, "d e"),
    ]


def test_a_process_that_is_killed_leaves_whole_cues(tmp_path):
    path = tmp_path / "a.vtt"
    for wait_s in (0.01, 0.03):
        child = os.fork()
        if not child:
            captions = Captions(path, overwrite=True)
            for number in range(1, 10**6):
                captions.add(update(number, f"word{number} and more of it"))
            os._exit(0)
        until = time.monotonic() + 20
        while not path.exists() or len(path.read_bytes()) < 100:
            assert time.monotonic() < until
        time.sleep(wait_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        data = path.read_bytes()
        assert data.endswith(b"\n\n")
        assert [text.split()[0] for _, _, text in cues_of(data)] == [
            f"word{number}" for number in range(1, data.count(b"-->") + 1)
        ]
        path.unlink()


@pytest.mark.parametrize("ours", [False, True])
def test_captions_that_are_there_are_kept_unless_asked(tmp_path, ours):
    path = tmp_path / "a.vtt"
    write_file(path, "WEBVTT\n\nold") if ours else path.write_text("WEBVTT\n\nold")
    for refused in (lambda: refuse_existing([path]), lambda: Captions(path)):
        with pytest.raises(OptionError, match=r"a\.vtt: there already; .* --overwrite"):
            refused()
    assert path.read_text() == "WEBVTT\n\nold"
    captions = Captions(path, overwrite=True)
    captions.add(update(1, "new"))
    captions.close()
    assert [text for _, _, text in cues_of(path.read_bytes())] == ["new"]


def test_a_folder_of_that_name_and_a_full_disk_are_errors_of_a_line(tmp_path, monkeypatch):
    (tmp_path / "b.vtt").mkdir()
    with pytest.raises(OptionError, match="is a folder; expected a file"):
        Captions(tmp_path / "b.vtt", overwrite=True)
    captions = Captions(tmp_path / "a.vtt")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mmdecode.asr.output.captions.append_line", full)
    with pytest.raises(InputError, match=r"cannot write to .*a\.vtt: No space left"):
        captions.add(update(1, "a"))
    captions.close()

"""Output formats and the names of output files."""

import json
import re
from pathlib import Path

import pytest

from mmdecode.asr.formats import FORMATS, file_stem, parse_formats, write_atomically
from mmdecode.asr.transcriber import Segment, Transcript
from mmdecode.errors import OptionError


@pytest.fixture
def transcript():
    segments = [
        Segment(start_s=0.0, end_s=1.5, text="Hello  there,\nyou", tokens=[1]),
        Segment(start_s=2.0, end_s=2.0, text=" ", tokens=[2]),
        Segment(start_s=3661.0426, end_s=3660.0, text="a --> b <i> & ü", tokens=[3]),
    ]
    return Transcript(
        source="talk.wav",
        index=0,
        text="Hello there",
        segments=segments,
        language="en",
        duration_s=3700.0,
        tokens=[1, 2, 3],
        stats={"windows": 1, "attempts": 1, "tokens": 3},
    )


def test_srt_numbers_spoken_segments_and_never_ends_before_it_starts(transcript):
    assert FORMATS["srt"](transcript) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there, you\n\n"
        "2\n01:01:01,043 --> 01:01:01,043\na -> b <i> & ü\n\n"
    )


def test_vtt_escapes_markup(transcript):
    assert FORMATS["vtt"](transcript) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello there, you\n\n"
        "01:01:01.043 --> 01:01:01.043\na -> b &lt;i> &amp; ü\n\n"
    )


def test_text_and_table_have_one_line_per_segment(transcript):
    assert FORMATS["txt"](transcript) == "Hello there, you\na --> b <i> & ü\n"
    rows = FORMATS["tsv"](transcript).splitlines()
    assert rows[:2] == ["start\tend\ttext", "0\t1500\tHello there, you"]
    assert all(row.count("\t") == 2 for row in rows)


def test_json_holds_everything(transcript):
    found = json.loads(FORMATS["json"](transcript))
    assert found["segments"][2]["text"] == "a --> b <i> & ü"
    assert found["stats"]["windows"] == 1
    lines = [json.loads(line) for line in FORMATS["jsonl"](transcript).splitlines()]
    assert [line["tokens"] for line in lines] == [[1], [2], [3]]


def test_formats_are_parsed_and_unknown_ones_are_named():
    assert parse_formats("srt, TXT,srt") == ["srt", "txt"]
    with pytest.raises(OptionError, match="did you mean 'srt'"):
        parse_formats("str")
    with pytest.raises(OptionError, match="expected some of"):
        parse_formats(",")


HOSTILE = [
    "../../etc/passwd", "..", ".", "/", "", "a\0b.wav", "C:\\x\\con.wav", ".hidden.wav",
    "run.wav", "results.mp3", "nul", "x" * 400 + ".wav", "ü" * 300 + ".wav", "a\nb.wav", "~.wav",
    "  .wav", "\u202egpj.wav", "\ud800.wav",
]  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE, ids=lambda s: ascii(s)[:25])
def test_names_stay_inside_the_folder_whatever_the_input_is_called(tmp_path, source):
    stem = file_stem(source)
    path = tmp_path / f"{stem}.json"
    path.write_text("x")
    assert path.resolve().parent == tmp_path.resolve()
    assert re.fullmatch(r"[^/\\\x00-\x1f]+", stem)
    assert len(stem.encode()) <= 130
    assert stem.casefold() not in ("run", "results", "con", "nul")


def test_equal_names_get_numbers_whatever_their_case():
    taken = []
    for source in ("a/x.wav", "b/x.wav", "c/X.flac", "d/x-2.wav"):
        taken.append(file_stem(source, taken))
    assert taken == ["x", "x-2", "X-3", "x-2-2"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_atomically(path, "first")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "second \ud800")

    def fails(self, target):
        raise OSError("the disk is gone")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="gone"):
        write_atomically(path, "third")
    assert path.read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]

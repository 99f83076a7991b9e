"""Output formats and the names of output files."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from mmdecode.asr.output.formats import FORMATS, Names, file_stem, parse_formats
from mmdecode.asr.results import Segment, Transcript
from mmdecode.errors import OptionError
from mmdecode.runs.files import LISTING, write_file


def of(*segments, **fields):
    """A transcript with these segments."""
    plain = {
        "source": "talk.wav",
        "index": 0,
        "text": " ".join(s.text for s in segments),
        "segments": list(segments),
        "language": "en",
        "duration_s": 3700.0,
        "tokens": [t for s in segments for t in s.tokens],
        "stats": {"windows": 1, "attempts": 1, "tokens": 3},
    }
    return Transcript(**plain | fields)


@pytest.fixture
def transcript():
    return of(
        Segment(start_s=0.0, end_s=1.5, text="Hello  there,\nyou", tokens=[1]),
        Segment(start_s=2.0, end_s=2.0, text=" ", tokens=[2]),
        Segment(start_s=3661.0426, end_s=3663.0, text="a --> b <v i> & ü\x07", tokens=[3]),
    )


def test_srt_numbers_spoken_segments_and_keeps_its_arrow_for_times(transcript):
    assert FORMATS["srt"](transcript) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there, you\n\n"
        "2\n01:01:01,043 --> 01:01:03,000\na -> b <v i> & ü\n\n"
    )


def test_vtt_escapes_markup_and_arrows(transcript):
    assert FORMATS["vtt"](transcript) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello there, you\n\n"
        "01:01:01.043 --> 01:01:03.000\na --&gt; b &lt;v i&gt; &amp; ü\n\n"
    )


def test_text_and_table_have_one_line_per_segment():
    result = of(
        Segment(start_s=0.0, end_s=1.5, text="Hello\tthere,\nyou", tokens=[1]),
        Segment(start_s=2.0, end_s=2.0, text=" ", tokens=[2]),
        Segment(start_s=3.00049, end_s=2.0, text="a\u2028b\r\x85c\x1e\x00d", tokens=[3]),
    )
    assert FORMATS["txt"](result) == "Hello there, you\na b c d\n"
    assert (
        FORMATS["tsv"](result)
        == "start\tend\ttext\n0\t1500\tHello there, you\n3000\t3000\ta b c d\n"
    )


def test_a_recording_without_speech_gives_empty_files_that_are_valid():
    silent = of()
    assert [FORMATS[kind](silent) for kind in ("txt", "srt", "vtt", "tsv", "jsonl")] == [
        "", "", "WEBVTT\n\n", "start\tend\ttext\n", "",
    ]  # fmt: skip
    assert json.loads(FORMATS["json"](silent))["segments"] == []


@pytest.mark.parametrize("missing", ["avg_logprob", "no_speech_prob"])
def test_the_json_of_openai_whisper_is_refused_without_its_scores(missing):
    known = {"avg_logprob": -0.5, "no_speech_prob": 0.25} | {missing: None}
    result = of(Segment(start_s=0.0, end_s=1.0, text="a", tokens=[1], **known))
    with pytest.raises(OptionError, match="transcribe with scores=True"):
        FORMATS["whisper-json"](result)


def test_the_json_of_openai_whisper_counts_by_window():
    scores = {"avg_logprob": -math.inf, "no_speech_prob": 0.25, "temperature": 0.2}
    result = of(
        Segment(start_s=0.5, end_s=1.0, text="to be", tokens=[1], **scores),
        Segment(start_s=1.0, end_s=2.0, text="to be " * 9 + "to be", tokens=[2], **scores),
        Segment(start_s=31.0, end_s=32.0, text="or not", tokens=[3], window_s=30.5, **scores),
    )
    found = json.loads(FORMATS["whisper-json"](result))
    first, second, third = found["segments"]
    assert (first["seek"], second["seek"], third["seek"]) == (0, 0, 3050)
    assert (
        first["compression_ratio"] == second["compression_ratio"] > 2 > third["compression_ratio"]
    )
    assert first["text"] == " to be" and found["text"].endswith(" to be or not")
    assert isinstance(first["avg_logprob"], float) and "words" not in first
    chinese = dataclasses.replace(result, language="zh")
    assert json.loads(FORMATS["whisper-json"](chinese))["segments"][0]["text"] == "to be"
    alone = dataclasses.replace(result, language=None)
    assert json.loads(FORMATS["whisper-json"](alone))["language"] == "en"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("", "a"),
        ("b/c", "b/c/a"),
        ("../..", "folder/folder/a"),
        ("/etc", "folder/etc/a"),
        ("b.json/..x", "b.json_/x/a"),
        ("x.whisper.json", "x.whisper.json_/a"),
        ("CON/Parts", "CON_/Parts_/a"),
        ("b\x00\n/\udcff", "b__/_/a"),
        (".hidden. ", "hidden/a"),
        ("c\\..\\..", "c/folder/folder/a"),
    ],
)
def test_names_with_folders_stay_inside(folder, name):
    assert Names().new("a.wav", folder) == name


def test_names_of_one_folder_are_given_once_and_those_of_others_do_not_count():
    names = Names()
    given = [names.new(*pair) for pair in [("a.wav", "b"), ("A.ogg", "B"), ("a", ""), ("con", "b")]]
    assert given == ["b/a", "B/A-2", "a", "b/con-2"]
    assert [names.new(name) for name in ("x.whisper.wav", "x.wav")] == ["x_whisper", "x"]


def test_json_holds_everything(transcript):
    found = json.loads(FORMATS["json"](transcript))
    assert found["segments"][2]["text"] == "a --> b <v i> & ü\x07"
    assert found["stats"]["windows"] == 1
    lines = [json.loads(line) for line in FORMATS["jsonl"](transcript).splitlines()]
    assert [line["tokens"] for line in lines] == [[1], [2], [3]]


def test_json_does_not_show_what_the_batch_adds_to_the_last_digits():
    def result(noise):
        segment = Segment(start_s=1 / 3, end_s=1.0, text="a", tokens=[], avg_logprob=-0.25 + noise)
        return FORMATS["json"](of(segment))

    assert result(0.0) == result(3e-7)
    found = json.loads(result(math.nan))["segments"][0]
    assert found["avg_logprob"] is None
    assert found["start_s"] == 1 / 3


def test_json_takes_names_that_are_not_utf_8(transcript):
    named = dataclasses.replace(transcript, source="a\udcff.wav")
    FORMATS["json"](named).encode()
    assert json.loads(FORMATS["json"](named))["source"] == "a\udcff.wav"


def test_formats_are_parsed_and_unknown_ones_are_named():
    assert parse_formats("srt, TXT,srt") == ["srt", "txt"]
    with pytest.raises(OptionError, match="did you mean 'srt'"):
        parse_formats("str")
    with pytest.raises(OptionError, match="expected some of"):
        parse_formats(",")


HOSTILE = [
    "../../etc/passwd", "..", ".", "/", "", "a\0b.wav", "C:\\x\\con.wav", ".hidden.wav",
    "run.wav", "results.mp3", "nul", "x" * 400 + ".wav", "ü" * 300 + ".wav", "a\nb.wav", "~.wav",
    "  .wav", "\u202egpj.wav", "\ud800.wav", "parts",
]  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE, ids=lambda s: ascii(s)[:25])
def test_names_stay_inside_the_folder_whatever_the_input_is_called(tmp_path, source):
    name = Names().new(source)
    path = tmp_path / f"{name}.json"
    path.write_text("x")
    assert path.resolve().parent == tmp_path.resolve()
    assert re.fullmatch(r"[^/\\\x00-\x1f]+", name)
    assert len(name.encode()) <= 130
    assert name.casefold() not in ("run", "results", "parts", "con", "nul")


def test_only_endings_of_audio_are_left_out_of_a_name():
    stems = [file_stem(source) for source in ("a/b.c.WAV", "speaker1.utt2", "talk.2024", "x.m4a")]
    assert stems == ["b.c", "speaker1.utt2", "talk.2024", "x"]


def test_equal_names_get_numbers_whatever_their_case():
    names = Names(["Y"])
    sources = "a/x.wav", "b/x.wav", "c/X.flac", "d/x-2.wav", "y.wav"
    assert [names.new(source) for source in sources] == ["x", "x-2", "X-3", "x-2-2", "y-2"]


def test_many_equal_names_are_found_quickly():
    names = Names()
    assert len({names.new(f"{i}/audio.wav").casefold() for i in range(20_000)}) == 20_000


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_file(path, "first")
    with pytest.raises(TypeError):
        write_file(path, object())

    def fails(self, target):
        raise OSError("the disk is gone")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="gone"):
        write_file(path, "third")
    assert path.read_text() == "first"
    assert {p.name for p in tmp_path.iterdir()} == {LISTING, "a.txt"}

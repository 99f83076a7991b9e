"""Sounds without speech, the bar, and ``mmdecode evaluate silence`` on the shipped model."""

import functools
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.container import BarContainer

from mmdecode.errors import OptionError
from mmdecode.evaluation.report.layout import MADE_BY
from mmdecode.evaluation.report.plots import words_per_minute
from mmdecode.evaluation.speech import silence_task
from mmdecode.evaluation.speech.non_speech import LEVELS_DB, RATE, sound, sounds
from mmdecode.evaluation.speech.samples import Sample
from mmdecode.evaluation.speech.silence import SilenceReport
from mmdecode.zoo.speech import speech_test
from tests.support.commands import invoke, json_of
from tests.support.files import write_json_lines
from tests.support.pages import checked

LEVELS = [(kind, level) for kind, levels in LEVELS_DB.items() for level in levels]


# Sounds


@pytest.mark.parametrize(("kind", "level"), LEVELS)
def test_a_sound_has_its_length_and_level_and_its_seed(kind, level):
    wave = sound(kind, level, 2.0, seed=1)
    assert (wave.dtype, wave.shape) == (np.float32, (2 * RATE,))
    if level is None:
        assert not wave.any()
        return
    assert 20 * np.log10(np.sqrt(np.mean(wave**2))) == pytest.approx(level, abs=0.5)
    assert np.array_equal(wave, sound(kind, level, 2.0, seed=1))
    assert not np.allclose(wave, sound(kind, level, 2.0, seed=2), atol=np.abs(wave).max() / 10)


def slope(wave):
    """Change of power per octave, in decibels."""
    power = np.abs(np.fft.rfft(wave)) ** 2
    edges = [64 * 2**k for k in range(7)]
    size = len(wave)
    bands = [
        power[low * size // RATE : high * size // RATE].mean()
        for low, high in itertools.pairwise(edges)
    ]
    return np.polyfit(range(len(bands)), 10 * np.log10(bands), 1)[0]


def test_noises_have_their_colours():
    assert slope(sound("white", -20, 8.0, 0)) == pytest.approx(0, abs=0.5)
    assert slope(sound("pink", -20, 8.0, 0)) == pytest.approx(-3, abs=0.5)
    assert slope(sound("babble", -20, 8.0, 0)) < -1


def test_music_has_a_few_strong_tones():
    def share(kind):
        power = np.sort(np.abs(np.fft.rfft(sound(kind, -20, 4.0, 0))) ** 2)
        return power[-len(power) // 50 :].sum() / power.sum()

    assert share("music") > 0.8 > share("white")


def test_there_is_a_clip_and_a_file_for_each_kind_level_and_number(tmp_path):
    made = [*sounds(tmp_path, 2, 1.0, seed=3)]
    entries = [entry for entry, _ in made]
    assert len({entry.id for entry in entries}) == len(entries) == 2 * len(LEVELS)
    assert all(entry.text == "" for entry in entries)
    assert len({entry.audio for entry in entries}) == len(entries)
    assert not any(tmp_path.iterdir())
    assert all(len(samples()) == RATE for _, samples in made)


# The report


def non_speech(mode, name, words, number=0, seconds=30.0, **known):
    return Sample(
        id=f"non-speech/{name}/{number}",
        mode=mode,
        text="",
        pred_text=" ".join(["word"] * words),
        duration=seconds,
        **({"windows": 4, "repetitive_windows": 0} | known),
    )


def spoken(mode, number, text="one two three four", recognised=None):
    return Sample(
        id=f"speech/clean/{number}",
        mode=mode,
        text=text,
        pred_text=text if recognised is None else recognised,
    )


def report(plain, other, speech=()):
    samples = []
    for mode, counts in (("plain", plain), ("other", other)):
        samples += [non_speech(mode, "noise", words, n) for n, words in enumerate(counts)]
    return SilenceReport([*samples, *speech], resamples=200)


def test_words_are_counted_by_the_minute_with_an_interval():
    found = report([10, 20, 30, 0], [0, 0, 2, 0]).non_speech["noise"]
    plain, other = found["plain"], found["other"]
    assert (plain.rate, plain.with_words, plain.clips) == (30, 3, 4)
    assert plain.low < 30 < plain.high
    assert (other.rate, other.down) == (1, 1 - 1 / 30)


@pytest.mark.parametrize(
    ("plain", "other", "passes"),
    [
        ([10, 10], [2, 2], True),  # down by 80 %
        ([10, 10], [2, 3], False),
        ([1, 1], [1, 0], True),  # under five a minute, at most one is left
        ([1, 1], [1, 1], False),
        ([0, 0], [0, 0], True),
        ([0, 0], [1, 1], False),
        ([5, 5], [0, 1], True),
        ([2, 3], [0, 1], True),  # five a minute: the share counts
        ([3, 3], [1, 1], False),
    ],
)
def test_the_bar(plain, other, passes):
    found = report(plain, other)
    assert found.non_speech["noise"]["other"].passes == passes
    assert found.verdicts["other"]["passes"] == passes


def test_speech_may_not_get_worse_beyond_its_interval():
    few = [spoken("plain", n) for n in range(8)]
    same = [spoken("other", n) for n in range(8)]
    worse = [spoken("other", n, recognised="one two three") for n in range(8)]
    once = [*same[:-1], replace(worse[0], id=same[-1].id)]
    wrong = [replace(sample, pred_text="one two") for sample in few[:2]]
    holds = [
        report([10], [0], [*plain, *other]).speech_holds("other", "clean")
        for plain, other in ((few, same), (few, worse), ([*wrong, *few[2:]], once))
    ]
    assert holds == [True, False, True]


def test_tables_and_page_say_what_was_missed(tmp_path):
    speech = [
        spoken(mode, n, recognised="one two") for mode in ("plain", "other") for n in range(3)
    ]
    found = report([10, 10], [9, 9], speech)
    files = found.save(tmp_path)
    assert [path.name for path in files] == [
        "summary.json", "table.md", "table.csv", "report.html", "words_per_minute.png",
    ]  # fmt: skip
    assert "other: misses noise" in found.table()
    page = files[3].read_text()
    checked(page)
    assert files[1].read_text().startswith(MADE_BY)
    assert "other: misses noise" in page
    assert page.count("<figure>") == 1 and "data:image/png" in page
    summary = json.loads(files[0].read_text())
    assert summary["verdicts"]["other"] == {
        "missed": ["noise"], "worse_speech": [], "passes": False,
    }  # fmt: skip
    assert summary["non_speech"]["noise"]["plain"]["rate"] == 20
    assert files[2].read_text().count("\n") == 3


def test_the_figure_has_a_bar_with_its_interval_for_every_class_and_mode():
    samples = [
        non_speech(mode, name, words, number)
        for mode, counts in (("plain", (0, 0, 9)), ("other", (2, 2, 2)))
        for name in ("pink -20 dB", "music -40 dB")
        for number, words in enumerate(counts)
    ]
    (axes,) = words_per_minute(SilenceReport(samples, resamples=2000).non_speech).axes
    plain, other = (group for group in axes.containers if isinstance(group, BarContainer))
    assert [bar.get_height() for bar in plain] == [6, 6]
    assert [bar.get_height() for bar in other] == [4, 4]
    low, high = plain.errorbar[2][0].get_segments()[0]
    assert (low[1], high[1]) == (0, 18), "words a minute of clips"
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "pink\n-20 dB",
        "music\n-40 dB",
    ]


def test_loops_are_counted_and_failures_left_out():
    samples = [
        non_speech("plain", "noise", 30, 0, repetitive_windows=2),
        non_speech("other", "noise", 0, 0),
    ]
    samples += [
        non_speech("plain", "noise", 0, 1),
        non_speech("other", "noise", 0, 1, error="broken"),
    ]
    found = SilenceReport(samples, resamples=20).non_speech["noise"]
    assert (found["plain"].loop_rate, found["other"].clips) == (0.25, 1)
    with pytest.raises(OptionError, match="no recording"):
        SilenceReport([spoken("plain", 0)], resamples=20)


def test_a_class_that_could_not_be_read_is_left_out_and_the_others_are_scored():
    samples = [non_speech(mode, "noise", 3, 0) for mode in ("plain", "other")]
    samples += [non_speech("plain", "hum", 3, 0), non_speech("other", "hum", 0, 0, error="broken")]
    found = SilenceReport(samples, resamples=20)
    assert found.classes == ["noise"] and found.summary["left_out"] == ["hum"]
    assert "left out, since no recording could be read: hum" in found.about()
    with pytest.raises(OptionError, match=r"without speech \(hum\)"):
        SilenceReport(samples[2:], resamples=20)


# The command


run = functools.partial(invoke, "evaluate", "silence")


@pytest.mark.slow
def test_the_command_runs_its_modes_and_resumes(tmp_path):
    asked = ["--limit", "1", "--seconds", "1", "--resamples", "20", "--guide", "whisper_cd"]
    out = ["--out", str(tmp_path / "run")]
    first = run(*asked, *out, "--json")
    assert first.exit_code == 0, first.output
    found = json_of(first)
    assert found["modes"] == ["plain", "thresholds", "loop guard", "whisper_cd"]
    assert len(found["non_speech"]) == len(LEVELS)
    assert set(found["speech"]) == {"clean", "noisy"}
    assert "a part of the set" in (tmp_path / "run" / "table.md").read_text()
    again = run(*asked, *out)
    assert again.exit_code != 0 and "earlier report" in str(again.exception)
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    (tmp_path / "run" / "samples.jsonl").write_text("\n".join(lines[:-5]) + "\n")
    resumed = run(*asked, *out, "--resume", "--json")
    assert resumed.exit_code == 0, resumed.output
    other = json_of(resumed)
    assert other["non_speech"] == found["non_speech"]
    files = {file: file.read_bytes() for file in tmp_path.rglob("*.*") if file.is_file()}
    for changed in (("--seconds", "2"), ("--limit", "2")):
        refused = run(*asked, *changed, *out, "--resume")
        assert "results of other settings" in str(refused.exception)
        assert {file: file.read_bytes() for file in tmp_path.rglob("*.*")} == files


def test_a_limit_leaves_recordings_out_where_some_kind_has_more(tmp_path):
    write_json_lines(tmp_path / "two.jsonl", [{"audio": f"{n}.wav", "text": "one"} for n in "ab"])
    own = {"clips": 2, "recordings": None}

    def cut(sets, limit, **changed):
        return silence_task.cut(sets, own | {"limit": limit} | changed)

    assert not cut(["zoo"], None) and not cut(["none"], 2)
    assert cut(["none"], 1, clips=2) and not cut(["none"], 1, clips=1)
    assert cut(["zoo"], len(speech_test()) - 1) and not cut(["zoo"], len(speech_test()))
    two = tmp_path / "two.jsonl"
    assert cut([str(two)], 1, clips=1) and not cut([str(two)], 2)
    assert cut(["none"], 1, clips=1, recordings=two) and not cut(["none"], 2, recordings=two)


def test_what_cannot_be_resumed_or_is_given_twice_is_refused():
    assert "--out" in str(run("--resume").exception)
    twice = run("--guide", "whisper_cd", "--guide", "whisper_cd", "--speech", "none")
    assert "given twice" in str(twice.exception)

"""`WERReport` over made-up samples, and ``mmdecode evaluate wer`` on the shipped model."""

import csv
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser

import numpy as np
import pytest
import soundfile

import mmdecode as mm
from mmdecode import checkpoints
from mmdecode.asr.output.manifest import Entry, read_manifest
from mmdecode.errors import InputError, OptionError, UnknownNameError
from mmdecode.evaluation.report.layout import MADE_BY
from mmdecode.evaluation.speech import runs
from mmdecode.evaluation.speech.runs import read_samples
from mmdecode.evaluation.speech.samples import Sample, leaderboard_files, match, read_results
from mmdecode.evaluation.speech.word_report import WERReport, wer_report
from mmdecode.runs.files import claimed, write_files
from mmdecode.runs.rows import RowJournal
from mmdecode.runs.tables import write_rows
from mmdecode.zoo.speech import speech_test
from tests.support.commands import invoke, json_of
from tests.support.files import json_lines, write_json_lines
from tests.support.pages import checked


def sample(name="a", mode="plain", text="red green blue", hypothesis="red green blue", **known):
    return Sample(id=name, mode=mode, text=text, pred_text=hypothesis, **known)


# Samples made elsewhere


def entries(folder):
    return [
        Entry(id="clips/A.wav", audio=str(folder / "clips/A.wav"), text="one two"),
        Entry(id="b", audio=str(folder / "clips/b.wav"), text="three", speaker="s"),
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("h.jsonl", '{"id": "b", "text": "tree"}\n{"audio": "clips/A.wav", "pred_text": "one"}'),
        ("h.csv", "path,hypothesis\n/else/where/a.flac,one\nb.mp3,tree\n"),
        ("h.tsv", "id\ttext\nb\ttree\nA\tone\n"),
        ("h.trn", "one (a)\ntree (b)\n"),
        ("h.jsonl", '{"source": "A.wav", "text": "one"}\n{"source": "b.wav", "text": "tree"}'),
    ],
)
def test_transcripts_find_their_recordings(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    found = match(entries(tmp_path), tmp_path / name, "theirs")
    assert [(s.text, s.pred_text, s.error) for s in found] == [
        ("one two", "one", None),
        ("three", "tree", None),
    ]


def test_a_folder_of_texts_is_read_and_what_is_missing_counts_as_a_failure(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    found = match(entries(tmp_path), tmp_path, "theirs")
    assert [s.pred_text for s in found] == ["one two", ""]
    assert found[1].error == "there is no transcript of it"
    summary = WERReport(found, normaliser="none").summary["modes"]["theirs"]
    assert (summary["words"], summary["deletions"], summary["failed"]) == (3, 1, 1)


def test_a_name_that_two_folders_share_is_no_match(tmp_path):
    three = [Entry(id=i, audio=i, text="one") for i in ("a/x.wav", "b/x.wav", "c.wav")]

    def matched(*names):
        rows = [json.dumps({"id": name, "text": "one"}) + "\n" for name in names]
        (tmp_path / "h.jsonl").write_text("".join(rows))
        return [s.error is None for s in match(three, tmp_path / "h.jsonl", "m")]

    assert matched("x", "b/x.wav", "c") == [False, True, True]
    assert matched("x", "c") == [False, False, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": "z", "text": "one"}', "none of the 1 transcripts"),
        ('{"id": "b", "text": "one"}\n{"id": "b", "text": "two"}', "two transcripts of 'b'"),
        ('{"id": "b"}', "needs an id or a path, and a text"),
    ],
)
def test_transcripts_that_cannot_be_used_are_refused(tmp_path, text, message):
    (tmp_path / "h.jsonl").write_text(text)
    with pytest.raises(InputError, match=message):
        match(entries(tmp_path), tmp_path / "h.jsonl", "m")


def test_files_of_the_leaderboard_are_written_and_read(tmp_path):
    made = [sample(audio_filepath="a", duration=2.0, time=0.5), sample("b", audio_filepath="b")]
    (path,) = write_files(tmp_path, leaderboard_files("org/model", "set", made))
    assert path.name == "MODEL_org-model-plain_DATASET_set.jsonl"
    assert list(json.loads(path.read_text().splitlines()[0])) == [
        "audio_filepath",
        "duration",
        "time",
        "text",
        "pred_text",
    ]
    assert read_results(path, "plain") == made


def test_chunks_of_one_recording_become_one(tmp_path):
    row = {"text": "one two", "duration": 1.0, "time": 0.25, "parent_id": "call"}
    lines = [row | {"pred_text": t, "chunk_index": i} for i, t in ((1, " two "), (0, "one"))]
    path = tmp_path / "r.jsonl"
    write_json_lines(path, lines)
    (found,) = read_results(path, "m")
    assert (found.id, found.pred_text, found.duration, found.time) == ("call", "one two", 2.0, 0.5)


# Reports


def made(seed=0, count=40):
    """Two modes; the second makes more errors, and is faster."""
    random = np.random.default_rng(seed)
    samples = []
    for mode, wrong, seconds in (("slow", 0.1, 1.0), ("fast", 0.3, 0.25)):
        for index in range(count):
            reference = random.choice(list("abcdefgh"), 10) if mode == "slow" else None
            reference = reference if reference is not None else samples[index].text.split()
            hypothesis = [w if random.random() > wrong else "x" for w in reference]
            samples.append(
                sample(
                    f"r{index}",
                    mode,
                    " ".join(reference),
                    " ".join(hypothesis),
                    duration=float(index % 12 + 1),
                    time=seconds,
                    token_ids=[1] * 12,
                    batch={"number": index // 4, "size": 4, "row_passes": 20, "scored_tokens": 40},
                )
            )
    return samples


def test_numbers_of_a_mode():
    report = WERReport(made(), resamples=500)
    found = report.summary["modes"]["fast"]
    assert found["rtfx"] == sum(i % 12 + 1 for i in range(40)) / 10
    assert found["tokens_per_pass"] == 2.0 and found["mean_tokens"] == 12
    assert found["wer"] == found["substitutions"] / 400
    assert found["wer_low"] < found["wer"] < found["wer_high"]
    assert found["latency_s"] == {"p50": 0.25, "p95": 0.25, "max": 0.25}


def test_speed_is_pooled_and_not_a_mean_of_ratios():
    samples = [sample(duration=1.0, time=1.0), sample("b", duration=9.0, time=3.0)]
    assert WERReport(samples).summary["modes"]["plain"]["rtfx"] == 2.5


def test_the_loop_rate_is_pooled_over_windows_and_absent_where_none_is_known():
    samples = [
        sample(windows=1, repetitive_windows=1),
        sample("b", windows=9, repetitive_windows=1),
    ]
    report = WERReport(samples)
    assert report.summary["modes"]["plain"]["loop_rate"] == 0.2
    assert report.rows()[0]["repeating windows %"] == "20.00"
    assert "repeating windows %" not in WERReport([sample()]).rows()[0]


def test_a_speedup_of_one_batch_has_no_interval():
    batch = {"number": 0, "size": 1, "row_passes": 1, "scored_tokens": 1}
    samples = [sample(time=3.0, batch=batch), sample(mode="fast", time=1.0, batch=batch)]
    (found,) = WERReport(samples, resamples=10).comparisons
    assert (found.speedup, found.speedup_low, found.speedup_high) == (3.0, None, None)
    assert str(found).endswith("; 3.00 times as fast")


def test_latency_quantiles():
    samples = [sample(f"r{i}", time=i / 100, duration=1.0) for i in range(1, 101)]
    found = WERReport(samples, resamples=10).summary["modes"]["plain"]["latency_s"]
    assert (found["p50"], found["p95"]) == (pytest.approx(0.505), pytest.approx(0.9505))


def test_failures_count_as_missed_and_have_no_time():
    samples = [
        sample(duration=2.0, time=1.0),
        sample("b", hypothesis="", error="broken", duration=9.0),
    ]
    found = WERReport(samples).summary["modes"]["plain"]
    assert (found["words"], found["deletions"], found["failed"], found["empty"]) == (6, 3, 1, 1)
    assert (found["timed"], found["rtfx"]) == (1, 2.0)


def test_references_without_words_are_left_out_with_the_leaderboard_only():
    samples = [sample(), sample("b", text="uh...", hypothesis="ghost"), sample("c", text="(cough)")]
    for normaliser, recordings in (("whisper", 3), ("leaderboard", 2)):
        report = WERReport(samples, normaliser=normaliser)
        assert (report.summary["recordings"], report.left_out) == (recordings, 3 - recordings)
    assert WERReport(samples, normaliser="leaderboard", only_scored=False).left_out == 0
    with pytest.raises(OptionError, match="no recording has words"):
        WERReport(samples[2:], normaliser="leaderboard")


def test_groups_widen_the_interval():
    def width(**known):
        errors = ["x y z" if i < 10 else "red green blue" for i in range(40)]
        samples = [
            sample(f"r{i}", hypothesis=h, **{k: v(i) for k, v in known.items()})
            for i, h in enumerate(errors)
        ]
        found = WERReport(samples, resamples=2000).summary
        mode = found["modes"]["plain"]
        return mode["wer_high"] - mode["wer_low"], found["interval"]["units"]

    alone, together = width(), width(group=lambda i: str(i // 10))
    assert (alone[1], together[1]) == (40, 4)
    assert together[0] > 2 * alone[0]


def test_comparison_of_two_modes():
    report = WERReport(made(), resamples=1000)
    (found,) = report.comparisons
    assert (found.first, found.second) == ("slow", "fast")
    assert found.bootstrap.difference < 0 and found.bootstrap.high < 0
    assert found.mapsswe.z < -2 and found.mapsswe.p < 0.05 and not found.within_margin
    assert found.speedup == found.speedup_low == found.speedup_high == 4.0
    alone = report.compare("fast")
    assert dataclasses.replace(alone, p_holm=alone.mapsswe.p) == found
    back = report.compare("slow", mode="fast")
    assert back.bootstrap.difference == -found.bootstrap.difference
    assert back.within_margin


def test_a_mode_against_itself_is_the_same_and_within_any_margin():
    samples = made()[:40]
    again = [dataclasses.replace(s, mode="again") for s in samples]
    one, other = WERReport(samples, resamples=100), WERReport(again, resamples=100)
    found = one.compare(other)
    assert (found.same, found.of, found.bootstrap.difference, found.mapsswe.z) == (40, 40, 0, 0)
    assert found.within_margin and found.second == "again"


def test_comparisons_are_corrected_for_their_number():
    third = [dataclasses.replace(s, mode="third") for s in made()[:40]]
    report = WERReport([*made(), *third], resamples=100)
    alone = report.compare("fast")
    p = alone.mapsswe.p
    assert alone.p_holm is None and "Holm" not in str(alone)
    assert [one.p_holm for one in report.comparisons] == [pytest.approx(2 * p, abs=0), 1.0]


def test_what_cannot_be_compared_is_refused():
    report = WERReport([sample()], resamples=2)
    with pytest.raises(UnknownNameError, match="did you mean 'plain'"):
        report.compare("plan")
    with pytest.raises(OptionError, match="score both alike"):
        report.compare(WERReport([sample()], normaliser="none"))
    with pytest.raises(OptionError, match="different recordings"):
        report.compare(WERReport([sample(text="other")]))
    with pytest.raises(OptionError, match="--resume"):
        WERReport([sample(), sample("b"), sample(mode="m")])
    with pytest.raises(OptionError, match="no recording"):
        WERReport([])


class Tags(HTMLParser):
    """Checks that tags close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta", "link", "img", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def tags(text):
    parser = Tags()
    parser.feed(text)
    assert parser.open == []
    return parser.seen


def test_everything_is_written(tmp_path):
    report = WERReport(made(), resamples=100, conditions={"model": "m<b>", "batch_size": 4})
    files = report.save(tmp_path / "out")
    assert {path.name for path in files} == {
        "summary.json",
        "table.md",
        "table.csv",
        "report.html",
        "wer_against_speed.png",
        "wer_by_duration.png",
        "error_kinds.png",
        "MODEL_m-b--slow_DATASET_unknown.jsonl",
        "MODEL_m-b--fast_DATASET_unknown.jsonl",
    }
    assert all(path.stat().st_size for path in files)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["recordings"] == 40
    with (tmp_path / "out" / "table.csv").open() as file:
        assert [row["mode"] for row in csv.DictReader(file)] == ["slow", "fast"]
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.startswith(f"{MADE_BY}\n")
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    assert "normaliser whisper" in report.table() and "batch size 1" in report.table()
    page = (tmp_path / "out" / "report.html").read_text()
    checked(page)
    seen = tags(page)
    assert seen.count("img") == 3 and "b" not in seen


def test_texts_without_times_make_a_smaller_report(tmp_path):
    report = WERReport([sample(hypothesis="red")])
    assert "RTFx" not in report.table()
    names = {path.name for path in report.save(tmp_path)}
    assert "error_kinds.png" in names and "wer_against_speed.png" not in names


def test_the_worst_items_can_be_played_and_read():
    clip = speech_test()[0]
    samples = [
        sample(hypothesis="red <b> blue", audio_filepath=str(clip.path)),
        sample("b", hypothesis="", error="broken"),
        sample("c"),
    ]
    worst = WERReport(samples, normaliser="none").worst(5)
    assert [one.note for one in worst] == ["3 word errors", "1 word error"]
    assert "broken" in repr(worst)
    page = worst._repr_html_()
    seen = tags(page)
    assert seen.count("audio") == 1 and "b" not in seen
    assert re.search(r'<span class="substitute">[^<]*b[^<]*<del>green</del></span>', page)
    tags(WERReport(samples)._repr_html_())


def test_a_notebook_draws_the_figures():
    figures = WERReport(made(), resamples=10).figures()
    assert len(figures) == 3
    for figure in figures.values():
        assert figure._repr_png_().startswith(b"\x89PNG")


def test_recordings_of_one_name_are_all_scored(tmp_path, manifest):
    clip = speech_test()[0]
    data = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "same.ogg"
        path.write_bytes(clip.path.read_bytes())
        data.append((path, clip.text))
    report = wer_report({"theirs": [clip.text, "nothing"]}, data)
    assert report.summary["recordings"] == 2 and len(set(report.ids)) == 2
    with pytest.raises(OptionError, match="two samples called"):
        WERReport([sample(), sample()])
    with pytest.raises(InputError, match="given as ndarray"):
        wer_report({"theirs": ["x"]}, [(np.zeros(3), "x")])


def test_the_bars_count_recordings_of_known_length_alone():
    samples = [sample(name, duration=d) for name, d in (("a", 1.0), ("b", None), ("c", 40.0))]
    axes = WERReport(samples).figures()["wer_by_duration"].axes[0]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["0-2 s\n1 recording", "over 30 s\n1 recording"]


def test_a_frame_has_a_row_per_sample():
    frame = WERReport(made(), resamples=2).to_pandas()
    assert len(frame) == 80 and frame.groupby("mode")["substitutions"].sum()["slow"] > 0


# Runs


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    """Four recordings, one of which is none."""
    folder = tmp_path_factory.mktemp("set")
    rows = [{"audio": str(c.path), "text": c.text, "speaker": c.voice} for c in speech_test()[:4]]
    (folder / "broken.wav").write_text("no audio")
    rows.insert(1, {"audio": "broken.wav", "text": "seven lost words are in this one"})
    path = folder / "test.jsonl"
    write_json_lines(path, rows)
    return path


run = functools.partial(invoke, "evaluate", "wer", catch_exceptions=False)


def settings(manifest, folder, *more):
    given = ["--data", manifest, "--model", "zoo:whisper-synth", "--draft", "medusa"]
    return [
        *given,
        "--device",
        "cpu",
        "--batch-size",
        2,
        "--resamples",
        200,
        "--out",
        folder,
        *more,
    ]


def test_rows_that_cannot_be_used_are_left_out_and_counted(manifest, tmp_path):
    table = tmp_path / "test.jsonl"
    rows = json_lines(manifest)
    rows = [{**rows[0], "id": "a"}, {**rows[2], "id": "a"}, {"id": "b", "text": "none"}]
    lines = [json.dumps(row) for row in rows] + ["{", json.dumps({"audio": rows[0]["audio"]})]
    table.write_text("\n".join(lines) + "\n")
    given = ["--data", table, "--model", "zoo:whisper-synth", "--device", "cpu", "--warmup", 0]
    out = ["--resamples", 20, "--out", tmp_path / "run"]
    done = run(*given, *out, "--json")
    assert done.exit_code == 1
    found = json_of(done)
    assert found["recordings"] == 1 and found["conditions"]["rows_left_out"] == 4
    problems = ("line 2 has the id 'a' of line 1", "names no recording", "not JSON", "has no text")
    for failure, text in zip(found["failures"], problems, strict=True):
        assert text in failure["error"] and f"left out: {failure['error']}" in done.stderr
    table_text = (tmp_path / "run" / "table.md").read_text()
    assert "4 rows of the data could not be used and were left out" in table_text
    again = run("--rescore", tmp_path / "run", "--resamples", 20)
    assert again.exit_code == 0 and "4 rows of the data" in " ".join(again.output.split())


@pytest.fixture(scope="module")
def finished(manifest, tmp_path_factory):
    """A run of two modes, and its summary."""
    folder = tmp_path_factory.mktemp("run") / "out"
    done = run(*settings(manifest, folder), "--json")
    assert done.exit_code == 1, done.output  # one recording is broken
    assert "broken.wav" in done.stderr and "2 failed" in done.stderr
    return folder, json_of(done)


def texts(folder):
    return {(s.mode, s.id): (s.text, s.pred_text, s.token_ids) for s in read_samples(folder)}


def test_modes_are_run_scored_and_compared(finished):
    folder, found = finished
    assert list(found["modes"]) == ["plain", "medusa"] and found["recordings"] == 5
    plain, medusa = found["modes"].values()
    assert plain["failed"] == medusa["failed"] == 1 and plain["deletions"] >= 7
    assert plain["tokens_per_pass"] == 1.0 and medusa["tokens_per_pass"] > 2
    assert plain["rtfx"] > 1 and plain["timed"] == 4
    assert (plain["windows"], plain["loop_rate"]) == (4, 0.0)
    (compared,) = found["comparisons"]
    assert (compared["same"], compared["bootstrap"]["difference"]) == (5, 0)
    for name in ("model", "options", "device", "dtype", "torch", "transformers", "batch_size"):
        assert name in found["conditions"], name
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 10
    assert (folder / "report.html").exists()


def without_conditions(summary):
    return {k: v for k, v in summary.items() if k not in ("conditions", "files")}


def test_rescoring_gives_the_same_numbers_without_the_model(finished, tmp_path, monkeypatch):
    folder, found = finished
    monkeypatch.setattr(mm.asr.Transcriber, "__init__", None)
    done = run("--rescore", folder, "--resamples", 200, "--out", tmp_path / "again", "--json")
    again = json_of(done)
    assert without_conditions(again) == without_conditions(found)
    other = run("--rescore", folder, "--normalizer", "leaderboard", "--out", tmp_path, "--json")
    assert json_of(other)["scorer"] == "merge"


def test_files_of_the_leaderboard_score_the_same(finished, manifest):
    folder, found = finished
    files = sorted((folder / "leaderboard").glob("*.jsonl"))
    given = [
        x
        for f in files
        for x in ("--hypotheses", f"{'medusa' if 'medusa' in f.name else 'plain'}={f}")
    ]
    for more in ([], ["--data", manifest]):
        done = run(*given, *more, "--resamples", 10, "--json")
        modes = json_of(done)["modes"]
        for mode, numbers in found["modes"].items():
            assert modes[mode]["wer"] == numbers["wer"]
            assert modes[mode]["rtfx"] == pytest.approx(numbers["rtfx"])


def test_an_interrupted_run_is_continued(finished, manifest, tmp_path, monkeypatch):
    class Stopped(Exception):
        pass

    def stop_early(self, sample, add=RowJournal.add):
        if len(self.rows) == 5:
            raise Stopped
        add(self, sample)

    with monkeypatch.context() as patch:
        patch.setattr(RowJournal, "add", stop_early)
        with pytest.raises(Stopped):
            run(*settings(manifest, tmp_path))
    path = tmp_path / "samples.jsonl"
    assert len(path.read_text().splitlines()) == 5
    with path.open("a") as file:
        file.write('{"id": "cut of')
    with pytest.raises(OptionError, match="--resume"):
        run(*settings(manifest, tmp_path))
    with pytest.raises(OptionError, match="seed was 0, is 1"):
        run(*settings(manifest, tmp_path, "--resume", "--seed", 1))
    timed = []
    original = runs._timed
    monkeypatch.setattr(runs, "_timed", lambda *a: timed.append(len(a[1])) or original(*a))
    done = run(*settings(manifest, tmp_path, "--resume"))
    assert done.exit_code == 1 and sum(timed) == 8 - 3  # the failure is tried again
    assert texts(tmp_path) == texts(finished[0])


@pytest.mark.slow
def test_a_recording_that_changed_under_its_path_is_transcribed_again(tmp_path, monkeypatch):
    one, two, other = speech_test()[:3]
    for index, recording in enumerate((one, two)):
        shutil.copy(recording.path, tmp_path / f"{index}.flac")
    rows = [{"audio": f"{index}.flac", "text": "some words"} for index in range(2)]
    data, out = tmp_path / "test.jsonl", tmp_path / "out"
    write_json_lines(data, rows)
    words = ["--data", data, "--model", "zoo:whisper-synth", "--device", "cpu", "--warmup", 0,
             "--resamples", 20, "--out", out]  # fmt: skip
    run(*words)
    before = texts(out)
    shutil.copy(other.path, tmp_path / "0.flac")
    added, add = [], RowJournal.add
    monkeypatch.setattr(RowJournal, "add", lambda self, row: added.append(row) or add(self, row))
    done = run(*words, "--resume")
    assert "1 changed since and done again" in done.stderr and len(added) == 1
    [key] = [(sample.mode, sample.id) for sample in added]
    after = texts(out)
    assert [name for name in before if before[name] != after[name]] == [key]
    assert "changed since" not in run(*words, "--resume").stderr and len(added) == 1


@pytest.mark.slow
def test_a_killed_run_loses_nothing_it_reported(finished, manifest, tmp_path):
    words = ["evaluate", "wer", *map(str, settings(manifest, tmp_path, "--resume"))]
    for lines in (1, 4, 7):
        process = subprocess.Popen([sys.executable, "-m", "mmdecode", *words])
        path = tmp_path / "samples.jsonl"
        while process.poll() is None:
            if path.exists() and path.read_bytes().count(b"\n") >= lines:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
            time.sleep(0.01)
        before = {k: v for k, v in texts(tmp_path).items() if v[1]}
        assert before.items() <= texts(finished[0]).items()
    run(*settings(manifest, tmp_path, "--resume"))
    assert texts(tmp_path) == texts(finished[0])


def test_a_damaged_line_is_named(finished, tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"id": 3}\n')
    with pytest.raises(InputError, match="line 1 is not the row of a recording"):
        read_samples(tmp_path)
    with pytest.raises(InputError, match="folder of an earlier run"):
        read_samples(tmp_path / "missing")


def test_the_table_is_for_people_and_a_limit_is_noted(finished):
    done = run("--rescore", finished[0], "--resamples", 10, "--out", finished[0].parent / "shown")
    assert "WER %" in done.stdout and "medusa against plain" in done.stdout


@pytest.mark.parametrize("normalizer", ["whisper", "leaderboard"])
@pytest.mark.parametrize("data", [True, False])
@pytest.mark.parametrize("limit", [1, 2, 9])
def test_a_limit_that_leaves_nothing_out_is_no_limit(tmp_path, normalizer, data, limit):
    rows = [{"id": i, "text": "one two", "pred_text": "one"} for i in "ab"]
    write_json_lines(tmp_path / "rows.jsonl", rows)
    given = ["--hypotheses", tmp_path / "rows.jsonl", "--normalizer", normalizer, "--limit", limit]
    done = run(*given, *["--data", tmp_path / "rows.jsonl"] * data, "--resamples", 10)
    assert ("a smoke test" in done.stderr) == (limit < 2)
    assert ("a part of the set" in done.stdout) == (limit < 2)


def test_a_limit_on_the_shipped_recordings_is_none_at_their_number(tmp_path):
    pairs = [(clip.path, clip.text) for clip in speech_test()[:2]]
    manifest = tmp_path / "two.jsonl"
    write_json_lines(manifest, [{"audio": str(path), "text": text} for path, text in pairs])
    words = ["--model", "zoo:whisper-synth", "--device", "cpu", "--warmup", 0, "--resamples", 10]
    for limit in (1, 2, 3):
        for more in ([], ["--normalizer", "leaderboard"]):
            done = run(*words, "--data", manifest, "--limit", limit, *more)
            assert ("a smoke test" in done.stderr) == (limit < 2)
        for data in (manifest, pairs):
            report = wer_report({"mine": [""] * min(limit, 2)}, data, limit=limit, resamples=10)
            assert ("a part of the set" in report.about()) == (limit < 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "none of them"),
        (["--model", "m", "--rescore", "d"], "--model, --rescore"),
        (["--rescore", "d", "--draft", "lookup"], "--draft needs a model"),
        (["--rescore", "d", "--limit", "3"], "leave --data"),
        (["--hypotheses", "x", "--resume"], "--resume continues"),
        (["--hypotheses", "x.jsonl", "--hypotheses", "y/x.jsonl"], "NAME=FILE"),
    ],
)
def test_options_that_do_not_fit_are_refused(given, message):
    with pytest.raises(OptionError, match=message):
        run(*given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--hypotheses", "x", "--batch-size", 8], "--batch-size does nothing without --model"),
        (["--hypotheses", "x", "--no-timestamps"], "--timestamps does nothing without --model"),
        (["--rescore", "d", "--device", "cpu"], "--device does nothing without --model"),
        (["--rescore", "d", "--fallback"], "--fallback does nothing without --model"),
        (["--hypotheses", "x", "--group", "g"], "--group does nothing without --data"),
    ],
)
def test_options_without_what_they_belong_to_are_refused(given, message):
    with pytest.raises(OptionError, match=message):
        run(*given)


def test_without_data_a_model_is_scored_on_recordings_that_ship(tmp_path):
    copy = shutil.copytree(checkpoints.ZOO / "whisper-synth", tmp_path / "model")
    given = ["--device", "cpu", "--warmup", 0, "--limit", 1, "--resamples", 10, "--json"]
    for model, data in (("zoo:whisper-synth", "zoo:speech-test"), (copy, "zoo:real-clips")):
        done = run("--model", model, *given)
        found = json_of(done)
        assert found["conditions"]["data"] == data and found["recordings"] == 1
        assert f"data: {data} (" in done.stderr


def test_an_earlier_report_is_not_overwritten(finished, manifest, tmp_path):
    folder, _ = finished
    hypotheses = tmp_path / "heard.jsonl"
    hypotheses.write_text("".join(json.dumps({"id": i, "text": "x"}) + "\n" for i in "ab"))
    truth = tmp_path / "truth.jsonl"
    truth.write_text("".join(json.dumps({"id": i, "text": "x"}) + "\n" for i in "ab"))
    foreign = ["--data", truth, "--hypotheses", hypotheses, "--resamples", 10]
    run(*foreign, "--out", tmp_path / "foreign")
    summaries = [folder / "summary.json", tmp_path / "foreign" / "summary.json"]
    before = [path.read_bytes() for path in summaries]
    for given, words in [
        ([*foreign, "--out", folder], "holds an earlier report; replace it"),
        ([*foreign, "--out", tmp_path / "foreign"], "holds an earlier report; replace it"),
        (
            ["--rescore", folder, "--out", tmp_path / "foreign"],
            "holds an earlier report; replace it",
        ),
        (settings(manifest, tmp_path / "foreign"), "continue it with --resume, replace"),
        (settings(manifest, tmp_path / "foreign", "--resume"), "cannot be read, so nothing shows"),
    ]:
        with pytest.raises(OptionError, match=words):
            run(*given)
    assert [path.read_bytes() for path in summaries] == before
    copy = shutil.copytree(folder, tmp_path / "copy")
    run("--rescore", copy, "--normalizer", "none", "--resamples", 10)
    assert json.loads((copy / "summary.json").read_text())["normaliser"] == "none"
    run("--rescore", copy, "--out", f"{copy}/../copy", "--normalizer", "basic", "--resamples", 10)
    with pytest.raises(InputError, match="folder of an earlier run"):
        run("--rescore", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_one_run_at_a_time_writes_to_a_folder(finished, manifest, tmp_path):
    with claimed(tmp_path):
        for given in (settings(manifest, tmp_path), ["--rescore", finished[0], "--out", tmp_path]):
            with pytest.raises(OptionError, match="another run is writing"):
                run(*given)
    assert not list(tmp_path.iterdir())


def test_parts_and_languages_of_the_manifest_reach_the_model(tmp_path):
    clip = speech_test()[0]
    rows = [{"id": "a", "offset": 1.0, "duration": 2.0}, {"id": "b", "lang": "xx"}, {"id": "c"}]
    write_rows(tmp_path / "m.jsonl", [r | {"audio": str(clip.path), "text": "x"} for r in rows])
    transcriber = mm.asr.Transcriber.from_pretrained("zoo:whisper-synth", device="cpu")
    part, odd, whole = runs.record(
        {"plain": transcriber}, read_manifest(tmp_path / "m.jsonl"), warmup=0
    )
    samples, rate = soundfile.read(clip.path, dtype="float32")
    expected = transcriber((samples[rate : 3 * rate], rate))
    assert (part.pred_text, part.duration) == (expected.text, 2.0)
    assert "b: " in odd.error and "'xx'" in odd.error
    assert whole.duration == pytest.approx(clip.duration_s, abs=0.01)
    known = dataclasses.replace(transcriber.options, language="en")
    asked = mm.asr.Transcriber(transcriber.model, transcriber.processor, options=known)
    found = runs.record({"plain": asked}, read_manifest(tmp_path / "m.jsonl"), warmup=0)
    assert [s.error for s in found] == [None] * 3, "what is asked for of all counts"
    hashes = {
        runs.data_hash([Entry(id="a", audio="a", text="x", **more)])
        for more in ({}, {"language": "de"}, {"offset_s": 1.0}, {"offset_s": 1.0, "duration_s": 2})
    }
    assert len(hashes) == 4


def test_a_loaded_transcriber_is_evaluated(manifest):
    transcriber = mm.asr.Transcriber.from_pretrained("zoo:whisper-synth", device="cpu")
    clips = speech_test()[:2]
    scored = []
    report = wer_report(
        {"plain": transcriber, "theirs": ["nothing", "at all"]},
        [(clip.path, clip.text) for clip in clips],
        normaliser="none",
        resamples=10,
        progress=scored.append,
    )
    assert len(scored) == 2 and report.modes == ["plain", "theirs"]
    assert report.compare("theirs").bootstrap.difference < 0
    assert report.summary["conditions"]["dtype"] == "float32"
    with pytest.raises(OptionError, match="1 transcripts for 2 recordings"):
        wer_report({"theirs": ["x"]}, [(c.path, c.text) for c in clips])


def test_modes_take_turns_and_only_decoding_is_timed(monkeypatch, manifest):
    calls = []

    class Stub:
        sampling_rate, stats = 16_000, type("S", (), {"rounds": 0, "acceptance_length": 0.0})()
        options = type("O", (), {"batch_size": 1, "language": None})()
        model = type("M", (), {"device": type("D", (), {"type": "cpu"})()})()

        def __init__(self, name):
            self.name = name

        def __call__(self, waves):
            calls.append(self.name)
            one = {"text": "x", "tokens": [1], "stats": {"windows": 1, "looped": 0}}
            return [type("T", (), one)() for _ in waves]

    ticks = iter(range(1000))
    monkeypatch.setattr(runs, "now", lambda device: float(next(ticks)))
    clips = [Entry(id=c.name, audio=str(c.path), text=c.text) for c in speech_test()[:3]]
    samples = runs.record({"A": Stub("A"), "B": Stub("B")}, clips, warmup=0)
    assert "".join(calls) == "ABBAAB"
    assert {s.time for s in samples} == {1.0}
    assert [s.mode for s in samples] == ["A"] * 3 + ["B"] * 3
    calls.clear()
    runs.record({"A": Stub("A")}, clips, warmup=2, batch_size=3)
    assert len(calls) == 3

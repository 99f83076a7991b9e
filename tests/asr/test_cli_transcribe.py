"""``mmdecode transcribe`` from end to end, and resuming."""

import json
import os
import re
import signal
import tempfile

import pytest
import soundfile
from transformers.utils import logging

from mmdecode.asr.output.subtitles import clean
from mmdecode.asr.transcriber import Transcriber
from mmdecode.errors import InputError, OptionError
from mmdecode.runs.work import summed
from tests.support.commands import invoke
from tests.support.files import contents, json_lines, write_json_lines


@pytest.fixture
def audio(tmp_path, kit):
    """A folder of recordings, one of them broken."""
    (tmp_path / "audio" / "b").mkdir(parents=True)
    for number, name in enumerate(("x.wav", "b/x.flac", "y.ogg")):
        soundfile.write(tmp_path / "audio" / name, kit.noise(0.6 + number, seed=number), kit.rate)
    (tmp_path / "audio" / "broken.mp3").write_text("no audio")
    (tmp_path / "audio" / "notes.txt").write_text("not even named like audio")
    return tmp_path / "audio"


@pytest.fixture
def run(folder):
    def call(*args, stdin=None):
        options = ["--model", folder, "--device", "cpu", "--max-new-tokens", 5]
        return invoke("transcribe", *args, *options, input=stdin)

    return call


def lines(folder):
    return json_lines(folder / "results.jsonl")


def test_a_folder_becomes_files_and_failures_make_the_exit_code_one(run, audio, tmp_path):
    out = tmp_path / "out"
    done = run(audio, "--out", out, "--format", "txt,srt,json", "--draft", "lookup")
    assert done.exit_code == 1, done.output
    assert "broken.mp3: is not audio" in done.stderr
    assert "3 transcribed, 0 done before, 1 failed" in done.stderr
    written = {p.name for p in out.iterdir() if p.name[0] != "."}
    stems = {"x", "x-2", "y"}
    assert written == {f"{s}.{k}" for s in stems for k in ("txt", "srt", "json")} | {
        "run.json",
        "results.jsonl",
    }
    entries = {entry["source"]: entry for entry in lines(out)}
    assert len(entries) == 4 and "error" in entries[str(audio / "broken.mp3")]
    assert json.loads((out / "y.json").read_text())["source"] == str(audio / "y.ogg")


def test_without_a_folder_the_text_is_printed(run, audio):
    done = run(audio / "x.wav")
    assert done.exit_code == 0
    assert len(done.stdout.strip().splitlines()) <= 1
    several = run(audio / "x.wav", audio / "y.ogg")
    assert f"{audio / 'y.ogg'}: " in several.stdout


def test_json_is_one_object_and_alone_on_stdout(run, audio):
    done = run(audio, "--json", "--limit", 3, "--fallback")
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert (found["transcribed"], found["failed"]) == (2, 1)
    assert found["results"][0]["segments"] and found["stats"]["tokens"] > 0
    assert found["rtfx"] > 0 and found["looped"] <= found["windows"] >= 2


def test_an_interrupted_run_is_continued_where_it_stopped(run, audio, tmp_path, monkeypatch):
    (audio / "broken.mp3").unlink()
    whole = tmp_path / "whole"
    assert run(audio, "--out", whole).exit_code == 0
    out = tmp_path / "out"
    stream = Transcriber.stream

    def dies_after_one(self, inputs, progress=None, **options):
        results = stream(self, inputs, progress, **options)
        yield next(results)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Transcriber, "stream", dies_after_one)
        stopped = run(audio, "--out", out, "--batch-size", 1)
    assert stopped.exit_code == 130
    last = stopped.stderr.splitlines()[-1]
    assert last == f"stopped: 1 of 3 done in {out}; go on with --resume"
    assert len(lines(out)) == 1
    with (out / "results.jsonl").open("a") as file:
        file.write('{"source": "cut o')  # a crash in the middle of a line
    seen = []

    def watched(self, inputs, progress=None, **options):
        seen.extend(inputs)
        return stream(self, inputs, progress, **options)

    monkeypatch.setattr(Transcriber, "stream", watched)
    done = run(audio, "--out", out, "--resume")
    assert done.exit_code == 0, done.output
    assert len(seen) == 3  # the unit as a whole; the line that was there stays
    assert "2 transcribed, 1 done before" in done.stderr
    assert "what an earlier run began goes on with its batch size, 1" in done.stderr
    contents = [{p.name: p.read_text() for p in f.glob("*.txt")} for f in (whole, out)]
    assert contents[0] == contents[1] and len(contents[0]) == 3
    by_source = [{e["source"]: e["tokens"] for e in lines(f)} for f in (whole, out)]
    assert by_source[0] == by_source[1]
    again = run(audio, "--out", out, "--resume")
    assert "0 transcribed, 3 done before" in again.stderr


def test_a_run_that_the_system_asks_to_end_says_how_far_it_got(run, audio, tmp_path, monkeypatch):
    stream, before = Transcriber.stream, signal.getsignal(signal.SIGTERM)

    def ended(self, inputs, progress=None, **options):
        results = stream(self, inputs, progress, **options)
        yield next(results)
        os.kill(os.getpid(), signal.SIGTERM)
        yield from results

    monkeypatch.setattr(Transcriber, "stream", ended)
    done = run(audio, "--out", tmp_path / "out", "--batch-size", 1)
    assert done.exit_code == 130
    assert f" done in {tmp_path / 'out'}; go on with --resume" in done.stderr.splitlines()[-1]
    assert signal.getsignal(signal.SIGTERM) == before


def test_results_are_never_mixed_with_those_of_other_settings(run, audio, tmp_path):
    out = tmp_path / "out"
    run(audio / "x.wav", "--out", out)
    before = (out / "results.jsonl").read_text()
    for extra, words in [
        ((), "--resume"),
        (("--resume", "--temperature", 0.5), r"temperatures was \[0.0\], is \[0.5\]"),
        (("--resume", "--seed", 3), "seed was 0, is 3"),
        (("--resume", "--format", "vtt"), "formats was"),
    ]:
        done = run(audio / "x.wav", "--out", out, *extra)
        assert isinstance(done.exception, OptionError), done.output
        with pytest.raises(OptionError, match=words):
            raise done.exception
    assert (out / "results.jsonl").read_text() == before
    assert run(audio / "x.wav", "--out", out, "--resume", "--batch-size", 2).exit_code == 0
    settings = json.loads((out / "run.json").read_text())["settings"]
    assert (settings["vad_threshold"], settings["vad_pad_s"]) == (0.5, 0.4)  # those of the detector
    (out / "run.json").write_text("{")
    assert isinstance(run(audio / "x.wav", "--out", out, "--resume").exception, OptionError)


def test_a_recording_of_the_same_name_in_another_folder_is_not_taken_for_done(
    run, audio, tmp_path, monkeypatch
):
    monkeypatch.chdir(audio)
    (audio / "b" / "x.wav").write_bytes((audio / "y.ogg").read_bytes())
    out = tmp_path / "out"
    assert run("x.wav", "--out", out).exit_code == 0
    before = (out / "results.jsonl").read_text()
    monkeypatch.chdir(audio / "b")
    done = run("x.wav", "--out", out, "--resume")
    with pytest.raises(OptionError, match=f"audio was '{audio}/x.wav', is '{audio}/b/x.wav'"):
        raise done.exception
    assert (out / "results.jsonl").read_text() == before


def test_a_failed_recording_is_tried_again_on_resume(run, audio, tmp_path, kit):
    out = tmp_path / "out"
    assert run(audio / "broken.mp3", "--out", out).exit_code == 1
    soundfile.write(audio / "broken.mp3", kit.noise(1.0), kit.rate)
    done = run(audio / "broken.mp3", "--out", out, "--resume")
    assert done.exit_code == 0
    assert "1 transcribed, 0 done before, 0 failed" in done.stderr


def test_misuse_is_explained(run, audio, tmp_path):
    empty = tmp_path / "nothing"
    empty.mkdir()
    manifest = tmp_path / "m.jsonl"
    manifest.write_text(json.dumps({"id": str(audio / "x.wav"), "audio": "x.wav"}))
    for args, kind, words in [
        ((audio, "--resume"), OptionError, "give --out"),
        ((audio, "--format", "str"), OptionError, "did you mean"),
        ((empty,), InputError, "holds no audio"),
        ((), OptionError, "nothing to transcribe"),
        (("-", "--files-from", "-"), OptionError, "given twice"),
        (("-", "--out", empty, "--resume"), OptionError, "standard input"),
        (("--files-from", empty / "none"), InputError, "list of files"),
        (("--data", empty / "none"), InputError, "as a manifest"),
        ((audio / "x.wav", "--data", manifest), InputError, "called"),
        ((audio, "--max-line-width", 1, "--out", empty), OptionError, "at least 2"),
        ((audio, "--temperature", 0, "--temperature", 1), OptionError, "no threshold is set"),
        ((audio / "x.wav", "--out", audio / "notes.txt"), InputError, "is a file"),
    ]:
        done = run(*args)
        with pytest.raises(kind, match=words):
            raise done.exception


def test_a_recording_on_standard_input_is_read_and_called_stdin(run, audio, tmp_path):
    for name in ("x.wav", "b/x.flac", "y.ogg"):
        data = (audio / name).read_bytes()
        assert run("-", stdin=data).stdout == run(audio / name).stdout
    assert run("-", "--out", tmp_path / "out", "--format", "txt", stdin=data).exit_code == 0
    assert (tmp_path / "out" / "stdin.txt").exists()
    [line] = lines(tmp_path / "out")
    assert (line["id"], line["source"], line["audio"]) == ("stdin", "stdin", None)
    broken = run("-", stdin=b"no audio")
    assert broken.exit_code == 1
    assert "failed: stdin: is not audio" in broken.stderr
    assert tempfile.gettempdir() not in broken.stderr.partition("failed:")[2]


def test_paths_may_come_as_a_list(run, audio, tmp_path):
    listing = f"{audio / 'y.ogg'}\r\n\n{audio / 'x.wav'}\n{audio / 'x.wav'}\n{audio / 'b'}\n"
    (tmp_path / "list.txt").write_text(listing)
    for source, stdin in ((tmp_path / "list.txt", None), ("-", listing)):
        done = run("--files-from", source, "--json", stdin=stdin)
        found = json.loads(done.stdout)["results"]
        assert [r["source"] for r in found] == [
            str(audio / n) for n in ("y.ogg", "x.wav", "b/x.flac")
        ]


def test_a_manifest_gives_the_names_and_the_results_are_one(run, audio, tmp_path):
    rows = [{"id": f"call.{n}", "audio": n} for n in ("y.ogg", "x.wav", "broken.mp3", "b/x.flac")]
    manifest = audio / "calls.jsonl"
    write_json_lines(manifest, rows)
    out = tmp_path / "out"
    assert run("--data", manifest, "--out", out, "--format", "txt").exit_code == 1
    assert [entry["id"] for entry in lines(out)] == [row["id"] for row in rows]
    assert {p.name for p in out.glob("*.txt")} == {
        "call.y.txt", "call.x.txt", "x.txt",
    }  # fmt: skip
    again = tmp_path / "again"
    assert run("--data", out / "results.jsonl", "--out", again, "--format", "txt").exit_code == 1
    for before, after in zip(lines(out), lines(again), strict=True):
        assert before == after
    few = run("--data", manifest, "--limit", 2, "--json")
    assert [r["source"] for r in json.loads(few.stdout)["results"]] == ["call.y.ogg", "call.x.wav"]


def test_a_manifest_may_name_parts_and_languages(run, audio, tmp_path):
    rows = [
        {"id": "whole", "audio": "y.ogg", "duration": 1.0},
        {"id": "part", "audio": "y.ogg", "offset": 0.5, "duration": 1.25},
        {"id": "german", "audio": "y.ogg", "lang": "German"},
        {"id": "odd", "audio": "y.ogg", "language": "xx"},
        {"id": "late", "audio": "y.ogg", "offset": 9},
    ]
    manifest = audio / "calls.jsonl"
    write_json_lines(manifest, rows)
    samples, rate = soundfile.read(audio / "y.ogg", dtype="float32")
    soundfile.write(audio / "cut.wav", samples[rate // 2 : 7 * rate // 4], rate, subtype="FLOAT")
    out = tmp_path / "out"
    assert run("--data", manifest, "--out", out).exit_code == 1
    whole, part, german, odd, late = lines(out)
    assert [e["duration_s"] for e in (whole, part)] == [pytest.approx(2.6), 1.25]
    [cut] = json.loads(run(audio / "cut.wav", "--json").stdout)["results"]
    assert part["tokens"] == cut["tokens"]
    assert [e["language"] for e in (whole, german)] == ["en", "de"]
    assert whole["tokens"] != german["tokens"]
    assert odd["kind"] == late["kind"] == "InputError"
    assert "odd: the model does not know the language 'xx'" in odd["error"]
    assert "part that begins at 9 s" in late["error"]
    asked = json.loads(run("--data", manifest, "--json", "--language", "en").stdout)["results"]
    assert [(e["source"], e["language"]) for e in asked] == [
        (name, "en") for name in ("whole", "part", "german", "odd")
    ]
    again = run("--data", out / "results.jsonl", "--out", out, "--resume", "--format", "json")
    assert "formats was" in str(again.exception)
    again = run("--data", out / "results.jsonl", "--out", out, "--resume")
    assert "0 transcribed, 3 done before, 2 failed" in again.stderr


def test_options_without_what_they_belong_to_are_refused(run, audio, tmp_path):
    for args, words in [
        (
            ("--vad-threshold", 0.5),
            "--vad-threshold does nothing without --vad or --vad-method; "
            "give --vad or --vad-method too",
        ),
        (("--vad-min-speech-s", 0.5), "--vad-min-speech-s does nothing"),
        (("--vad-min-silence-s", 0.5), "--vad-min-silence-s does nothing"),
        (("--vad-pad-s", 0.5), "--vad-pad-s does nothing"),
        (("--n-best", 3), "--n-best does nothing without --out or --json;"),
        (("--keep-tree",), "--keep-tree does nothing without --out;"),
        (("--n-best-method", "beam"), "--n-best-method does nothing without --n-best;"),
        (("--format", "txt"), "--format does nothing without --out;"),
        (("--max-line-width", 42), "--max-line-width does nothing without --out;"),
        (("--max-line-count", 2, "--out", tmp_path, "--format", "txt"), "without --format srt or"),
        (("--max-reading-speed", 2, "--out", tmp_path, "--format", "json"), "without --format srt"),
    ]:
        with pytest.raises(OptionError, match=words):
            raise run(audio / "x.wav", *args).exception
    assert not list(tmp_path.glob("*.json*"))
    given = ["--max-line-width", 20, "--out", tmp_path / "out", "--format", "txt,vtt"]
    assert run(audio / "x.wav", *given).exit_code == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--logprob-threshold", -1], "--logprob-threshold: no window is decoded again"),
        (
            ["--fallback", "--temperature", 0],
            "--compression-ratio-threshold: no window is decoded again",
        ),
        (["--fallback"], None),
        (["--logprob-threshold", -1, "--no-speech-threshold", 0.6], None),
        ([], None),
    ],
)
def test_thresholds_that_redo_nothing_are_pointed_out(run, audio, args, words):
    done = run(audio / "x.wav", *args)
    assert done.exit_code == 0
    pointed = [line for line in done.stderr.splitlines() if "no window is decoded again" in line]
    assert [words in line for line in pointed] == [True] * (words is not None)


def test_word_times_are_printed_below_their_segments(run, audio):
    done = run(audio / "x.wav", "--word-timestamps", "--fallback")
    assert done.exit_code == 0, done.output
    [found] = json.loads(run(audio / "x.wav", "--word-timestamps", "--fallback", "--json").stdout)[
        "results"
    ]
    expected = []
    for segment in found["segments"]:
        if clean(segment["text"]):
            times = f"[{segment['start_s']:.2f} -> {segment['end_s']:.2f}]"
            expected.append(f"{times} {clean(segment['text'])}")
        for word in segment["words"]:
            times = f"[{word['start_s']:.2f} -> {word['end_s']:.2f}]"
            expected.append(f"  {times} {clean(word['text'])}")
    assert len(expected) > 1 and done.stdout.splitlines() == expected
    several = run(audio / "x.wav", audio / "y.ogg", "--word-method", "attention").stdout
    assert f"{audio / 'x.wav'}:\n[" in several and f"\n{audio / 'y.ogg'}:\n[" in several


def test_all_formats_are_written_and_that_of_openai_whisper_has_its_keys(run, audio, tmp_path):
    done = run(audio / "x.wav", "--out", tmp_path / "all", "--format", "all", "--word-timestamps")
    assert done.exit_code == 0, done.output
    endings = ("txt", "srt", "vtt", "tsv", "json", "jsonl", "whisper.json")
    assert {p.name for p in (tmp_path / "all").glob("x.*")} == {f"x.{kind}" for kind in endings}
    found = json.loads((tmp_path / "all" / "x.whisper.json").read_text())
    own = json.loads((tmp_path / "all" / "x.json").read_text())
    assert list(found) == ["text", "segments", "language"] and found["language"] == "en"
    for segment, ours in zip(found["segments"], own["segments"], strict=True):
        assert list(segment) == [
            "id", "seek", "start", "end", "text", "tokens", "temperature", "avg_logprob",
            "compression_ratio", "no_speech_prob", "words",
        ]  # fmt: skip
        assert (segment["start"], segment["end"]) == (ours["start_s"], ours["end_s"])
        assert all(
            isinstance(segment[key], float)
            for key in ("avg_logprob", "compression_ratio", "no_speech_prob", "temperature")
        )
        assert [set(word) for word in segment["words"]] == [
            {"word", "start", "end", "probability"} for _ in ours["words"]
        ]
    assert found["text"] == "".join(segment["text"] for segment in found["segments"])
    plain = run(audio / "x.wav", "--out", tmp_path / "json", "--format", "json")
    assert plain.exit_code == 0
    before = json.loads((tmp_path / "json" / "x.json").read_text())
    assert before["tokens"] == own["tokens"] and before["segments"][0]["avg_logprob"] is None


def test_results_mirror_the_folders_of_their_recordings(run, audio, tmp_path):
    (audio / "broken.mp3").unlink()
    for name in ("b/c", "b.txt", "parts", "results"):
        (audio / name).mkdir()
        (audio / name / "x.wav").write_bytes((audio / "x.wav").read_bytes())
    (audio / "b.wav").write_bytes((audio / "x.wav").read_bytes())
    words = [audio, audio / "b" / "x.flac", "--format", "txt,json", "--keep-tree"]
    done = run(*words, "--out", tmp_path / "out", "--limit", 3)
    assert done.exit_code == 0, done.output
    done = run(*words[:-1], "--out", tmp_path / "out", "--resume")
    assert "keep_tree was True, is False" in str(done.exception)
    assert run(*words[:-1], "--keep-tree", "--out", tmp_path / "out", "--resume").exit_code == 0
    run(*words, "--out", tmp_path / "whole")
    folders = [tmp_path / name for name in ("out", "whole")]
    resumed, whole = map(contents, folders)
    assert resumed == whole
    stems = {"x", "y", "b", "b/x", "b/c/x", "b.txt_/x", "parts_/x", "results_/x"}
    assert {entry["name"] for entry in lines(tmp_path / "whole")} == stems
    written = (tmp_path / "whole").rglob("*.txt")
    assert {str(p.relative_to(tmp_path / "whole")) for p in written if p.is_file()} == {
        f"{stem}.txt" for stem in stems
    }


def test_a_truncated_recording_fails_or_is_marked(run, audio, tmp_path, kit):
    whole = (audio / "y.ogg").read_bytes()
    for name in ("b/x.flac", "broken.mp3", "y.ogg"):
        (audio / name).unlink()
    (audio / "cut.ogg").write_bytes(whole[: len(whole) * 3 // 4])
    soundfile.write(audio / "short.wav", kit.noise(2.0), kit.rate)
    data = (audio / "short.wav").read_bytes()
    (audio / "short.wav").write_bytes(data[: len(data) // 2])
    (audio / "head.wav").write_bytes(data[:44])
    failed = json.loads(run(audio, "--json").stdout)
    assert (failed["transcribed"], failed["failed"], failed["truncated"]) == (1, 3, 0)
    assert all("--allow-truncated" in one["error"] for one in failed["failures"])
    out = tmp_path / "out"
    done = run(audio, "--out", out, "--format", "json", "--allow-truncated")
    assert "3 transcribed, 0 done before, 1 failed" in done.stderr and "2 truncated" in done.stderr
    assert f"as far as it goes: {audio / 'cut.ogg'}: is truncated" in done.stderr
    cut, head, short, x = lines(out)
    assert "is truncated" in cut["truncated"] and "is truncated" in short["truncated"]
    assert x["truncated"] is None and "is truncated" in head["error"]
    assert 0.5 < short["duration_s"] < 1.1 and short["tokens"]
    assert json.loads((out / "cut.json").read_text())["truncated"] == cut["truncated"]


def test_links_are_read_or_named(run, audio, tmp_path):
    (audio / "broken.mp3").unlink()
    (audio / "loop").symlink_to(audio)
    (audio / "gone.wav").symlink_to(tmp_path / "nowhere.wav")
    (audio / "round.wav").symlink_to(audio / "round.wav")
    (audio / "notes").symlink_to(tmp_path / "nothing.txt")
    (audio / "z.wav").symlink_to(audio / "x.wav")
    done = run(audio, "--json")
    assert done.exit_code == 0, done.output
    found = [one["source"] for one in json.loads(done.stdout)["results"]]
    assert found == [str(audio / name) for name in ("b/x.flac", "x.wav", "y.ogg", "z.wav")]
    assert f"skipped {audio / 'loop'}: a link to a folder, not followed" in done.stderr
    assert f"skipped {audio / 'gone.wav'}: a link that leads nowhere ({tmp_path}" in done.stderr
    assert f"skipped {audio / 'round.wav'}: a link that leads nowhere" in done.stderr
    assert "notes" not in done.stderr and done.stderr.count("skipped") == 3
    assert run(audio / "loop", "--json").exit_code == 0


def test_no_bar_but_ours_is_shown(run, audio):
    logging.enable_progress_bar()
    try:
        assert "Loading weights" not in run(audio / "x.wav").stderr
    finally:
        logging.disable_progress_bar()


def test_limits_of_subtitles_reach_the_files(run, audio, tmp_path):
    out = tmp_path / "out"
    options = ["--format", "srt", "--max-line-width", 4, "--max-line-count", 1]
    assert run(audio / "y.ogg", "--out", out, *options, "--no-timestamps").exit_code == 0
    shown = [block.splitlines()[2:] for block in (out / "y.srt").read_text().split("\n\n") if block]
    assert all(len(block) == 1 and len(block[0]) <= 4 for block in shown)
    other = run(audio / "y.ogg", "--out", out, "--format", "srt", "--no-timestamps", "--resume")
    assert isinstance(other.exception, OptionError)


def test_names_that_are_not_utf_8_are_transcribed_and_shown(run, audio, tmp_path):
    odd = audio / "a\udcff.wav"
    (audio / "x.wav").rename(odd)
    assert run(odd, "--out", tmp_path / "out").exit_code == 0
    assert [entry["id"] for entry in lines(tmp_path / "out")] == [str(odd)]
    assert run(odd, audio / "y.ogg").exit_code == 0


def test_the_last_line_says_how_fast_it_was(run, audio):
    done = run(audio / "x.wav", audio / "y.ogg")
    assert re.search(
        r"2 transcribed, 0 done before, 0 failed; 3\.2 s of audio in \d+\.\d s, RTFx \d+\.\d, "
        r"\d\.\d\d tokens per pass\n",
        done.stderr,
    ), done.stderr


def test_counters_of_several_processes_add_up():
    one = {"calls": 1, "tokens": 9, "passes": 3, "row_passes": 2, "drafted": 4, "accepted": 2}
    one |= {"acceptance_length": 4.0, "acceptance_rate": 0.5, "accepted_histogram": [1, 1]}
    two = {"calls": 2, "tokens": 8, "passes": 6, "row_passes": 6, "drafted": 0, "accepted": 0}
    two |= {"acceptance_length": 1.0, "acceptance_rate": 0.0, "accepted_histogram": [6]}
    assert summed([one, {}, two]) == {
        "calls": 3, "tokens": 17, "passes": 9, "row_passes": 8, "drafted": 4, "accepted": 2,
        "acceptance_length": 1.75, "acceptance_rate": 0.5, "accepted_histogram": [7, 1],
    }  # fmt: skip

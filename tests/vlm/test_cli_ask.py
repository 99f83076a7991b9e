"""``mmdecode ask`` from end to end, and resuming."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from PIL import Image, ImageOps
from transformers import GenerationMixin

from mmdecode.errors import InputError, OptionError
from mmdecode.runs import crashes as journals
from mmdecode.runs import lines
from mmdecode.runs.crashes import InFlight
from mmdecode.runs.files import note_settings, write_file
from mmdecode.vlm import Answerer
from mmdecode.vlm.images import ImageSource
from mmdecode.vlm.jobs import AnswerFolder, watched
from mmdecode.vlm.requests import asked_of
from mmdecode.vlm.results import Answer
from tests.support.commands import invoke
from tests.support.files import json_lines, write_json_lines

GUIDE = "contrast:alpha=1,prompt=last_token"


@pytest.fixture
def images(tmp_path, kit):
    """A folder of images, one of them broken."""
    (tmp_path / "images" / "b").mkdir(parents=True)
    for seed, name in enumerate(("x.png", "b/x.webp", "y.bmp")):
        kit.image(seed).save(tmp_path / "images" / name, lossless=True)
    (tmp_path / "images" / "broken.jpg").write_text("no image")
    (tmp_path / "images" / "notes.txt").write_text("not even named like an image")
    return tmp_path / "images"


@pytest.fixture
def run(folder):
    def call(*args):
        options = ["--model", folder, "--device", "cpu", "--max-new-tokens", 5]
        return invoke("ask", *args, *options)

    return call


@pytest.fixture
def table(tmp_path, images):
    """Six questions in a table; the fourth is about a broken image."""
    names = ["x.png", "b/x.webp", "y.bmp", "broken.jpg", "x.png", "y.bmp"]
    rows = [
        {"question_id": index, "image": name, "text": f"What is beside star {index}?"}
        for index, name in enumerate(names)
    ]
    path = images / "questions.jsonl"
    write_json_lines(path, rows)
    return path


def results(folder):
    return folder / "results.jsonl"


# What is printed


def test_each_question_is_asked_about_each_image(run, images, folder, kit):
    done = run(images / "x.png", images / "y.bmp", "-q", "What?", "-q", "Is it?")
    assert done.exit_code == 0, done.output
    answerer = Answerer.from_pretrained(folder, device="cpu")
    pixels = [kit.image(0), kit.image(0), kit.image(2), kit.image(2)]
    answers = answerer(pixels, ["What?", "Is it?"] * 2, max_new_tokens=5)
    shown = done.stdout
    for answer, name in zip(answers, ("x.png", "x.png", "y.bmp", "y.bmp"), strict=True):
        assert f"{images / name}: {answer.question} {printable(answer.text)}" in printable(shown)
    assert "4 answered, 0 done before, 0 failed; 20 tokens in" in done.stderr


def printable(text):
    """What rich leaves of a text."""
    return "".join(c for c in text if c.isprintable() or c == "\n")


def test_a_single_answer_stands_alone(run, images, folder, kit):
    done = run(images / "x.png", "-q", "What?")
    answer = Answerer.from_pretrained(folder, device="cpu")(kit.image(0), "What?", max_new_tokens=5)
    assert printable(done.stdout).strip() == printable(answer.text).strip()


def test_a_stream_prints_what_is_printed_otherwise(run, images):
    for more in ((), ("-q", "Is it?")):
        words = (images / "x.png", "-q", "What?", *more)
        stock, streamed = run(*words), run(*words, "--stream")
        assert streamed.exit_code == 0, streamed.output
        assert printable(streamed.stdout) == printable(stock.stdout)
    done = run(images / "broken.jpg", images / "x.png", "-q", "What?", "--stream")
    assert done.exit_code == 1
    assert "failed: " in done.stderr and "1 answered, 0 done before, 1 failed" in done.stderr


def test_json_is_one_object_and_alone_on_stdout(run, images):
    done = run(images, "-q", "What?", "--json", "--draft", "lookup", "--guide", GUIDE)
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert done.exit_code == 1
    assert (found["answered"], found["failed"], found["resumed"]) == (3, 1, 0)
    assert isinstance(found["answers"][0]["margin"], float)
    assert found["failures"][0]["error"].startswith(str(images / "broken.jpg"))
    assert found["stats"]["tokens"] == sum(len(a["token_ids"]) for a in found["answers"])


def test_images_are_asked_about_together(run, images):
    words = (images / "x.png", images / "y.bmp", "-q", "Is it?", "--together", "--json")
    [answer] = json.loads(run(*words).stdout)["answers"]
    assert answer["images"] == [str(images / "x.png"), str(images / "y.bmp")]


def test_text_alone_is_asked(run):
    done = run("-q", "What?", "--text-only", "--json")
    assert json.loads(done.stdout)["answers"][0]["images"] == []


def test_sampling_is_by_seed(run, images):
    def texts(*options):
        done = run(images / "x.png", "-q", "What?", "--json", *options)
        return json.loads(done.stdout)["answers"][0]["token_ids"]

    hot = ("--sample", "--temperature", 9)
    assert texts(*hot) == texts(*hot) != texts(*hot, "--seed", 1)
    assert texts(*hot) != texts() == texts("--sample", "--top-k", 1)


def test_an_animation_is_asked_about_by_its_first_frame_with_a_notice(run, tmp_path, kit):
    path = tmp_path / "film.webp"
    frames = [ImageOps.invert(kit.image(0))]
    kit.image(0).save(path, lossless=True, save_all=True, append_images=frames)
    kit.image(0).save(tmp_path / "still.png")
    film, still = (run(tmp_path / name, "-q", "What?") for name in ("film.webp", "still.png"))
    assert film.stdout == still.stdout
    assert f"{path}: has 2 frames or pages" in film.stderr
    assert "UserWarning" not in film.stderr


# What is written, and continued


def test_a_table_becomes_lines_in_its_order(run, table, tmp_path, images):
    out = tmp_path / "new" / "answers"
    done = run("--data", table, "--out", out, "--batch-size", 2)
    assert done.exit_code == 1
    assert done.stdout == ""
    found = json_lines(results(out))
    assert [line["id"] for line in found] == [str(index) for index in range(6)]
    assert found[0]["images"] == [str(images / "x.png")]
    known = {"id", "images", "question", "text", "token_ids", "margin", "sizes", "digests"}
    assert set(found[0]) == known
    assert set(found[3]) == {"id", "images", "question", "error", "kind"}
    again = tmp_path / "again"
    assert run("--data", results(out), "--out", again).exit_code == 1
    assert results(again).read_text() == results(out).read_text()


def test_relative_paths_may_start_elsewhere(run, table, tmp_path, images):
    moved = tmp_path / "moved.jsonl"
    shutil.move(table, moved)
    out = tmp_path / "answers"
    assert run("--data", moved, "--out", out, "--limit", 1).exit_code == 1
    done = run("--data", moved, "--out", out, "--resume", "--images", images)
    assert "5 answered, 0 done before, 1 failed" in done.stderr


def test_an_interrupted_run_is_continued_where_it_stopped(run, table, tmp_path, images):
    whole, out = tmp_path / "whole", tmp_path / "answers"
    run("--data", table, "--out", whole)
    run("--data", table, "--out", out, "--limit", 4)
    with results(out).open("ab") as file:
        answered = lines_of(results(whole))
        file.write(answered[5] + answered[4][:40])  # out of order, and cut off
    done = run("--data", table, "--out", out, "--resume")
    assert "1 answered, 4 done before, 1 failed" in done.stderr
    assert results(out).read_bytes() == results(whole).read_bytes()
    Image.new("RGB", (4, 4)).save(images / "broken.jpg")
    done = run("--data", table, "--out", out, "--resume")
    assert done.exit_code == 0
    assert "1 answered, 5 done before, 0 failed" in done.stderr
    assert [line["id"] for line in json_lines(results(out))] == [str(index) for index in range(6)]
    assert run("--data", table, "--out", out, "--resume").exit_code == 0


def test_lines_say_which_batches_were_halved_for_lack_of_memory(run, table, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole", tmp_path / "answers"
    run("--data", table, "--out", whole)
    right = Answerer._batch

    def short(self, questions, **how):
        if len(questions) > 3:
            raise torch.OutOfMemoryError
        return right(self, questions, **how)

    monkeypatch.setattr(Answerer, "_batch", short)
    run("--data", table, "--out", out)
    found, expected = (json_lines(results(folder)) for folder in (out, whole))
    sizes = [line.get("batch_size") for line in found]
    assert sorted(filter(None, sizes)) == [2, 2, 3, 3, 3] and sizes[3] is None  # the broken image
    assert [line.get("text") for line in found] == [line.get("text") for line in expected]


def test_a_run_that_is_stopped_says_last_how_far_it_got(run, table, tmp_path, monkeypatch):
    answers = Answerer.answers

    def stopped(self, *given, **options):
        found = answers(self, *given, **options)
        yield next(found)
        raise KeyboardInterrupt

    monkeypatch.setattr(Answerer, "answers", stopped)
    out = tmp_path / "answers"
    done = run("--data", table, "--out", out, "--batch-size", 1)
    assert done.exit_code == 130
    last = done.stderr.splitlines()[-1]
    assert last == f"stopped: 1 of 6 done in {out}; go on with --resume"
    monkeypatch.undo()
    done = run("--data", table, "--out", out, "--resume")
    assert "4 answered, 1 done before, 1 failed" in done.stderr


def lines_of(path):
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.slow
def test_a_run_that_is_killed_loses_no_line(folder, table, tmp_path, run):
    out, whole = tmp_path / "answers", tmp_path / "whole"
    words = ["--data", table, "--batch-size", 1]
    run(*words, "--out", whole)
    command = [sys.executable, "-m", "mmdecode", "ask", *words, "--out", out]
    command += ["--model", folder, "--device", "cpu", "--max-new-tokens", "5"]
    process = subprocess.Popen([str(w) for w in command], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    file = results(out)
    while not (file.exists() and file.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert results(out).stat().st_size
    run(*words, "--out", out, "--resume")
    assert results(out).read_bytes() == results(whole).read_bytes()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "continue it with --resume, replace it with --overwrite, or choose another --out"),
        (
            ("--resume", "--sample"),
            "do_sample was False, is True); give the earlier ones to continue, replace",
        ),
        (("--resume", "--guide", GUIDE), "guide was None"),
    ],
)
def test_answers_of_other_settings_are_not_continued(run, table, tmp_path, more, message):
    out = tmp_path / "answers"
    run("--data", table, "--out", out, "--limit", 1)
    before = results(out).read_bytes()
    done = run("--data", table, "--out", out, *more)
    assert isinstance(done.exception, OptionError)
    assert message in str(done.exception)
    assert results(out).read_bytes() == before


def test_answers_to_other_questions_are_not_continued(run, table, tmp_path):
    out = tmp_path / "answers"
    run("--data", table, "--out", out, "--limit", 2)
    table.write_text(table.read_text().replace("star 1", "ring 1"))
    done = run("--data", table, "--out", out, "--resume")
    assert "an answer with the id '1', which is now the id of another question" in str(
        done.exception
    )


def test_what_cannot_be_written_or_resumed_is_reported(run, table, tmp_path, images, monkeypatch):
    monkeypatch.setattr(lines, "WAIT_S", 0.2)
    done = run("--data", table, "--out", table)
    assert isinstance(done.exception, InputError)
    (tmp_path / "held" / "results.jsonl").mkdir(parents=True)
    done = run("--data", table, "--out", tmp_path / "held")
    assert isinstance(done.exception, OptionError)
    assert "choose another --out" in str(done.exception)
    out = tmp_path / "answers"
    requests = asked_of([str(images / "x.png")], ["What?"])
    write_file(out / "results.jsonl", "{}\n")
    note_settings(out, {"a": 1})
    with pytest.raises(InputError, match="line 1 is not an answer; remove the line"):
        opened(out, requests)
    (out / "results.jsonl").write_text("")
    first = opened(out, requests)
    with pytest.raises(OptionError, match="another run is writing to"):
        opened(out, requests)
    first.close()


def opened(folder, requests):
    """The folder of a run that is continued."""
    answers = AnswerFolder(folder, {"a": 1}, requests, resume=True)
    return answers.open(answers.prepare())


# What is refused before a model is loaded


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to ask; give -q"),
        (("a.png",), "nothing to ask; give -q"),
        (("-q", "What?"), "no image to ask about; give one, or --text-only"),
        (("a.png", "-q", "What?", "--text-only"), "leave out the images"),
        (("a.png", "a.png", "-q", "Is?", "-q", "Is?"), "is given twice"),
        (("a.png", "-q", "What?", "--data", "q.jsonl"), "--data already has images and questions"),
        (("--data", "gone.jsonl"), "gone.jsonl cannot be read"),
        (("a.png", "-q", "What?", "--temperature", "0.5"), "--temperature does nothing without"),
        (("a.png", "-q", "What?", "--sample", "--temperature", "0"), "temperature=0.0; expected"),
        (("a.png", "-q", "What?", "--resume"), "--resume does nothing without --out"),
        (("a.png", "-q", "What?", "--images", "."), "does nothing without --data"),
        (("a.png", "-q", "What?", "--stream", "--json"), "leave out --out and --json"),
    ],
)
def test_what_cannot_be_asked_is_refused(run, monkeypatch, words, message):
    def loaded(*args, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(Answerer, "from_pretrained", loaded)
    done = run(*words)
    assert message in str(done.exception)


def test_a_folder_without_images_and_a_method_nobody_knows_are_refused(run, tmp_path, images):
    (tmp_path / "empty").mkdir()
    assert "holds no image files" in str(run(tmp_path / "empty", "-q", "What?").exception)
    for option, name in (("--guide", "contrasst"), ("--draft", "lokup")):
        done = run(images / "x.png", "-q", "What?", option, name)
        assert "did you mean" in str(done.exception)


# Images that end the process


def test_what_is_being_read_is_noted(tmp_path):
    path = tmp_path / "reading"
    noted = []

    def read():
        noted.append(path.read_bytes())
        raise InputError("no image")

    journal = InFlight(path)
    with pytest.raises(InputError):
        watched(ImageSource("one.png", read), journal).read()
    assert noted == [b"one.png"] and path.read_bytes() == b""
    journal.close()
    assert not path.exists()


def test_an_image_at_which_a_run_died_is_read_apart_from_then_on(
    tmp_path, monkeypatch, run, table, images
):
    out = tmp_path / "answers"
    reading = tmp_path / "answers" / ".reading-0.tmp"
    died = [os.fsencode(images / name) for name in ("x.png", "y.bmp")]
    out.mkdir()
    reading.write_bytes(b"\0".join(died))
    apart = []

    def process(command, **options):
        apart.append(os.fsencode(command[-1]))
        return subprocess.CompletedProcess(command, -6 if command[-1].endswith("x.png") else 0)

    monkeypatch.setattr(journals.subprocess, "run", process)
    words = ("--data", table, "--out", out, "--resume")
    for _ in range(2):
        done = run(*words)
        assert done.exit_code == 1 and "crashes the library that decodes it (exit code -6)" in (
            done.stderr
        )
        failed = ["error" in line for line in json_lines(results(out))]
        assert failed == [True, False, False, True, True, False]
        assert reading.read_bytes() == died[0], "the other one was read to its end"
    assert set(apart) == set(died) and apart.count(died[1]) == 1


def test_a_crash_in_a_process_apart_is_an_error(tmp_path):
    journal = InFlight(tmp_path / "reading", ["one.png"])
    with pytest.raises(InputError, match=r"one.png: crashes the library .* \(exit code -6\)"):
        one = ImageSource("one.png", lambda: None)
        journals.watched(one, journal, "one.png", "import os; os.abort()", "convert it").read()
    journal.close()


@pytest.mark.parametrize("code", ["raise MemoryError", "import sys; sys.exit(3)"])
def test_a_failure_of_python_in_a_process_apart_condemns_no_file(tmp_path, code):
    journal = InFlight(tmp_path / "reading", ["one.png"])
    one = ImageSource("one.png", lambda: "image")
    assert journals.watched(one, journal, "one.png", code, "convert it").read() == "image"
    assert not journal.suspects
    journal.close()


@pytest.mark.parametrize("status", [-11, 0xC0000005])
def test_a_crash_is_named_by_what_ended_the_process(monkeypatch, status):
    monkeypatch.setattr(
        journals.subprocess,
        "run",
        lambda command, **_: subprocess.CompletedProcess(command, status),
    )
    with pytest.raises(InputError, match="crashes the library"):
        journals.read_apart("", "one.png", "convert it")


def test_no_journal_is_left_where_nothing_crashed(run, table, tmp_path):
    run("--data", table, "--out", tmp_path / "answers")
    assert not (tmp_path / "answers" / ".reading-0.tmp").exists()


def test_whatever_one_question_of_a_stream_raises_the_others_are_answered(run, images, monkeypatch):
    whole, calls = GenerationMixin.generate, []

    def generate(*args, **named):
        calls.append(named)
        if len(calls) == 1:
            raise RuntimeError("of the model")
        return whole(*args, **named)

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    done = run(images / "x.png", images / "y.bmp", "-q", "What?", "--stream")
    assert done.exit_code == 1, done.output
    assert "1 answered, 0 done before, 1 failed" in done.stderr
    assert "failed: RuntimeError: of the model" in " ".join(done.stderr.split())


def test_a_stream_passes_over_rows_that_ask_nothing(run, images):
    table = images / "t.jsonl"
    rows = [{"image": "x.png", "question": "What?"}, {"image": "y.bmp"}]
    write_json_lines(table, rows)
    done = run("--data", table, "--stream")
    assert "1 answered, 0 done before, 1 failed" in done.stderr
    assert "line 2 asks nothing" in " ".join(done.stderr.split())


def test_a_stream_samples_the_same_tokens(run, table, images):
    rows = [{"id": f"name {n}", "image": "y.bmp", "question": f"What {n}?"} for n in range(3)]
    write_json_lines(table, rows)
    words = ("--data", table, "--sample", "--temperature", 3)
    stock, streamed = run(*words), run(*words, "--stream")
    assert streamed.exit_code == stock.exit_code == 0, streamed.output
    assert printable(streamed.stdout) == printable(stock.stdout)


def test_an_answer_outweighs_a_later_failure(run, table, tmp_path):
    out = tmp_path / "answers"
    run("--data", table, "--out", out)
    whole = json_lines(results(out))
    failed = {key: whole[0][key] for key in ("id", "images", "question")} | {"error": "late"}
    with results(out).open("a") as file:
        file.write(json.dumps(failed) + "\n")
    run("--data", table, "--out", out, "--resume")
    assert json_lines(results(out)) == whole


# Rows that cannot be asked


def test_a_row_that_cannot_be_asked_fails_alone_and_stays_in_the_results(run, images, tmp_path):
    rows = [
        {"id": "a", "image": "x.png", "question": "What?"},
        {"id": "b", "image": "x.png"},
        {"id": "a", "image": "y.bmp", "question": "Is it?"},
        {"image": "y.bmp", "question": ["Is it?"]},
        {"id": "c", "image": "y.bmp", "question": "Is it?"},
    ]
    table, out = images / "t.jsonl", tmp_path / "out"
    write_json_lines(table, rows)
    done = run("--data", table, "--out", out)
    assert done.exit_code == 1, done.output
    assert "2 answered, 0 done before, 3 failed" in done.stderr
    written = json_lines(out / "results.jsonl")
    assert [line["id"] for line in written] == ["a", "b", "a#3", "#4", "c"]
    assert ["error" in line for line in written] == [False, True, True, True, False]
    assert "line 2 asks nothing; expected 'question'" in written[1]["error"]
    assert "line 3 has the id 'a' of line 1" in written[2]["error"]
    done = run("--data", table, "--out", out, "--resume")
    assert "0 answered, 2 done before, 3 failed" in done.stderr
    assert json_lines(out / "results.jsonl") == written


def test_a_line_that_is_no_json_or_no_text_fails_alone(run, images, tmp_path):
    table = images / "t.jsonl"
    rows = [b'{"image": "x.png", "question": "Is it?"}', b"{", b'{"question": "\xe9"}', b"3"]
    table.write_bytes(b"\n".join(rows))
    done = run("--data", table, "--out", tmp_path / "out")
    assert done.exit_code == 1, done.output
    assert "1 answered, 0 done before, 3 failed" in done.stderr
    problems = [line.get("error", "") for line in json_lines(tmp_path / "out" / "results.jsonl")]
    for problem, expected in zip(problems, ("", "not JSON", "not UTF-8", "holds int"), strict=True):
        assert expected in problem


def test_a_table_without_any_question_is_refused(run, images, tmp_path):
    table, out = images / "t.jsonl", tmp_path / "out"
    table.write_text('{"image": "x.png"}\n{"image": "y.bmp"}\n')
    with pytest.raises(InputError, match="line 1 asks nothing"):
        raise run("--data", table, "--out", out).exception
    assert not out.exists()


def test_results_that_we_did_not_write_are_refused_as_such(run, images, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.jsonl").write_text("mine")
    words = (images / "x.png", "-q", "What?", "--out", out)
    with pytest.raises(OptionError, match=r"results\.jsonl: there already, and not written by"):
        raise run(*words).exception
    assert [path.name for path in out.iterdir()] == ["results.jsonl"]
    assert (out / "results.jsonl").read_text() == "mine"
    assert run(*words, "--overwrite").exit_code == 0
    assert len(json_lines(out / "results.jsonl")) == 1


def test_questions_about_an_image_that_changed_are_asked_again(run, images, tmp_path, kit):
    out = tmp_path / "out"
    words = (images / "x.png", images / "y.bmp", "-q", "What?", "--out", out)
    assert run(*words).exit_code == 0
    before = json_lines(out / "results.jsonl")
    kit.image(9).save(images / "x.png")
    done = run(*words, "--resume", "--json")
    found = json.loads(done.stdout)
    assert (found["answered"], found["resumed"], found["changed"]) == (1, 1, 1)
    after = json_lines(out / "results.jsonl")
    assert after[1] == before[1]
    assert after[0]["digests"] != before[0]["digests"]
    assert after[0]["token_ids"] != before[0]["token_ids"]
    assert json.loads(run(*words, "--resume", "--json").stdout)["changed"] == 0


def test_an_image_that_changes_after_it_was_read_is_noted_as_it_was_read(tmp_path, kit):
    path, out = tmp_path / "x.png", tmp_path / "out"
    kit.image(3).save(path)
    requests = asked_of([str(path)], ["What?"])
    note_settings(out, {"a": 1})
    file = opened(out, requests)
    [request] = map(file.noted, requests)
    request.images[0].read()
    kit.image(9).save(path)
    file.add(Answer(id=request.id, index=0, images=(str(path),), question="What?", text="A star."))
    file.close()
    again = opened(out, requests)
    assert again.changed == {request.id}
    again.close()

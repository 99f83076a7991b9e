"""``mmdecode generate-image`` from end to end, and resuming."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from mmdecode.errors import InputError, OptionError, UnknownNameError
from mmdecode.image_ar import ImageGenerator
from mmdecode.image_ar.jobs import ImageFolder, codes_in, laid_out
from mmdecode.image_ar.results import ImageRequest
from mmdecode.runs.files import claimed
from tests.support.commands import invoke
from tests.support.files import contents, json_lines


@pytest.fixture
def run(classes, tmp_path):
    def call(*words, model=classes, out=None):
        options = ["--model", model, "--device", "cpu", "--out", out or tmp_path / "out"]
        return invoke("generate-image", *words, *options)

    return call


def lines(folder):
    return json_lines(folder / "results.jsonl")


# What is drawn


def test_images_are_files_whose_metadata_say_how_they_were_generated(run, tmp_path, classes):
    words = ("--class", "Ring", "--class-id", 2, "-n", 2, "--guidance", 2, "--seed", 5)
    done = run(*words, "--draft", "jacobi:window=8", "--top-k", 9, "--grid", "--likelihood")
    assert done.exit_code == 0, done.output
    assert done.stdout == "" and "4 drawn, 0 done before, 0 failed; 100 tokens in" in done.stderr
    assert "law" not in done.stderr
    out = tmp_path / "out"
    names = ["ring-0-000", "ring-0-001", "hound-2-000", "hound-2-001"]
    files = {f"{name}.png" for name in names}
    assert set(contents(out)) == {*files, "grid.png", "results.jsonl", "run.json"}
    generator = ImageGenerator.from_pretrained(classes, device="cpu", guidance=2, seed=5, top_k=9)
    images = generator(["ring", 2], 2, likelihood=True)
    found = lines(out)
    assert [line["id"] for line in found] == names
    for line, image in zip(found, images, strict=True):
        with Image.open(out / line["file"]) as shown:
            assert shown.tobytes() == image.image.tobytes()
            metadata = shown.text
        assert line["log_likelihood"] == pytest.approx(image.log_likelihood, abs=1e-3)
        assert line["law"] == metadata["law"] == "exact" and line["passes"] < 24
        assert metadata["model"] == str(classes) and metadata["draft"] == "jacobi:window=8"
        assert (metadata["seed"], metadata["ordinal"]) == ("5", str(image.ordinal))
        assert metadata["condition"] == str(image.condition) and metadata["accept"] == "auto"
        assert json.loads(metadata["sampling"])["top_k"] == 9 and metadata["guidance"] == "2.0"
        assert metadata["Software"].startswith("mmdecode ")
        assert torch.equal(codes_in(out / line["file"], str(classes)), image.codes)
    with Image.open(out / "grid.png") as page:
        assert page.size == (22, 22)
        assert page.crop((12, 0, 22, 10)).tobytes() == images[1].image.tobytes()
        assert page.crop((0, 12, 10, 22)).tobytes() == images[2].image.tobytes()


def test_lines_have_no_passes_where_these_depend_on_measured_times(run, tmp_path):
    done = run("--class", "star", "--draft", "adaptive:draft=jacobi:window=8")
    assert done.exit_code == 0, done.output
    [line] = lines(tmp_path / "out")
    assert "passes" not in line and line["law"] == "exact"
    with Image.open(tmp_path / "out" / line["file"]) as shown:
        assert "passes" not in shown.text


def test_lossy_modes_are_labelled_wherever_they_are_shown(run, tmp_path):
    done = run("--class", "star", "--mode", "relaxed", "--json")
    found = json.loads(done.stdout)
    assert found["law"] == "heuristic" and found["images"][0]["law"] == "heuristic"
    assert "heuristic: not the model's own distribution" in done.stderr
    with Image.open(tmp_path / "out" / found["images"][0]["file"]) as shown:
        assert shown.text["law"] == "heuristic" and shown.text["mode"] == "relaxed"


def test_json_is_one_object_and_alone_on_stdout(run, tmp_path):
    done = run("--class-id", 0, "--class-id", 3, "--json")
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert (found["drawn"], found["resumed"], found["failed"]) == (2, 0, 0)
    assert found["stats"]["tokens"] == 50 and found["images"] == lines(tmp_path / "out")


def test_lines_of_a_file_are_classes_or_prompts(run, tmp_path, captions):
    file = tmp_path / "wanted.txt"
    file.write_text("\ufeffstar\n\n3\n")
    assert run("--prompts", file).exit_code == 0
    assert [line["condition"] for line in lines(tmp_path / "out")] == [1, 3]
    file.write_text("a red ring\na red ring beside a blue star\nRED star\n")
    done = run("--prompts", file, "--prompt", "blue", model=captions, out=tmp_path / "texts")
    assert done.exit_code == 1
    assert "3 drawn, 0 done before, 1 failed" in done.stderr
    assert "a caption has 8 tokens, the model reads 6" in done.stderr
    found = lines(tmp_path / "texts")
    assert ["error" in line for line in found] == [False, False, True, False]
    assert found[1]["id"].startswith("a-red-ring-") and found[1]["id"].endswith("-000")
    assert len({line["id"] for line in found}) == 4


def test_a_line_that_names_nothing_fails_alone(run, tmp_path, captions):
    file = tmp_path / "wanted.txt"
    file.write_bytes(b"star\nunknown\n\xff\xfe\n99\n" + b"9" * 5000 + b"\n3\n")
    done = run("--prompts", file, "--json")
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert [line["condition"] for line in lines(tmp_path / "out")] == [1, 3]
    assert (found["drawn"], found["failed"]) == (2, 4)
    problems = [one["error"] for one in found["failures"]]
    starts = ("line 2: ", "line 3 is not UTF-8", "line 4: class 99 does not exist", "line 5: ")
    for problem, start in zip(problems, starts, strict=True):
        assert problem.startswith(f"{file}, {start}") and f"failed: {problem}" in done.stderr
    again = run("--prompts", file, "--resume")
    assert again.exit_code == 1 and "0 drawn, 2 done before, 4 failed" in again.stderr
    words = ("--prompts", file, "--raw-prompt")
    done = run(*words, model=captions, out=tmp_path / "texts")
    assert done.exit_code == 1 and "line 3 is not UTF-8 text" in done.stderr


@pytest.mark.parametrize("content", [b"unknown\n99\n", b"\xff\n"])
def test_a_file_without_a_valid_line_is_refused(run, tmp_path, content):
    file = tmp_path / "wanted.txt"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"wanted\.txt, line 1.*no line of the file is valid"):
        raise run("--prompts", file).exception
    assert run("--prompts", file, "--class", "star").exit_code == 1


# What is completed


def test_an_image_is_continued_and_filled_in(run, tmp_path, classes):
    run("--class", "ring", "--mode", "exact")
    start = tmp_path / "out" / "ring-0-000.png"
    words = ("--class", "ring", "--start", start)
    done = run(*words, "--keep-rows", 3, out=tmp_path / "same")
    assert done.exit_code == 0, done.output
    assert lines(tmp_path / "same")[0]["completion"] == "continued"
    again = codes_in(tmp_path / "same" / start.name, str(classes))
    assert torch.equal(again, codes_in(start, str(classes)))
    mask = Image.new("L", (10, 10), 0)
    mask.paste(255, (4, 4, 8, 8))
    mask.save(tmp_path / "mask.png")
    done = run("--class", "star", "--start", start, "--mask", tmp_path / "mask.png")
    assert isinstance(done.exception, OptionError), "of another run"
    done = run(
        "--class", "star", "--start", start, "--mask", tmp_path / "mask.png", out=tmp_path / "other"
    )
    assert done.exit_code == 0, done.output
    (line,) = lines(tmp_path / "other")
    assert line["completion"] == line["law"] == "locally constrained"
    assert "locally constrained: not the model's own distribution" in done.stderr
    with Image.open(tmp_path / "other" / line["file"]) as shown:
        assert shown.text["law"] == "locally constrained"
    filled = codes_in(tmp_path / "other" / "star-1-000.png", str(classes))
    changed = filled != again
    assert (
        changed.any()
        and not changed[:2].any()
        and not changed[4:].any()
        and not changed[:, 4:].any()
    )
    with Image.open(start) as shown:
        shown.convert("RGB").save(tmp_path / "plain.png")
        levels = torch.tensor(bytearray(shown.tobytes()), dtype=torch.uint8)
    words = ("--class", "ring", "--start", tmp_path / "plain.png", "--keep-rows", 3)
    run(*words, out=tmp_path / "read")
    pixels = levels.view(10, 10, 3).permute(2, 0, 1) / 255
    image = ImageGenerator.from_pretrained(classes, device="cpu")(0, start=pixels, known=15)
    assert torch.equal(codes_in(tmp_path / "read" / start.name, str(classes)), image.codes)


def test_codes_of_another_model_or_of_other_pixels_are_not_taken(run, tmp_path, classes, altered):
    run("--class", "ring")
    start, other = tmp_path / "out" / "ring-0-000.png", altered(classes)
    assert codes_in(start, str(classes)) is not None
    assert codes_in(start, str(other)) is None
    with Image.open(start) as shown:
        texts = PngInfo()
        for name, text in shown.text.items():
            texts.add_text(name, text)
        shown.save(tmp_path / "same.png", pnginfo=texts)
        altered = shown.copy()
    altered.paste((250, 5, 5), (0, 0, 10, 2))
    altered.save(tmp_path / "painted.png", pnginfo=texts)
    assert codes_in(tmp_path / "same.png", str(classes)) is not None
    assert codes_in(tmp_path / "painted.png", str(classes)) is None
    words = ("--class", "ring", "--keep-rows", 3, "--start")
    done = run(*words, tmp_path / "painted.png", out=tmp_path / "on")
    assert done.exit_code == 0, done.output
    levels = torch.tensor(bytearray(altered.tobytes()), dtype=torch.uint8)
    pixels = levels.view(10, 10, 3).permute(2, 0, 1) / 255
    image = ImageGenerator.from_pretrained(classes, device="cpu")(0, start=pixels, known=15)
    assert torch.equal(codes_in(tmp_path / "on" / start.name, str(classes)), image.codes)


def test_rows_side_by_side_are_called_heuristic(run, tmp_path):
    done = run("--class", "ring", "--mode", "zipar:window=2")
    assert done.exit_code == 0, done.output
    assert "heuristic: not the model's own distribution" in done.stderr
    (line,) = lines(tmp_path / "out")
    assert line["law"] == "heuristic" and line["passes"] == 12


def test_a_page_opens_one_image_at_a_time(tmp_path, monkeypatch):
    rows = [[tmp_path / f"{row}{column}.png" for column in range(4)] for row in range(4)]
    for number, file in enumerate(file for row in rows for file in row):
        Image.new("RGB", (2, 2), (number, 0, 0)).save(file)
    rows[1][1].unlink()
    right, opened, most = Image.open, [], []

    def open_image(file):
        image = right(file)
        opened.append(image)
        most.append(sum(one.fp is not None for one in opened))
        return image

    monkeypatch.setattr(Image, "open", open_image)
    page = laid_out(rows)
    assert max(most) == 1
    assert page.size == (14, 14) and page.getpixel((4, 4)) == (255, 255, 255)
    assert page.getpixel((13, 9)) == (11, 0, 0)


def test_a_next_scale_model_fills_in(run, tmp_path, scales):
    done = run("--class", "ring", "-n", 2, model=scales)
    assert done.exit_code == 0, done.output
    start = tmp_path / "out" / "ring-0-001.png"
    words = ("--class", "cup", "--start", start, "--keep-rows", 2)
    done = run(*words, model=scales, out=tmp_path / "filled")
    assert done.exit_code == 0, done.output
    assert lines(tmp_path / "filled")[0]["completion"] == "laid over"
    [summary] = [line for line in done.stderr.splitlines() if " drawn, " in line]
    assert summary.endswith("; laid over")
    done = run(
        "--class", "cup", "--refiner", scales, "--drafted", 2, model=scales, out=tmp_path / "two"
    )
    assert "hybrid of two models: not the model's own distribution" in done.stderr


# What is written, and continued


def test_an_interrupted_run_is_continued_where_it_stopped(run, tmp_path):
    words = ("--class", "ring", "--class", "cup", "-n", 3, "--grid")
    run(*words, out=tmp_path / "whole")
    whole, out = contents(tmp_path / "whole"), tmp_path / "out"
    run("--class", "cup", "-n", 2)
    (out / "cup-3-001.png").unlink()
    with (out / "results.jsonl").open("ab") as file:
        file.write(whole["results.jsonl"][:40])  # cut off
    done = run(*words, "--resume", "--batch-size", 2)
    assert done.exit_code == 0, done.output
    assert "5 drawn, 1 done before, 0 failed" in done.stderr
    assert contents(out) == whole
    done = run(*words, "--resume")
    assert "0 drawn, 6 done before, 0 failed" in done.stderr and contents(out) == whole


def test_lines_say_which_batches_were_halved_for_lack_of_memory(run, tmp_path, monkeypatch):
    words = ("--class", "ring", "-n", 4)
    run(*words, out=tmp_path / "whole")
    right = ImageGenerator._batch

    def short(self, requests, *given):
        if len(requests) > 2:
            raise torch.OutOfMemoryError
        return right(self, requests, *given)

    monkeypatch.setattr(ImageGenerator, "_batch", short)
    assert run(*words).exit_code == 0
    whole = lines(tmp_path / "whole")
    assert lines(tmp_path / "out") == [line | {"batch_size": 2} for line in whole]


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_at_the_next_image(run, tmp_path, classes):
    words = ["--class", "ring", "-n", 16, "--batch-size", 1, "--mode", "exact"]
    run(*words, out=tmp_path / "whole")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "mmdecode", "generate-image", *words, "--out", out]
    command += ["--model", classes, "--device", "cpu"]
    process = subprocess.Popen([str(w) for w in command], stderr=subprocess.DEVNULL)
    results = out / "results.jsonl"
    deadline = time.monotonic() + 120
    while not (results.exists() and results.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = results.read_bytes().count(b"\n")
    assert 0 < before < 16
    done = run(*words, "--resume")
    assert f"{16 - before} drawn, {before} done before, 0 failed" in done.stderr
    assert contents(out) == contents(tmp_path / "whole")


def test_an_image_that_ends_its_process_is_retried_alone_and_fails_after_two(run, tmp_path):
    words, out = ["--class", "ring", "-n", 3], tmp_path / "out"
    run(*words, out=tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    run(*words)
    results = out / "results.jsonl"
    kept = results.read_bytes().splitlines(keepends=True)
    results.write_bytes(kept[0])
    condition = lines(out)[0]["condition"]
    names = [f"{condition} {ordinal}" for ordinal in (1, 2)]
    (out / ".decoding-0").write_text(json.dumps({"alone": {names[0]: 1}, "batch": names[:1]}))
    done = run(*words, "--resume")
    assert "1 drawn, 1 done before, 1 failed" in done.stderr
    assert "ended the process 2 times while it decoded this input alone" in done.stderr
    done = run(*words, "--resume")
    assert "1 drawn, 2 done before, 0 failed" in done.stderr
    assert contents(out) == whole and not (out / ".decoding-0").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "continue it with --resume, replace it with --overwrite, or choose another --out"),
        (("--resume", "--seed", 1), "seed was 0, is 1"),
        (("--resume", "--mode", "exact"), "mode was None, is 'exact'"),
    ],
)
def test_images_of_other_settings_are_not_continued(run, tmp_path, more, message):
    run("--class", "ring")
    before = contents(tmp_path / "out")
    done = run("--class", "ring", *more)
    assert isinstance(done.exception, OptionError) and message in str(done.exception)
    assert contents(tmp_path / "out") == before


def test_a_failure_is_tried_again_and_an_image_outweighs_it(run, tmp_path):
    out = tmp_path / "out"
    run("--class", "ring", "-n", 2)
    generated = contents(out)
    failed = {"id": "ring-0-000", "condition": 0, "error": "late"}
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps(failed) + "\n")
    run("--class", "ring", "-n", 2, "--resume")
    assert contents(out) == generated
    (out / "results.jsonl").write_text(json.dumps(failed) + "\n")
    done = run("--class", "ring", "-n", 2, "--resume")
    assert "2 drawn, 0 done before" in done.stderr and contents(out) == generated


def test_what_cannot_be_written_or_resumed_is_reported(run, tmp_path):
    (tmp_path / "file").write_text("")
    done = run("--class", "ring", out=tmp_path / "file")
    assert isinstance(done.exception, InputError)
    assert "is a file; choose another --out" in str(done.exception)
    with claimed(tmp_path / "out"):
        done = run("--class", "ring")
    assert isinstance(done.exception, OptionError)
    assert "another run is writing to" in str(done.exception)
    run("--class", "ring")
    (tmp_path / "out" / "results.jsonl").write_text("{}\n")
    done = run("--class", "ring", "--resume")
    assert isinstance(done.exception, InputError)
    assert "line 1 is not a result; remove the line" in str(done.exception)


# What is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing to draw; give --class, --class-id, --prompt or --prompts"),
        (("--class", "ring", "--mask", "m.png"), "--mask does nothing without --start"),
        (("--class", "ring", "--start", "s.png"), "give --mask or --keep-rows, and not both"),
        (("--class", "ring", "--start", "s.png", "--keep-rows", 1), "s.png cannot be read"),
        (("--class", "ring", "--drafted", 2), "--drafted does nothing without --refiner"),
        (("--class", "ring", "--mode", "relaxd"), "did you mean 'relaxed'"),
        (
            ("--class", "ring", "--mode", "ar", "--draft", "jacobi"),
            "leave out the draft or the mode",
        ),
        (("--class", "ring", "--codes", "9"), "expected ROWSxCOLUMNS"),
        (("--prompts", "gone.txt"), "gone.txt cannot be read"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_model_is_loaded(run, monkeypatch, words, message):
    def loaded(*args, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(ImageGenerator, "from_pretrained", loaded)
    assert message in str(run(*words).exception)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (("--class", "rign"), UnknownNameError, "did you mean 'ring'"),
        (("--class-id", 4), OptionError, "class 4 does not exist; expected 0 to 3"),
        (("--class", "ring", "--negative-prompt", "x"), OptionError, "cannot be a text"),
        (("--prompt", "a ring"), OptionError, "this model takes classes; give --class"),
        (("--class", "ring", "--draft", "jacobi:window=26"), OptionError, "larger than the image"),
        (("--class", "ring", "--draft", "jacobi:widow=2"), OptionError, "did you mean 'window'"),
    ],
)
def test_what_the_model_cannot_draw_is_refused(run, tmp_path, words, error, message):
    done = run(*words)
    assert isinstance(done.exception, error) and message in str(done.exception)
    assert not list((tmp_path / "out").glob("*.png"))


def test_files_to_start_from_are_looked_at(run, tmp_path, captions):
    run("--class", "ring")
    start = tmp_path / "out" / "ring-0-000.png"
    (tmp_path / "no.png").write_text("no image")
    Image.new("RGB", (9, 9)).save(tmp_path / "small.png")
    for words, message in (
        (("--start", start, "--keep-rows", 5), "expected 1 to 4 rows"),
        (("--start", tmp_path / "no.png", "--keep-rows", 1), "no.png"),
        (("--start", tmp_path / "small.png", "--keep-rows", 1), "expected (3, 10, 10): resize"),
        (("--start", start, "--mask", tmp_path / "small.png"), "the mask has shape (9, 9)"),
        (("--start", start, "--mask", tmp_path / "no.png"), "no.png"),
    ):
        done = run("--class", "ring", *words, out=tmp_path / "other")
        assert message in str(done.exception), words
    done = run("--class", "ring", model=captions, out=tmp_path / "texts")
    assert "this model takes prompts; give --prompt" in str(done.exception)


def test_the_commands_of_the_page_run_as_they_stand(scenes, tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "generate_image.md"
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("wanted.txt").write_text("star\n2\n")
    mask = Image.new("L", (10, 10), 0)
    mask.paste(255, (2, 2, 6, 6))
    mask.save("mask.png")
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) == 11
    for command in commands:
        words = [*shlex.split(command)[1:], "--device", "cpu"]
        if "--model" not in words:
            words += ["--model", str(scenes)]
        done = invoke(*words)
        assert done.exit_code == 0, (command, done.output, done.exception)
    assert len(lines(Path("pictures"))) == 8


def test_an_image_that_we_did_not_write_is_refused(tmp_path):
    generated = ImageRequest(index=0, condition=1, ordinal=0)
    folder = ImageFolder(tmp_path, {})
    folder.items = [generated]
    theirs = tmp_path / f"{folder.id_of(generated)}.png"
    theirs.write_bytes(b"theirs")
    with pytest.raises(OptionError, match="there already, and not written by mmdecode"):
        folder.prepare()
    assert theirs.read_bytes() == b"theirs"
    folder = ImageFolder(tmp_path, {}, overwrite=True)
    folder.items = [generated]
    with contextlib.closing(folder.open(folder.prepare())):
        assert [unit.items for unit in folder.units()] == [[generated]]

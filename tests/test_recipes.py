"""The scripts of the recipe folders run as their pages say."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from mmdecode.evaluation.speed.draft_speed import AGAIN, PLAIN
from mmdecode.vlm import Answerer
from mmdecode.zoo.scene_sets import scene_rows, write_images
from mmdecode.zoo.scenes import draw_scene, render
from mmdecode.zoo.speech import speech_test
from tests.support.files import json_lines, write_json_lines
from tests.support.scripts import run_script

ROOT = Path(__file__).parents[1]
QUESTION = "Is there a ring in the image?"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a script as if from the command line: its exit code, and what it prints."""
    return lambda script, *words: run_script(monkeypatch, capsys, ROOT / script, *words)


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for seed in range(3):
        Image.fromarray(render(draw_scene(seed))).save(folder / f"{seed}.png")
    return folder


@pytest.fixture(scope="module")
def plain(image_folder):
    answerer = Answerer.from_pretrained("zoo:llava-scenes", device="cpu")
    return [one.text for one in answerer(sorted(image_folder.iterdir()), QUESTION)]


@pytest.mark.parametrize("name", ["asr", "vlm", "image_ar"])
def test_every_script_of_a_folder_is_on_its_page(name):
    page = (ROOT / name / "README.md").read_text()
    scripts = {path.name for path in (ROOT / name).glob("*.py")}
    assert scripts and scripts == set(re.findall(r"^\| `(\w+\.py)`", page, re.MULTILINE))


def tear(path):
    """Leaves the first line of a file and a part of the second, as a killed run does."""
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"\n") + 9])
    return whole


@pytest.mark.recipe
def test_a_folder_is_transcribed_and_a_run_goes_on_where_it_stopped(run, tmp_path):
    clips = [clip for clip in speech_test() if clip.duration_s < 4][:3]
    for clip in clips:
        soundfile.write(tmp_path / f"{clip.name}.wav", clip.samples(), 16_000)
    (tmp_path / "broken.wav").write_text("no audio")
    out = tmp_path / "texts"
    words = ("asr/transcribe_batch.py", tmp_path, out, "--device", "cpu", "--batch-size", "1")
    done = run(*words)
    assert done.code == 1 and "failed: " in done.out and "tokens per row and pass" in done.out
    texts = {row["id"]: row.get("text") for row in json_lines(out / "results.jsonl")}
    for clip in clips:
        text = texts[str(tmp_path / f"{clip.name}.wav")]
        assert (out / f"{clip.name}.txt").read_text().strip() == text and text in done.out
        assert (out / f"{clip.name}.srt").exists()
    whole = tear(out / "results.jsonl")
    again = run(*words, "--resume", "--batch-size", "3", "--draft", "lookup")
    assert again.code == 2 and "(draft was" in again.err  # another draft is another run
    again = run(*words, "--resume", "--batch-size", "3")
    assert again.code == 1 and (out / "results.jsonl").read_bytes() == whole


@pytest.mark.recipe
def test_a_folder_is_answered_and_what_cannot_be_read_is_listed(run, image_folder, plain, tmp_path):
    words = ("vlm/answer_folder.py", image_folder, QUESTION, tmp_path / "shifted")
    done = run(*words, "--guide", "margin_shift:shift=100")
    assert done.code == 0, done.err
    *lines, last = done.out.splitlines()
    assert [line.split("'")[1] for line in lines] == plain
    assert [line.split("'")[3] for line in lines] == ["Yes"] * 3
    assert last == f"{sum(text != 'Yes' for text in plain)} of 3 answers changed"
    whole = tear(tmp_path / "shifted" / "guided" / "results.jsonl")
    again = run(*words, "--guide", "margin_shift:shift=100", "--resume")
    assert again.out == done.out
    assert (tmp_path / "shifted" / "guided" / "results.jsonl").read_bytes() == whole
    assert run(*words, "--guide", "margin_shift:shift=100").code == 2  # without --resume
    (image_folder / "broken.png").write_bytes(b"no image")
    done = run(*words[:-1], tmp_path / "broken", "--draft", "lookup")
    (image_folder / "broken.png").unlink()
    assert done.code == 1 and "failed: " in done.out and "of 3 answers" in done.out


@pytest.mark.recipe
def test_pope_runs_on_files_and_a_folder_of_images(run, tmp_path):
    asked = set()
    for split in ("random", "popular", "adversarial"):
        rows = scene_rows("test", f"pope_{split}")[:6]
        asked.update(row["text"] for row in rows)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"coco_pope_{split}.json").write_text(lines)
    write_images(tmp_path / "images", [row["image"] for row in rows])
    folder = tmp_path / "run"
    done = run("vlm/pope.py", tmp_path, tmp_path / "images", "--guide", "vcd", "--out", folder)
    assert done.code == 0, done.err
    for mode in ("greedy", "vcd", "near_ties", "prompt_bias", "always yes"):
        for split in ("random", "popular", "adversarial"):
            assert re.search(rf"^\| {mode} \| {split} \|", done.out, re.MULTILINE)
    assert json.loads((folder / "summary.json").read_text())["questions"] == len(asked)
    rows = (folder / "items.jsonl").read_bytes()
    (folder / "items.jsonl").write_bytes(rows[: len(rows) // 2])  # killed
    again = ("vlm/pope.py", tmp_path, tmp_path / "images", "--guide", "vcd", "--out", folder)
    done = run(*again, "--resume")
    assert done.code == 0, done.err
    assert len(json_lines(folder / "items.jsonl")) == rows.count(b"\n")
    refused = run("vlm/pope.py", tmp_path)
    assert refused.code == 2 and "or --zoo" in refused.err


@pytest.mark.slow
@pytest.mark.recipe
def test_a_drafter_is_trained_on_a_table_and_answers_as_the_model_does(run, image_folder, tmp_path):
    for name, count in (("learnt", 3), ("test", 1)):
        rows = [
            {"id": f"{image.stem} {asked}", "image": str(image), "question": asked}
            for image in sorted(image_folder.iterdir())[:count]
            for asked in ("Describe the image.", QUESTION)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    learned, test, out = tmp_path / "learnt.jsonl", tmp_path / "test.jsonl", tmp_path / "drafter"
    words = ("vlm/train_drafter.py", learned, "--out", out, "--device", "cpu", "--steps", "60")
    words += ("--held-out", "2", "--max-new-tokens", "16")
    done = run(*words, "--test", test)
    assert done.code == 0, done.err
    card = json.loads((out / "card.json").read_text())
    assert card["requests"] == {"learnt": 4, "held_out": 2, "tested": 0}
    asked = [json.loads(line)["id"] for line in learned.read_text().splitlines()]
    answered = (out / "state" / "answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in answered] == asked
    lines = re.findall(
        r"^(.+?) +(\S+) tokens a pass, .* (\d+)% of the answers", done.out, re.MULTILINE
    )
    assert [way for way, *_ in lines] == [PLAIN, AGAIN, "lookup", "eagle, chain", "eagle, tree"]
    assert {same for *_, same in lines} == {"100"}
    passes = {way: float(number) for way, number, _ in lines}
    assert passes[PLAIN] == 1 < passes["eagle, tree"]  # what was learned by heart
    refused = run(*words)
    assert refused.code == 2 and "--test with another" in refused.err


@pytest.mark.recipe
def test_a_pipeline_is_guided_and_left_as_it_was(run, image_folder, plain):
    image = sorted(image_folder.iterdir())[0]
    done = run("vlm/pipeline.py", image, QUESTION, "--guide", "damro")
    assert done.code == 0, done.err
    first, second, last = done.out.splitlines()
    assert first == f"plain:  {plain[0]}" and last == "as before: True"
    guided = Answerer.from_pretrained("zoo:llava-scenes", guide="damro", device="cpu")
    assert second == f"guided: {guided(image, QUESTION).text}"


@pytest.mark.recipe
def test_lists_are_corrected_and_a_run_goes_on_where_it_stopped(run, tmp_path):
    texts = ["the cat sat on the mat.", "Helen chopped the butter.", "it was rainy."]
    rows = [{"id": str(n), "input": [text, f"{text} now"]} for n, text in enumerate(texts)]
    lists = tmp_path / "lists.jsonl"
    lists.write_text("".join(json.dumps({"output": "x", **row}) + "\n" for row in rows))
    words = ("asr/correct_lists.py", lists, "--device", "cpu", "--json", "--out")
    done = run(*words, tmp_path / "whole")
    assert done.code == 0, done.err
    counts = json.loads(done.out)
    whole = (tmp_path / "whole" / "corrected.jsonl").read_bytes()
    found = [json.loads(line) for line in whole.splitlines()]
    assert [row["id"] for row in found] == ["0", "1", "2"] and counts["lists"] == 3
    assert [row["best"] for row in found] == texts
    assert counts["refused"] == sum(row["refused"] is not None for row in found)
    rows_file = tmp_path / "whole" / "corrected.jsonl"
    tear(rows_file)
    again = run(*words, tmp_path / "whole", "--resume")
    assert json.loads(again.out)["resumed"] == 1 and rows_file.read_bytes() == whole
    for more, expected in (((), "--resume"), (("--resume", "--distance", "0.1"), "distance")):
        refused = run(*words, tmp_path / "whole", *more)
        assert refused.code == 2 and refused.err.startswith("error: ") and expected in refused.err


@pytest.mark.slow
@pytest.mark.recipe
def test_temperatures_are_fitted_once_and_a_folder_is_corrected(run, tmp_path):
    clips = [clip for clip in speech_test() if clip.duration_s < 4][:2]
    (tmp_path / "folder").mkdir()
    for clip in clips:
        soundfile.write(tmp_path / "folder" / f"{clip.name}.wav", clip.samples(), 16_000)
    soundfile.write(tmp_path / "long.wav", np.zeros(9 * 16_000), 16_000)
    rows = [{"audio": f"folder/{clip.name}.wav", "text": clip.text} for clip in clips]
    manifest, long = tmp_path / "development.jsonl", tmp_path / "long.jsonl"
    write_json_lines(manifest, rows)
    long.write_text(json.dumps({"audio": "long.wav", "text": "none"}))
    out = tmp_path / "out"
    words = [tmp_path / "folder", "--device", "cpu", "--out", out]
    done = run("asr/fuse_with_llm.py", manifest, *words)
    assert done.code == 0, done.err
    kept = json.loads((out / "temperatures.json").read_text())
    assert 0.1 <= kept["main"] <= 10 and 0.1 <= kept["acoustic"] <= 10 and kept["tokens"] > 10
    found = json_lines(out / "results.jsonl")
    assert len(found) == 2 and all(row["uncorrected"] for row in found)
    assert (out / "words.html").read_text().count('class="clip"') == 2
    # kept temperatures are used, and what does not fit a window is no development recording
    (out / "temperatures.json").write_text(json.dumps(kept | {"main": 3.21}))
    (tmp_path / "folder" / "broken.wav").write_text("no audio")
    again = run("asr/fuse_with_llm.py", long, *words, "--overwrite")
    assert again.code == 1 and "main_temperature=3.21" in again.out
    assert sum("error" in row for row in json_lines(out / "results.jsonl")) == 1
    (out / "temperatures.json").unlink()
    refused = run("asr/fuse_with_llm.py", long, *words)
    assert refused.code == 2 and "long.wav is longer than a window; cut it to 8 s" in refused.err

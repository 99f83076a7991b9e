"""Every notebook runs from top to bottom, and says what it is committed with."""

import re
from pathlib import Path

import nbformat
import pytest
from PIL import Image

from mmdecode.checkpoints import is_installed
from mmdecode.evaluation.vision.benchmarks import read_questions
from mmdecode.zoo.scenes import draw_scene, render
from tests.support.files import json_lines
from tests.support.moonshine import NAME, needs_wheel
from tests.support.notebooks import FOLDER, differences, execute, page, texts

WITH_WHEEL = "07_real_speech"
WITHOUT_IMAGES = {"05_correction_and_fusion", WITH_WHEEL}
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.notebook
@pytest.mark.filterwarnings("default")  # those of jupyter's own client
@notebooks
def test_notebook_runs_and_says_what_it_is_committed_with(path, tmp_path):
    committed, notebook = (nbformat.read(path, as_version=4) for _ in range(2))
    execute(notebook, tmp_path)
    if path.stem == WITH_WHEEL and not is_installed(NAME):
        return  # another model has run, which says other words
    assert differences(committed, notebook) == [], "if it is right: make notebooks"


@pytest.mark.slow
@pytest.mark.notebook
@pytest.mark.filterwarnings("default")
def test_pope_asks_its_own_questions_about_images_with_cocos_names(tmp_path):
    """The first cell takes another model, POPE's files and a folder of images."""
    data = Path(__file__).parent / "data" / "pope"
    first = read_questions("pope", [str(data)], images=tmp_path, prefix="coco").items
    names = list(dict.fromkeys(item.image for item in first))[:3]
    assert names[0].startswith("COCO_val2014_")
    for seed, name in enumerate(names):
        Image.fromarray(render(draw_scene(seed))).save(tmp_path / name)
    files = sorted(str(path) for path in data.glob("coco_*"))
    notebook = nbformat.read(FOLDER / "02_pope.ipynb", as_version=4)
    cell = next(cell for cell in notebook.cells if cell.cell_type == "code")
    for old, new in (
        ('DATA = ["zoo"]', f"DATA = {files!r}"),
        ("IMAGES = None", f"IMAGES = {str(tmp_path)!r}"),
        ("QUESTIONS = 126", f"QUESTIONS = {sum(item.image in names for item in first)}"),
    ):
        assert cell.source.count(old) == 1
        cell.source = cell.source.replace(old, new)
    execute(notebook, tmp_path)
    printed = "".join(
        text for cell in notebook.cells if cell.cell_type == "code" for _, text in texts(cell)
    )
    asked = re.search(r"(\d+) questions about 3 images", printed)
    counts = re.search(r"'prompt_tokens_read': (\d+), 'prompt_tokens_reused': (\d+)", printed)
    assert asked and counts and int(asked[1]) >= 3 * 9
    # the prefixes of the modes that leave the image alone
    assert int(counts[2]) > 3 * 64 * (int(asked[1]) - 3)


@pytest.mark.slow
@pytest.mark.notebook
@pytest.mark.filterwarnings("default")
def test_word_errors_are_counted_on_recordings_of_people(tmp_path):
    notebook = nbformat.read(FOLDER / "04_word_errors.ipynb", as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert first.source.count('DATA = "zoo:speech-test"') == 1
    first.source = first.source.replace("zoo:speech-test", "zoo:real-clips")
    execute(notebook, tmp_path)
    files = sorted((tmp_path / "wer" / "leaderboard").glob("*.jsonl"))
    modes = ["cut-short", "medusa", "plain"]
    named = [f"MODEL_zoo-whisper-synth-{mode}_DATASET_zoo-real-clips.jsonl" for mode in modes]
    assert [file.name for file in files] == named
    assert [len(json_lines(file)) for file in files] == [11] * 3


def cell(*outputs, tags=()):
    made = nbformat.v4.new_code_cell("f()", outputs=list(outputs))
    made.metadata["tags"] = list(tags)
    return made


def printed(text, name="stdout"):
    return nbformat.v4.new_output("stream", name=name, text=text)


def shown(text, **data):
    return nbformat.v4.new_output("display_data", data={"text/plain": text, **data})


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (cell(printed("4 words")), cell(printed("4 words")), 0),
        (cell(printed("4 words")), cell(printed("4 "), printed("words")), 0),
        (cell(printed("4 words")), cell(printed("4 words"), printed("slow", "stderr")), 0),
        (cell(printed("4 words")), cell(printed("5 words")), 1),
        (cell(printed("4 words")), cell(), 1),
        (cell(), cell(printed("4 words")), 1),
        (cell(shown("<a at 0x7f>")), cell(shown("<a at 0x8e>")), 0),
        (cell(shown("a", **{"image/png": "1"})), cell(shown("a", **{"image/png": "2"})), 0),
        (cell(shown("a", **{"image/png": "1"})), cell(shown("a")), 1),
        (cell(shown("a", **{"text/html": "b"})), cell(shown("a", **{"text/html": "c"})), 1),
        (cell(printed("3.1 s"), tags=["varies"]), cell(printed("3.2 s")), 0),
        (cell(printed("3.1 s"), tags=["varies"]), cell(), 1),
    ],
)
def test_texts_are_compared_and_a_vanished_output_is_noticed(before, after, expected):
    notebooks = [nbformat.v4.new_notebook(cells=[one]) for one in (before, after)]
    assert len(differences(*notebooks)) == expected


def test_few_cells_are_not_compared():
    cells = [c for path in NOTEBOOKS for c in nbformat.read(path, as_version=4).cells]
    code = [c for c in cells if c.cell_type == "code"]
    left_out = [c for c in code if "varies" in c.metadata.get("tags", ())]
    assert 0 < len(left_out) < len(code) / 6


@needs_wheel  # without it the test above has done this
@pytest.mark.slow
@pytest.mark.notebook
@pytest.mark.filterwarnings("default")
def test_real_speech_goes_on_with_the_synthetic_model_and_says_so(tmp_path):
    notebook = nbformat.read(FOLDER / f"{WITH_WHEEL}.ipynb", as_version=4)
    [first, *_] = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert first.source.count(f'MODEL = "{NAME}"') == 1
    first.source = first.source.replace(f'MODEL = "{NAME}"', 'MODEL = "moonshine:not-there"')
    execute(notebook, tmp_path)
    printed = "".join(output.get("text", "") for output in first.outputs)
    assert "is not installed: this is zoo:whisper-synth" in printed


@notebooks
def test_notebook_ships_with_outputs_in_order_and_small(path):
    code = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    assert any("image/png" in output.get("data", {}) for c in code for output in c.outputs) or (
        path.stem in WITHOUT_IMAGES
    )
    assert path.stat().st_size < 600_000


def test_notebooks_are_numbered_once_and_listed():
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{n:02}" for n in range(1, 8)]
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in NOTEBOOKS] == re.findall(r"\]\((\S+\.ipynb)\)", index)


def test_a_page_of_the_site_shows_text_images_and_code(tmp_path):
    page(FOLDER / "01_whisper_medusa.ipynb", tmp_path)
    text = (tmp_path / "01_whisper_medusa.md").read_text(encoding="utf-8")
    assert (
        text.startswith("# Whisper with Medusa heads")
        and "```text\nthe same 25 tokens\n```" in text
    )
    [image] = re.findall(r"!\[.*\]\((\S+\.png)\)", text)
    assert (tmp_path / image).read_bytes().startswith(b"\x89PNG")


@notebooks
def test_notebook_installs_nothing_and_names_no_path_of_one_machine(path):
    text = path.read_text(encoding="utf-8")  # outputs, too
    for wrong in ("pip install", "/home/", "/root/", "/tmp/", "/work/"):
        assert wrong not in text

"""Every notebook runs from top to bottom, in a kernel of its own."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.moonshine import NAME, needs_wheel

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks():
    assert NOTEBOOKS


def run(notebook, folder):
    """Runs it; an error in a cell is raised here."""
    client = NotebookClient(
        notebook,
        timeout=240,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()


@pytest.mark.notebook
@pytest.mark.filterwarnings("default")  # those of jupyter's own client
@notebooks
def test_notebook_runs_from_top_to_bottom(path, tmp_path):
    run(nbformat.read(path, as_version=4), tmp_path)


@needs_wheel  # without it the test above has done this
@pytest.mark.slow
@pytest.mark.notebook
@pytest.mark.filterwarnings("default")
def test_real_speech_goes_on_with_the_synthetic_model_and_says_so(tmp_path):
    notebook = nbformat.read(FOLDER / "06_real_speech.ipynb", as_version=4)
    [first, *_] = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert first.source.count(f'MODEL = "{NAME}"') == 1
    first.source = first.source.replace(f'MODEL = "{NAME}"', 'MODEL = "moonshine:not-there"')
    run(notebook, tmp_path)
    printed = "".join(output.get("text", "") for output in first.outputs)
    assert "is not installed: this is zoo:whisper-synth" in printed


@notebooks
def test_notebook_ships_without_outputs(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None, cell.source


@notebooks
def test_notebook_installs_nothing_and_names_no_place_of_one_machine(path):
    source = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
    for wrong in ("pip install", "/home/", "/root/", "/tmp/", "/work/"):
        assert wrong not in source

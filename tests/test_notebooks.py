"""Every notebook runs from top to bottom, in a kernel of its own."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.notebook
@pytest.mark.filterwarnings("default")  # those of jupyter's own client
@notebooks
def test_notebook_runs_from_top_to_bottom(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=240,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()  # an error in a cell is raised here


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

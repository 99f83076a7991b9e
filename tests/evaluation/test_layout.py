"""Files that a report is made of name their maker, so that a later run knows them as its own."""

from pathlib import Path

import pytest

from mmdecode.evaluation.report.layout import drawing, markdown_page
from mmdecode.runs.files import is_own

ROOT = Path(__file__).parents[2]
SVG = '<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"></svg>\n'


@pytest.mark.parametrize(("made", "before"), [(markdown_page, "| a |\n"), (drawing, SVG)])
def test_tables_and_drawings_are_known_as_our_own(made, before, tmp_path):
    path = tmp_path / "file"
    path.write_text(before)
    assert not is_own(path)
    path.write_text(made(before))
    assert is_own(path)
    assert path.read_text().splitlines()[-1] == before.splitlines()[-1]


@pytest.mark.parametrize("name", ["asr_speed", "hallucination"])
def test_drawings_of_the_docs_can_be_rendered_again(name):
    path = ROOT / "docs" / f"{name}.svg"
    assert is_own(path) and path.read_text().startswith("<?xml")

"""Progress bars show fields that their tasks have; they are rendered on a terminal alone."""

import ast
import re
from pathlib import Path

import pytest

CODE = Path(__file__).parents[2] / "mmdecode"
WITH_FIELDS = [file for file in sorted(CODE.rglob("*.py")) if "task.fields[" in file.read_text()]


def fields(source):
    """Fields that columns of a module show, and those that each of its tasks begins with."""
    shown = set(re.findall(r"task\.fields\[(\w+)\]", source))
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    tasks = [
        {keyword.arg for keyword in call.keywords}
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_task"
    ]
    return shown, tasks


@pytest.mark.parametrize("file", WITH_FIELDS, ids=lambda file: file.stem)
def test_every_field_that_a_bar_shows_is_given_to_its_task(file):
    shown, tasks = fields(file.read_text())
    assert shown and tasks and all(shown <= given for given in tasks)


def test_modules_with_fields_are_found_and_a_missing_one_is_seen():
    assert "work" in {file.stem for file in WITH_FIELDS}
    shown, tasks = fields('TextColumn("{task.fields[a]}")\nbar.add_task("x", total=1, b=0)\n')
    assert not all(shown <= given for given in tasks)

"""The rooms of the package: which may import which, no circles, and how long a module may be."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mmdecode"

LAYERS = (
    {"_lazy"},
    {"errors", "_compat", "__init__"},
    {"quantization"},
    {"options", "entries", "model_names", "no_models", "runs"},
    {"registry"},
    {"checkpoints"},
    {"weights"},
    {"engine"},
    {"models"},
    {"adapters", "draft", "accept", "guide"},
    {"decoder"},
    {"api"},
    {"asr", "vlm", "image_ar"},
    {"zoo", "loading", "testing"},
    {"evaluation"},
    {"train", "demo", "serve"},
    {"cli"},
    {"__main__"},
)
"""A room may import itself and those of the layers above it in this list."""
NOT_FOR = {"engine": {"registry", "checkpoints"}}
"""The loop is handed its parts as objects: it looks up no names."""

LONGEST = 500
SHORT = {"engine", "draft", "accept", "guide", "adapters", "asr", "vlm", "image_ar"}
"""Rooms without an exception."""
LONGER = {
    "evaluation/audit/audit.py": 583,
    "evaluation/speech/word_report.py": 546,
    "models/llamagen.py": 559,
    "runs/files.py": 585,
    "testing/checks.py": 608,
    "train/drafters/recipes.py": 749,
    "train/zoo/llava_scenes.py": 591,
}
"""Lines of modules elsewhere that are longer; the numbers only shrink."""


def modules(package):
    """Files by dotted name, in which a package has its own name."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = ("mmdecode", *file.relative_to(package).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)] = file
    return found


def imported(name, file, known):
    """Modules that a file imports anywhere, late imports too, but for type checkers only."""
    tree = ast.parse(file.read_text())
    package = name if file.stem == "__init__" else name.rpartition(".")[0]
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(id(inner) for child in node.body for inner in ast.walk(child))
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            whole = [f"{base}.{alias.name}" for alias in node.names]
            # a name of a module is a module or what the module holds
            found.update(one if one in known or base == "mmdecode" else base for one in whole)
    return {one for one in found if one.startswith("mmdecode.")} - {name}


def room(name):
    return name.split(".")[1]


def imports(package=PACKAGE):
    """Imported modules by importing module."""
    known = modules(package)
    return {name: imported(name, file, known) for name, file in known.items()}


def misdirected(package=PACKAGE):
    """Imports against the layers, as ``module imports room``."""
    level = {one: number for number, layer in enumerate(LAYERS) for one in layer}
    found = []
    for name, others in imports(package).items():
        own = room(name)
        assert own in level, f"{name} is in no known room; add it to LAYERS"
        for other in sorted({room(other) for other in others} & set(level) - {own}):
            if level[other] >= level[own] or other in NOT_FOR.get(own, ()):
                found.append(f"{name.removeprefix('mmdecode.')} imports {other}")
    return found


def circle(package=PACKAGE):
    """Modules that import each other in a circle, or nothing."""
    try:
        TopologicalSorter(imports(package)).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_rooms_import_in_one_direction():
    assert misdirected() == []


def test_no_modules_import_each_other_in_a_circle():
    assert circle() == []


@pytest.mark.parametrize(
    ("file", "line", "expected"),
    [
        ("engine/a.py", "import mmdecode.draft.lookup", ["engine.a imports draft"]),
        ("engine/a.py", "from ..accept import exact", ["engine.a imports accept"]),
        ("engine/a.py", "from mmdecode import registry", ["engine.a imports registry"]),
        ("engine/sub/a.py", "from ...asr import x", ["engine.sub.a imports asr"]),
        ("draft/a.py", "from mmdecode import adapters", ["draft.a imports adapters"]),
        ("asr/a.py", "def f():\n    from mmdecode.vlm.b import c", ["asr.a imports vlm"]),
        ("zoo/a.py", "from mmdecode.cli import app", ["zoo.a imports cli"]),
        ("evaluation/a.py", "from mmdecode.train import b", ["evaluation.a imports train"]),
        ("demo/a.py", "from mmdecode.cli.app import main", ["demo.a imports cli"]),
        ("draft/a.py", "from mmdecode.engine.proposal import Proposal", []),
        ("engine/a.py", "from . import cache\nfrom mmdecode import errors", []),
        ("engine/a.py", "if TYPE_CHECKING:\n    from mmdecode.draft import lookup", []),
    ],
)
def test_the_walk_finds_imports_against_the_direction(tmp_path, file, line, expected):
    target = tmp_path / file
    target.parent.mkdir(parents=True)
    target.write_text(line + "\n")
    assert misdirected(tmp_path) == expected


def test_the_walk_finds_a_circle_of_late_imports(tmp_path):
    (tmp_path / "asr").mkdir()
    (tmp_path / "asr" / "a.py").write_text("from mmdecode.asr.b import c\n")
    (tmp_path / "asr" / "b.py").write_text("def f():\n    from mmdecode.asr import a\n")
    assert set(circle(tmp_path)) == {"mmdecode.asr.a", "mmdecode.asr.b"}
    (tmp_path / "asr" / "b.py").write_text("c = 1\n")
    assert circle(tmp_path) == []


def test_modules_are_short():
    lines = {
        file.relative_to(PACKAGE).as_posix(): len(file.read_text().splitlines())
        for file in PACKAGE.rglob("*.py")
    }
    long = {name: count for name, count in lines.items() if count > LONGEST}
    assert not SHORT & {name.split("/")[0] for name in LONGER}
    assert {name for name, count in long.items() if count > LONGER.get(name, 0)} == set()
    assert set(LONGER) <= set(long), "shortened: take them out of LONGER"


SHARED = {"_", "_id", "_replace", "_modules", "_attn_implementation"}
"""Private names of Python, torch and transformers that this package has too."""
PLANTING = {"exactness", "conformance", "golden", "support"}
"""Folders of tests about several rooms, which plant mistakes."""


def private_names(package):
    """Private names that a package defines, with the rooms that do."""
    found = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package).parts
        room = parts[0] if len(parts) > 1 else file.stem
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                name = node.name
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = getattr(node, "id", None) or node.attr
            else:
                continue
            if name.startswith("_") and not name.endswith("_"):
                found.setdefault(name, set()).add(room)
    return {name: rooms for name, rooms in found.items() if name not in SHARED}


def borrowed(file, room, private):
    """Private names of other rooms in a file of tests: read, imported, or patched by their name."""
    tree, own, used = ast.parse(file.read_text()), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used.add(node.attr)
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                own.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.add(node.value.rpartition(".")[2])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.keyword):
            own.add(node.arg)
    return {name for name in used - own if room not in private.get(name, {room})}


def test_tests_read_no_private_names_of_another_room():
    private, folder = private_names(PACKAGE), Path(__file__).parent
    found = {}
    for file in folder.rglob("*.py"):
        room = file.relative_to(folder).parts[0]
        if room not in PLANTING and (names := borrowed(file, room, private)):
            found[file.relative_to(folder).as_posix()] = names
    assert found == {}


def test_a_private_name_of_another_room_is_found(tmp_path):
    file = tmp_path / "test_a.py"
    file.write_text(
        "from mmdecode.vlm.a import _b\n"
        "class C:\n    def _e(self):\n        self._f = x._c\n"
        'patch("mmdecode.vlm.a._d")\n'
    )
    private = {name: {"vlm"} for name in ("_b", "_c", "_d", "_e", "_f")}
    assert borrowed(file, "asr", private) == {"_b", "_c", "_d"}
    assert borrowed(file, "vlm", private) == set()

"""The package as a whole: what importing costs, names, plug-ins, errors, direction of imports."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import mmdecode
from mmdecode import checkpoints, errors, registry
from mmdecode.cli import env, output
from mmdecode.cli.app import COMMANDS
from tests.support.commands import json_of
from tests.support.plugins import install

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mmdecode"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run_python(code, *args, path=(), **environment):
    """Runs code in a fresh interpreter whose output goes to a plain terminal of fixed width."""
    plain = {"NO_COLOR": "1", "_TYPER_FORCE_DISABLE_TERMINAL": "1", "COLUMNS": "100"}
    plain["PYTHONPATH"] = os.pathsep.join([str(ROOT), *map(str, path)])
    environment = {**os.environ, **plain, **environment}
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, env=environment
    )


def run_cli(*args, **options):
    return run_python("from mmdecode.cli.app import main; main()", *args, **options)


HEAVY = "[m for m in ('torch', 'transformers', 'numpy', 'pandas') if m in sys.modules]"


# What importing costs


def test_importing_the_package_loads_no_heavy_library():
    done = run_python(f"import sys, mmdecode, mmdecode.registry; print({HEAVY})")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "module", ["asr", "vlm", "asr.audio.reading", "vlm.images", "serve.media", "serve.media_child"]
)
def test_reading_loads_no_library_of_models(module):
    code = f"import sys, mmdecode.{module}; print({HEAVY})"
    done = run_python(code)
    assert not {"torch", "transformers", "pandas"} & set(ast.literal_eval(done.stdout)), module


@pytest.mark.parametrize("package", [mmdecode.asr, mmdecode.vlm, mmdecode.evaluation])
def test_public_names_of_packages_can_be_loaded_and_listed(package):
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'a'"):
        _ = package.a


@pytest.mark.parametrize("argument", ["--help", "--version", "methods"])
def test_help_loads_no_heavy_library(argument):
    code = f"""
import sys
from mmdecode.cli.app import main
sys.argv = ["mmdecode", {argument!r}]
try:
    main()
finally:
    print({HEAVY}, file=sys.stderr)
"""
    done = run_python(code)
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"
    assert ("medusa" if argument == "methods" else "mmdecode") in done.stdout


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "words",
    [
        ["transcribe", "--model", "zoo:whisper-synth", "--device", "cpu"],
        ["ask", "-q", "Is there a ring?", "--model", "zoo:llava-scenes", "--device", "cpu"],
        ["train", "drafter", "--kind", "medusa", "--model", "zoo:llava-scenes", "--steps", "1"],
    ],
    ids=lambda words: words[0],
)
def test_commands_do_not_import_pandas(words, tmp_path):
    from PIL import Image

    from mmdecode.zoo.speech import speech_test

    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    sizes = ["--batch-size", "2", "--held-out", "1", "--tested", "1", "--limit", "3", "--out"]
    more = {
        "transcribe": [str(speech_test()[0].path)],
        "ask": [str(tmp_path / "a.png")],
        "train": [*sizes, str(tmp_path / "out")],
    }
    code = """
import sys
from mmdecode.cli.app import main
try:
    main()
finally:
    print("pandas" in sys.modules)
"""
    done = run_python(code, *words, *more[words[0]])
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("False\n")


# The command line


EXISTING = [n for n in COMMANDS if (PACKAGE / "cli" / f"{n.replace('-', '_')}.py").exists()]


def test_help_lists_the_commands_that_exist_and_no_others():
    shown = run_cli("--help").stdout
    for name in COMMANDS:
        exists = name in EXISTING
        assert bool(re.search(rf"^\W*{name}  +\S", shown, re.MULTILINE)) == exists, name


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", EXISTING)
def test_every_command_has_its_own_help(name):
    done = run_cli(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"mmdecode {name}" in done.stdout


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["results"], ["The exit code is 1 if items", "with the command that began it."]),
        (["evaluate", "vsr"], ["--data is VSR's file", "random_test.jsonl; the images are next"]),
        (["train", "drafter"], ["Usage: mmdecode train drafter"]),
    ],
)
def test_paragraphs_of_a_help_are_wrapped_at_the_width_of_the_terminal(words, lines):
    shown = run_cli(*words, "--help", COLUMNS="80").stdout.splitlines()
    for begin in lines:
        assert any(line.strip().startswith(begin) for line in shown), begin


def test_an_error_of_ours_is_one_line_and_exit_code_2():
    done = run_cli("methods", "drft")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: no kind named 'drft'; did you mean 'draft'?")
    assert done.stderr.count("\n") == 1


def test_debug_shows_the_traceback():
    done = run_cli("methods", "drft", MMDECODE_DEBUG="1")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_a_mistyped_command_gets_a_suggestion():
    done = run_cli("metods")
    assert done.returncode == 2
    assert "Did you mean 'methods'" in done.stderr


def test_methods_as_json_holds_every_builtin():
    done = run_cli("methods", "--json")
    found = json_of(done)
    assert {kind: [e["name"] for e in found[kind]] for kind in found} == {
        kind: registry.names(kind) for kind in registry.KINDS
    }


def test_env_as_json_has_versions():
    done = run_cli("env", "--json")
    found = json_of(done)
    assert found["mmdecode"] == mmdecode.__version__
    assert found["packages"]["torch"]["version"]


def test_env_knows_the_extra_of_every_dependency():
    declared = {re.split(r"[<>=\[;]", d)[0]: "" for d in PROJECT["dependencies"]}
    for extra, needs in PROJECT["optional-dependencies"].items():
        if extra not in ("all", "dev"):
            for need in (re.split(r"[<>=\[;]", n)[0] for n in needs):
                before = declared.get(need)
                declared[need] = f"{before}, {extra}" if before else extra
    assert declared == env.PACKAGES


def test_json_output_turns_what_json_cannot_hold_into_null(capsys):
    output.emit_json({"path": Path("a/b"), "nan": float("nan"), "list": (1, {"x": float("inf")})})
    assert json.loads(capsys.readouterr().out) == {
        "path": "a/b",
        "nan": None,
        "list": [1, {"x": None}],
    }


# Names and versions


def test_version_equals_the_citation_file():
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited
    assert cited[1] == mmdecode.__version__


def test_public_names_can_be_loaded():
    for name in mmdecode.__all__:
        assert getattr(mmdecode, name) is not None
    assert set(mmdecode.__all__) <= set(dir(mmdecode))


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Decodr'"):
        _ = mmdecode.Decodr


def test_every_direct_dependency_is_pinned():
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    extras = PROJECT["optional-dependencies"]
    needs = {*PROJECT["dependencies"], *(n for extra in extras.values() for n in extra)}
    wanted = {re.split(r"[<>=\[;]", need)[0] for need in needs} - {"mmdecode"}
    assert wanted <= {name.lower().replace("_", "-") for name in pins}


BUILTIN = [entry for kind in registry.KINDS for entry in registry.describe(kind)]


@pytest.mark.parametrize("entry", BUILTIN, ids=lambda e: f"{e.kind}-{e.name}")
def test_every_builtin_has_a_class_where_the_registry_says(entry):
    module, attribute = entry.target.split(":")
    file = ROOT / (module.replace(".", "/") + ".py")
    assert file.exists()
    defined = {n.name for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef)}
    assert attribute in defined


@pytest.mark.parametrize("entry", BUILTIN, ids=lambda e: f"{e.kind}-{e.name}")
def test_every_builtin_resolves(entry):
    cls, options = registry.resolve(entry.kind, entry.name)
    assert cls.__name__ == entry.target.split(":")[1]
    assert options == {}


@pytest.mark.parametrize("entry", BUILTIN, ids=lambda e: f"{e.kind}-{e.name}")
def test_what_is_read_from_the_source_of_a_class_is_what_the_class_has(entry):
    cls, _ = registry.resolve(entry.kind, entry.name)
    assert entry.summary and entry.summary == cls.summary
    assert entry.source == getattr(cls, "source", "")
    if entry.kind == "draft":
        assert entry.guarantee == "as the rule" and not hasattr(cls, "guarantee")
    else:
        assert entry.guarantee == getattr(cls, "guarantee", "-")
    lenient = re.fullmatch("exact|exact for .+|lossy", entry.guarantee)
    assert bool(lenient) == (entry.kind == "accept")


# Strings


def test_a_mistyped_name_gets_a_suggestion_and_the_known_names():
    with pytest.raises(errors.UnknownNameError) as caught:
        registry.resolve("draft", "medus:path=x")
    assert str(caught.value).startswith("no draft named 'medus'; did you mean 'medusa'")
    assert "lookup" in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    ["vcd:beta=x", "damro:k=2.5", "dcla:tau=x", "ritual:normalize=3", "scalingvis:weight=true"],
)
def test_an_option_of_another_kind_is_refused(spec):
    option = spec.partition(":")[2].partition("=")[0]
    with pytest.raises(errors.OptionError, match=f"{option} must be"):
        registry.create("guide", spec)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-1", -1),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("true", True),
        ("False", False),
        ("none", None),
        ("a/b:c.safetensors", "a/b:c.safetensors"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_option_values_are_read_as_python_values(text, value):
    [(name, options)] = registry.parse("draft", f"medusa:k={text}, other=1")
    assert name == "medusa"
    assert options == {"k": value, "other": 1}
    assert type(options["k"]) is type(value)


def test_guides_compose_with_plus_and_a_number_keeps_its_plus():
    assert registry.parse("guide", "cfg:scale=1e+2+contrast:alpha=+1") == [
        ("cfg", {"scale": 100.0}),
        ("contrast", {"alpha": 1}),
    ]
    assert registry.parse("draft", "medusa:path=a+b") == [("medusa", {"path": "a+b"})]


@pytest.mark.parametrize("spec", ["", ":a=1", "medusa:", "medusa:a", "medusa:a=1,a=2", "x:1=2"])
def test_an_unreadable_string_is_an_option_error(spec):
    with pytest.raises(errors.OptionError):
        registry.parse("draft", spec)


def test_an_unknown_kind_is_refused():
    with pytest.raises(errors.UnknownNameError, match="did you mean 'draft'"):
        registry.names("drafts")


# Plug-ins: a distribution laid out as an installer leaves it


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """A distribution with a working and a broken drafter, and one that takes a taken name."""
    entry_points = {
        "mmdecode.draft": "mine = outsider_mod:Mine\nbroken = outsider_gone:Nope",
        "mmdecode.guide": "a = outsider_mod:A\nb = outsider_mod:B",
        "mmdecode.accept": "greedy = outsider_mod:Mine\nlenient = outsider_mod:Lenient",
        "mmdecode.adapters": "lost = outsider_gone:Nope",
    }
    install(
        tmp_path,
        "outsider",
        entry_points,
        outsider_mod="""
class Mine:
    "Drafts nothing."
    def __init__(self, model, *, width=2, path=None):
        self.model, self.width, self.path = model, width, path
class Lenient:
    summary, source, guarantee = "keeps everything", "of its own", "lossy"
class A:
    def __init__(self, x=0):
        self.x = x
class B(A):
    @classmethod
    def from_options(cls, **options):
        made = cls(1)
        made.options = options
        return made
""",
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("outsider_mod", None)


def test_plugins_are_named_without_being_loaded(plugins):
    assert {"mine", "broken", "lookup"} <= set(registry.names("draft"))
    assert "outsider_mod" not in sys.modules


def test_a_broken_plugin_is_named_and_the_others_work(plugins):
    with pytest.warns(RuntimeWarning, match=r"'broken' of outsider .*outsider_gone") as caught:
        found = {entry.name: entry for entry in registry.describe("draft")}
    assert len(caught) == 1
    assert "broken" not in found
    assert found["mine"].summary == "Drafts nothing."
    assert found["mine"].guarantee == "as the rule"
    assert found["mine"].plugin == "outsider"


def test_asking_for_a_broken_plugin_says_whose_it_is(plugins):
    with pytest.raises(errors.MMDecodeError, match=r"uninstall outsider"):
        registry.resolve("draft", "broken")


def test_a_plugin_cannot_take_a_taken_name(plugins):
    with pytest.warns(RuntimeWarning, match="'greedy', which exists already"):
        found = {entry.name: entry for entry in registry.describe("accept")}
    assert found["greedy"].plugin == ""
    lenient = found["lenient"]
    assert (lenient.summary, lenient.guarantee) == ("keeps everything", "lossy")
    assert lenient.source == "of its own"


def test_a_broken_adapter_is_named_where_no_other_is_for_a_model(plugins):
    assert registry.adapter_class("whisper").__name__ == "WhisperAdapter"
    with (
        pytest.warns(RuntimeWarning, match="left out: adapters 'lost' of outsider"),
        pytest.raises(errors.UnsupportedModelError, match="no adapter for model_type 'abacus'"),
    ):
        registry.adapter_class("abacus")


def test_create_passes_options_and_the_context_that_fits(plugins):
    made = registry.create("draft", "mine:width=5", model="m", processor="unused")
    assert (made.model, made.width, made.path) == ("m", 5, None)
    assert registry.create("draft", "mine:path=p", model="m", path="q").path == "p"


def test_create_uses_from_options_where_there_is_one(plugins):
    made = registry.create("guide", "b:any=1", model="m")
    assert (made.x, made.options) == (1, {"any": 1, "model": "m"})


def test_several_guides_where_one_is_wanted_are_refused(plugins):
    with pytest.raises(errors.OptionError, match="names 2 guides, expected one"):
        registry.create("guide", "a+b")


def test_an_unknown_option_names_the_accepted_keys(plugins):
    with pytest.raises(errors.OptionError) as caught:
        registry.create("draft", "mine:widht=5", model="m")
    assert "takes no option 'widht'; did you mean 'width'?" in str(caught.value)
    assert str(caught.value).endswith("accepted keys: width, path")


def test_a_missing_option_says_what_to_write(plugins):
    with pytest.raises(errors.OptionError, match=r"needs model; write 'mine:model=\.\.\.'"):
        registry.create("draft", "mine")


def test_the_command_line_lists_plugins(plugins):
    done = run_cli("methods", "draft", "--json", path=[plugins])
    assert "mine" in [e["name"] for e in json.loads(done.stdout)["draft"]]
    assert "'broken' of outsider" in done.stderr


def test_a_plugin_adds_a_scheme_of_checkpoints_and_a_broken_one_is_left_out(tmp_path, monkeypatch):
    lines = "attic = stranger_mod:Attic\nlost = stranger_gone:Nope\nmoonshine = stranger_mod:Attic"
    install(
        tmp_path,
        "stranger",
        {"mmdecode.checkpoints": lines},
        stranger_mod="""
from pathlib import Path
from mmdecode.checkpoints import CheckpointScheme
class Attic(CheckpointScheme):
    names = ("box",)
    @classmethod
    def folder(cls, name):
        return Path(__file__).parent / name
    @classmethod
    def is_installed(cls, name):
        return name in cls.names
""",
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(RuntimeWarning, match="'moonshine', which exists already"):
        assert checkpoints.local_path("attic:box") == str(tmp_path / "box")
    assert checkpoints.is_installed("attic:box")
    assert not checkpoints.is_installed("attic:crate")
    with pytest.warns(RuntimeWarning, match="'lost' of stranger"):
        assert checkpoints.scheme_names() == ["moonshine:tiny-en", "attic:box"]
    with pytest.raises(errors.MMDecodeError, match="uninstall stranger"):
        checkpoints.local_path("lost:box")


# Errors


@pytest.mark.parametrize(
    ("ours", "builtin"),
    [
        (errors.OptionError, ValueError),
        (errors.IncompatibleError, ValueError),
        (errors.ShapeError, ValueError),
        (errors.InputError, ValueError),
        (errors.UnknownNameError, KeyError),
        (errors.UnsupportedModelError, TypeError),
        (errors.MissingExtraError, ImportError),
    ],
)
def test_each_error_is_also_the_builtin_one(ours, builtin):
    assert issubclass(ours, errors.MMDecodeError)
    assert issubclass(ours, builtin)


def test_messages_name_both_sides_and_the_way_out():
    missing = errors.MissingExtraError("reading audio files needs librosa", extra="asr")
    assert str(missing).endswith("install it with: pip install 'mmdecode[asr]'")
    misfit = errors.IncompatibleError.between(
        "accept 'rejection'", "draft 'lookup'", "it needs sampled tokens", "use accept='auto'"
    )
    assert "accept 'rejection' does not fit draft 'lookup': it needs" in str(misfit)
    assert str(errors.UnknownNameError.of("draft", "zzz", [])) == (
        "no draft named 'zzz'; known: (none)"
    )


# What is installed


@pytest.mark.parametrize("name", ["asr", "vlm", "image_ar"])
def test_recipe_folders_are_no_packages(name):
    assert list((ROOT / name).glob("*.py")) and not list((ROOT / name).rglob("__init__.py"))


@pytest.mark.slow
def test_the_wheel_installs_one_name_with_all_its_data(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", ROOT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in inside}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mmdecode"}
    sources = {
        f.relative_to(ROOT).as_posix()
        for f in PACKAGE.rglob("*")
        if f.is_file() and "__pycache__" not in f.parts
    }
    assert sources <= set(inside)
    assert wheel.stat().st_size < 60e6

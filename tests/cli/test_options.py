"""Options of the command line: one vocabulary over all commands."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from mmdecode.cli import demo, transcribe
from mmdecode.cli.app import main
from mmdecode.cli.flags import documented
from mmdecode.cli.shared import given_in, with_devices
from mmdecode.errors import InputError, MMDecodeError, OptionError
from mmdecode.runs.console import console
from tests.support.commands import all_commands, invoke

GONE = "--manifest --input --output --batch --image-folder --precision --norm --n".split()
NEGATED = ("--no-fallback", "--no-feature-sampling")
"""Switches of what is off by default, that can be named all the same."""

LEAVES = all_commands()


@pytest.mark.parametrize("name", LEAVES)
def test_no_command_has_a_name_of_its_own_for_a_common_option(name):
    options = [p for p in LEAVES[name].params if p.opts[0].startswith("-")]
    assert not {flag for p in options for flag in p.opts} & set(GONE)
    for option in options:
        long = [flag for flag in option.opts if flag.startswith("--")]
        assert len(long) == 1, f"{option.opts} are several names for one thing"


@pytest.mark.parametrize(
    "name", [n for n, c in LEAVES.items() if any("--out" in p.opts for p in c.params)]
)
def test_out_is_a_folder_in_every_command(name, tmp_path):
    (tmp_path / "file").write_text("")
    given = [*name.split(), "--out"]
    refused = invoke(*given, tmp_path / "new/a.JSONL").exception
    assert isinstance(refused, OptionError) and "give --out" in str(refused)
    refused = invoke(*given, tmp_path / "file").exception
    assert isinstance(refused, InputError)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("group", ["evaluate", "train", "bench"])
def test_completion_is_installed_by_the_root_command_alone(group):
    assert "--install-completion" in invoke("--help").stdout
    assert "completion" not in invoke(group, "--help").stdout


def test_a_folder_may_have_a_dot_in_its_name(tmp_path):
    (tmp_path / "odd.json").mkdir()
    for name in ("odd.json", "run-0.1", ".hidden"):
        done = invoke("ask", "--out", tmp_path / name)
        assert "nothing to ask" in str(done.exception)


# A file of options


@pytest.fixture
def given(tmp_path):
    """What a file of options says, as text, becomes what the command ``ask`` is given."""

    def read(text: str, name: str = "ask") -> Any:
        file = tmp_path / "o.yaml"
        file.write_text(text)
        return given_in(file, LEAVES[name])

    return read


def test_options_of_a_file_are_named_as_on_the_command_line(given):
    found = given("batch-size: 3\ntop_p: 0.5\n--sample: true\nquestion: [a, b]\nguide:\n")
    assert found == {"batch_size": "3", "top_p": "0.5", "sample": True, "questions": ["a", "b"]}
    assert given('{"question": "a"}') == {"questions": ["a"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batchsize: 3", "no option 'batchsize'; did you mean 'batch-size' or 'quantize'?"),
        ("options: o.yaml", "no option 'options'"),
        ("sample: 1", "sample: 1; expected true or false"),
        ("seed: [1, 2]", "several values; the option takes one"),
        ("draft: no", "draft: False is no text and no number"),
        ("draft: {a: b}", "is no text and no number"),
        ("- a", "holds list; expected an option on each line"),
        ("", "holds NoneType; expected an option on each line"),
        ("a: [", "cannot be read"),
    ],
)
def test_what_is_no_option_or_no_value_is_refused(given, text, message):
    with pytest.raises((InputError, OptionError), match=re.escape(message)):
        given(text)


def test_the_command_line_wins_over_a_file(tmp_path):
    (tmp_path / "o.yaml").write_text("seed: wrong\nresume: true\n")
    words = ["ask", "--options", str(tmp_path / "o.yaml")]
    done = invoke(*words)
    assert done.exit_code == 2 and "'--seed'" in done.stderr
    done = invoke(*words, "--seed", "1")
    assert "--resume does nothing without --out" in str(done.exception)


def test_what_a_file_says_is_among_the_settings(tmp_path):
    (tmp_path / "o.yaml").write_text("data: cv\nmethods: 1best\nlimit: 6\nresamples: 20\n")
    words = ["evaluate", "nbest", "--options", str(tmp_path / "o.yaml"), "--out"]
    done = invoke(*words, tmp_path / "a")
    assert done.exit_code == 0, done.output
    (tmp_path / "o.yaml").write_text("data: cv\nmethods: 1best\nlimit: 5\nresamples: 20\n")
    done = invoke(*words, tmp_path / "a", "--resume")
    assert "limit was 6, is 5" in str(done.exception)
    done = invoke(*words, tmp_path / "a", "--resume", "--limit", "6")
    assert done.exit_code == 0, done.output


# What is written to stderr


def test_quiet_leaves_errors_alone_on_stderr(tmp_path):
    (tmp_path / "o.yaml").write_text("data: cv\nmethods: 1best\nlimit: 6\nresamples: 20\n")
    words = ["evaluate", "nbest", "--options", str(tmp_path / "o.yaml"), "--out"]
    plain = invoke(*words, tmp_path / "a")
    quiet = invoke(*words, tmp_path / "b", "--quiet")
    assert "a smoke test" in plain.stderr and quiet.stderr == ""
    assert quiet.stdout.replace("/b/", "/a/") == plain.stdout
    words = ["transcribe", str(tmp_path / "gone.wav"), "--model", "zoo:whisper-synth", "--quiet"]
    missing = invoke(*words)
    assert missing.exit_code == 1 and missing.stderr.startswith("failed: ")
    console.errors_only = False


def test_verbose_says_where_an_error_was_raised(capfd, monkeypatch):
    for more, shown in (([], False), (["--verbose"], True)):
        monkeypatch.setattr("sys.argv", ["mmdecode", "ask", "a.png", "-q", "a", *more, "--resume"])
        with pytest.raises(SystemExit, match="2"):
            main()
        error = capfd.readouterr().err
        assert "error: --resume does nothing" in error
        assert ("Traceback" in error) == shown
    both = invoke("ask", "--quiet", "--verbose")
    assert "contradict" in str(both.exception)
    console.errors_only = console.tells_all = False


# Help


def test_the_help_of_transcribe_begins_with_ten_options_and_has_all_others_in_groups():
    options = [p for p in LEAVES["transcribe"].params if p.opts[0].startswith("-")]
    first = [p.name for p in options if p.rich_help_panel == "Options"]
    assert len(first) == 10 and not [p.name for p in options if not p.rich_help_panel]
    named = " ".join(transcribe.PANELS.values()).split()
    assert {p.name for p in options} - {"options", "quiet", "verbose"} <= set(named)
    shown = invoke("transcribe", "--help").stdout
    titles = re.findall(r"─ ([^─]+) ─", shown)
    assert titles == ["Arguments", *transcribe.PANELS, "Every command"]


def test_every_option_has_a_help_and_only_the_flags_that_it_needs():
    for name, command in LEAVES.items():
        for option in command.params:
            assert option.help, f"{name} {option.name}"
            if option.default is False:
                assert not option.secondary_opts or f"--no-{option.opts[0][2:]}" in NEGATED


def test_without_docstrings_no_option_loses_its_name_in_silence():
    with pytest.raises(MMDecodeError, match="-OO"):
        documented(lambda path: None)


def test_defaults_that_a_help_names_are_those_of_the_code():
    helps = {option.name: option.help for option in LEAVES["demo"].params}
    assert helps["guides"].endswith(f"Default: {', '.join(demo.GUIDES)}.")
    folders = ", ".join(str(demo.FOLDER / name) for name in demo.DEMOS)
    assert helps["output"].endswith(f"Default: {folders}.")


# A group without a command, and completion


@pytest.mark.parametrize("words", [[], ["evaluate"], ["train"], ["bench"]])
def test_a_group_alone_shows_its_help_and_succeeds(words):
    done = invoke(*words)
    assert done.exit_code == 0
    assert "Usage: " in done.stdout and done.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trans", "transcribe"),
        ("transcribe --ba", "--batch-size"),
        ("train draf", "drafter"),
        ("evaluate pope --out a.json --opt", "--options"),
    ],
)
def test_shells_complete_commands_and_their_options(shell, words, expected, monkeypatch):
    line = f"mmdecode {words}"
    variables = {
        "_MMDECODE_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = invoke(prog_name="mmdecode")
    assert expected in done.stdout and "error" not in done.output.lower()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_that_is_shown_is_the_one_that_is_answered(shell, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = invoke("--show-completion", shell, prog_name="mmdecode")
    assert f"_MMDECODE_COMPLETE=complete_{shell}" in done.stdout
    for name in LEAVES:
        options = [flag for p in LEAVES[name].params for flag in p.opts]
        assert "--install-completion" not in options and "--show-completion" not in options


# Plain decoding by name


def test_none_is_a_draft_and_a_guide_in_every_command(tmp_path):
    seen = []
    option = SimpleNamespace(name="device")
    command = SimpleNamespace(params=[option], callback=lambda **given: seen.append(given))
    given = {"device": "cpu", "draft": "none", "guide": ["none", "vcd"], "guides": ["none"]}
    with_devices(command).callback(**given)
    assert seen == [{"device": "cpu", "draft": None, "guide": ["vcd"], "guides": []}]


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_numbers_are_finite_in_every_command(number, tmp_path):
    (tmp_path / "o.yaml").write_text(f"top-p: {number}\n")
    for words in (["--top-p", number], ["--options", str(tmp_path / "o.yaml")]):
        done = invoke("ask", "a.png", "-q", "a", *words)
        assert "--top-p" in str(done.exception) and "finite" in str(done.exception)
    done = invoke("ask", "a.png", "-q", "a", "--limit", "9" * 20)
    assert "--limit 99999999999999999999: expected" in str(done.exception)


def test_whole_numbers_count_something_in_every_command(tmp_path):
    words = ["train", "corrector", "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    for more in (
        ["--seed", "-1"],
        ["--steps", "0"],
        ["--rank", "-1"],
        ["--n-best", "-1"],
        ["--batch-size", "0"],
    ):
        done = invoke(*words, *more)
        assert isinstance(done.exception, OptionError) and "or more" in str(done.exception)
    words = ["train", "medusa", "--model", "m", "--data", str(tmp_path), "--out", "out"]
    done = invoke(*words, "--limit", "0")
    assert "--limit 0: expected 1 or more" in str(done.exception)

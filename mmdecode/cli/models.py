"""Additions to every command that loads a model, made when the command is imported.

* The option ``--trust-remote-code``, without which no Python file of a checkpoint is run.
* Short names of models are replaced by their Hub ids, also in output and in hashed settings.
* A note is printed if a shipped toy model is run on the user's own files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import mmdecode
from mmdecode.checkpoints import is_installed, scheme_card, trusting_code, zoo_names
from mmdecode.cli import flags
from mmdecode.model_names import REAL, SYNTHETIC, full_name
from mmdecode.runs.console import console, print_line

MODELS = ("model", "chat_model", "refiner", "corrector", "correct", "methods")
"""Parameters whose values contain names of models."""

OWN_FILES = (
    *("paths", "path", "files_from", "data", "recordings", "speech"),
    *("table", "start", "file", "prompts", "real"),
)
"""Parameters whose values may name files that a model is run on."""


INSTEAD = {
    "whisper": f"openai/whisper-small, or another Whisper, or {REAL}",
    "llava": "llava-hf/llava-1.5-7b-hf, or another vision-language model",
    "llamagen": "deepseek-community/Janus-Pro-1B, or another model of image tokens",
    "var": "a VAR that was published, read by load_published of mmdecode.models.var",
    "lm": "a corrector that 'mmdecode train corrector' made for your recogniser",
}
"""Models to recommend instead of a shipped model, by the first word of its name."""

LANGUAGE_MODEL = "Qwen/Qwen2.5-1.5B-Instruct, or another language model"
"""The same for a shipped language model that is given as ``--model``, and corrects nothing."""


def with_models(command: Any) -> None:
    """Adds option, short names and note to a command, or a group's commands, that load models."""
    for one in flags.leaves(command):
        if any(parameter.name in MODELS for parameter in one.params):
            one.params += flags.options_of(_trusting)
            flags.before(one, _prepare)


def _trust(context: typer.Context, value: bool) -> bool:
    if value:
        context.with_resource(trusting_code())
    return value


def _trusting(
    trust_remote_code: Annotated[bool, typer.Option(callback=_trust)] = False,
) -> None:
    """Option of every command that loads a model.

    Options:
        trust_remote_code: Run Python files that come with a model; read them first.
    """


def _prepare(given: dict[str, Any]) -> None:
    """Replaces short names of models, and prints the note on toys."""
    for name in ("model", "refiner", "chat_model"):
        if isinstance(given.get(name), str):
            given[name] = full_name(given[name])
    if isinstance(given.get("corrector"), list):
        given["corrector"] = [full_name(name) for name in given["corrector"]]
    note = toy_note(given)
    if note and os.environ.get("RANK", "0") == "0":
        print_line(note, console, "yellow")


def toy_note(given: dict[str, Any]) -> str | None:
    """Returns a note if a shipped toy model is run on the user's own files or real recordings.

    Args:
        given: A command's parameters by name.

    Returns:
        The note, which recommends other models; ``None``: no note is needed.
    """
    own = any(_is_own(value) for name in OWN_FILES for value in _texts(given.get(name)))
    if not own and "host" not in given:  # the clients of a server send theirs
        return None
    named = [value for name in MODELS for value in _texts(given.get(name))]
    found = [name for value in named for name in re.findall(r"zoo:([\w-]+)", value)]
    toys = {name: INSTEAD.get(name.partition("-")[0]) for name in found if name in zoo_names()}
    real = {name: instead for name, instead in toys.items() if instead}
    main = str(given.get("model") or "").removeprefix("zoo:")
    if main.startswith("lm") and main in real:
        real[main] = LANGUAGE_MODEL
    if not real:  # none that the command could run
        return None
    shown = " and ".join(f"zoo:{name}" for name in real)
    instead = " and ".join(dict.fromkeys(real.values()))
    what = "a toy that ships for tests"
    if f"zoo:{next(iter(real))}" == SYNTHETIC:
        what = "a toy that knows 489 words"
    if REAL in instead and not is_installed(REAL):
        instead += f" after: {scheme_card(REAL)['install']}"
    if len(real) > 1:
        return (
            f"{shown} are toys that ship for tests and make nonsense of your own files; name real "
            f"models: {instead}"
        )
    return f"{shown} is {what} and makes nonsense of your own files; name a real model: {instead}"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, (str, os.PathLike)):
        yield str(value)
    elif isinstance(value, Iterable):
        for inner in value:
            yield from _texts(inner)


def _is_own(value: str) -> bool:
    """Returns whether a value names data of the user, or real recordings."""
    if value in ("-", "mic", "zoo:real-clips"):
        return True
    path = Path(value)
    shipped = Path(mmdecode.__file__).parent
    return os.path.lexists(path) and not path.resolve().is_relative_to(shipped)

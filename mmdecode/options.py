"""Parses strings such as ``name:key=value,key=value``, and builds objects with these options."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

from mmdecode.errors import OptionError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["build", "read"]

_OTHER_KEY = {"path": "model", "model": "path"}
"""Key that is likely meant where a class does not take this one: both name a checkpoint."""


def read(kind: str, text: str) -> tuple[str, dict[str, Any]]:
    """Parses a string to a name and options.

    Args:
        kind: Kind of the named class, such as ``draft``, for errors.
        text: ``name`` or ``name:key=value,key=value``. Values are parsed as ``true``, ``false``,
            ``none``, int or float; any other value is a string.

    Raises:
        OptionError: A part is not ``key=value``, or a key is given twice.
    """
    name, colon, rest = text.partition(":")
    if not name:
        raise OptionError(f"empty {kind} name in {text!r}; expected name or name:key=value")
    options: dict[str, Any] = {}
    for part in rest.split(",") if colon else ():
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier():
            raise OptionError(
                f"cannot read {part!r} in {kind} {text!r}; expected name:key=value,key=value"
            )
        if key in options:
            raise OptionError(f"{key!r} is given twice in {kind} {text!r}; keep one")
        options[key] = _value(value.strip())
    return name.strip(), options


def build(kind: str, name: str, cls: type, options: dict[str, Any], context: dict[str, Any]) -> Any:
    """Builds an object with the class's ``from_options`` or, without that, its constructor.

    Args:
        kind: Kind of the class, such as ``draft``, for errors.
        name: Registered name of the class, for errors.
        cls: The class.
        options: Options that the user gave.
        context: Objects, such as the target model, for parameters of the same name; an option of
            that name takes precedence.

    Raises:
        OptionError: An option is unknown, has the wrong type, or is missing.
    """
    make: Callable[..., Any] = getattr(cls, "from_options", cls)
    parameters = inspect.signature(make).parameters.values()
    takes = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepted = [p.name for p in takes]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        offered = [key for key in accepted if key not in context]
        listing = f"accepted keys: {', '.join(offered) or '(none)'}"
        for key in options:
            if key not in accepted:
                other = _OTHER_KEY.get(key)
                known = other in offered
                hint = f"; did you mean {other!r}?" if known else did_you_mean(key, offered)
                inner = [v for v in options.values() if re.match(r"\w+:.+=", str(v))]
                nested = f"; for more options of {inner[0]!r}, build it in Python" if inner else ""
                raise OptionError(
                    f"{kind} {name!r} takes no option {key!r}{hint}; {listing}{nested}"
                )
        context = {key: value for key, value in context.items() if key in accepted}
    for parameter in takes:
        _check_kind(kind, name, parameter, options)
    arguments = {**context, **options}
    missing = [p.name for p in takes if p.default is p.empty and p.name not in arguments]
    if missing:
        example = f"{name}:{missing[0]}=..."
        raise OptionError(f"{kind} {name!r} needs {', '.join(missing)}; write {example!r}")
    return make(**arguments)


def _check_kind(
    kind: str, name: str, parameter: inspect.Parameter, options: dict[str, Any]
) -> None:
    """Raises an error if a parameter is annotated as int, float or bool and its option is not."""
    if parameter.name not in options:
        return
    value, wanted = options[parameter.name], str(parameter.annotation)
    if value is None and wanted.endswith(" | None"):
        return
    wanted = wanted.removesuffix(" | None")
    allowed: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}
    if wanted not in allowed:
        return
    if not isinstance(value, allowed[wanted]) or (isinstance(value, bool) and wanted != "bool"):
        words = {"int": "a whole number", "float": "a number", "bool": "true or false"}[wanted]
        raise OptionError(
            f"{kind} {name!r}: {parameter.name} must be {words}, got {value!r}; write "
            f"{name}:{parameter.name}=..."
        )


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text

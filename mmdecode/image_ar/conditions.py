"""Resolves what images are generated from: class numbers, class names, or prompts."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mmdecode.errors import MMDecodeError, OptionError, UnknownNameError, did_you_mean
from mmdecode.image_ar.results import ImageRequest

_MAX_LISTED = 40
"""Maximum number of class names that an error lists."""


class Conditions:
    """Resolves class numbers, class names or prompts to the conditions of one model.

    Args:
        classes: Number of classes; 0: the model takes prompts.
        labels: Class names by number; empty if the model's configuration has none.
    """

    def __init__(self, classes: int, labels: Mapping[int, str]) -> None:
        self.classes, self.labels = classes, labels
        self._by_name = {
            word.strip().casefold(): label
            for label, name in sorted(labels.items(), reverse=True)
            for word in (*name.split(","), name)
        }

    def requests(
        self, conditions: Any, n: int
    ) -> tuple[list[ImageRequest], dict[int | str, Exception | None]]:
        """Returns the requests of a call, and the errors of invalid conditions."""
        if n < 1:
            raise OptionError(f"n={n}; expected at least 1 image")
        listed = list(conditions) if is_list(conditions) else [conditions]
        if not listed:
            raise OptionError("nothing to generate; give a class or a prompt")
        seen: Counter[int | str] = Counter()
        found: list[ImageRequest] = []
        wrong: dict[int | str, Exception | None] = {}
        for given in listed:
            try:
                condition = self.find(given)
            except MMDecodeError as error:
                condition = given if isinstance(given, (int, str)) else repr(given)
                wrong[condition] = error
            for _ in range(n):
                ordinal = seen[condition]
                seen[condition] += 1
                found.append(ImageRequest(index=len(found), condition=condition, ordinal=ordinal))
        return found, wrong

    def find(self, given: int | str) -> int | str:
        """Returns the number of a class given by number or name, or a checked prompt.

        Raises:
            OptionError: ``given`` is no class or prompt of the model.
            UnknownNameError: No class has this name.
        """
        if not self.classes:
            if isinstance(given, str):
                return utf8(given)
            raise OptionError(f"this model takes prompts, and {given!r} is none; give a text")
        every = f"expected 0 to {self.classes - 1}"
        if not isinstance(given, str):
            number = _number(given)
            if number is None:
                raise OptionError(f"{given!r} is neither a class number nor a class name; {every}")
            if not 0 <= number < self.classes:
                raise OptionError(f"class {number} does not exist; {every}")
            return number
        if given.strip().casefold() in self._by_name:
            return self._by_name[given.strip().casefold()]
        if not self.labels:
            raise OptionError(
                f"this model takes class numbers, and its configuration has no class names; {every}"
                f", got {given!r}"
            )
        if self.classes <= _MAX_LISTED:
            raise UnknownNameError.of("class", given, self.labels.values())
        near = did_you_mean(given.casefold(), self._by_name)
        raise UnknownNameError(f"no class named {given!r}{near}; as a number, {every}")


def is_list(conditions: Any) -> bool:
    """Returns whether ``conditions`` holds several conditions rather than a single one."""
    several = isinstance(conditions, Iterable) and not isinstance(conditions, str)
    return several and getattr(conditions, "ndim", 1) != 0


def _number(given: Any) -> int | None:
    """Returns an integer of Python, NumPy or torch as ``int``; ``None`` for anything else."""
    if isinstance(given, bool) or getattr(given, "dtype", None) == torch.bool:
        return None
    try:
        return operator.index(given)
    except TypeError:
        return None


def utf8(text: str) -> str:
    """Returns a text unchanged after checking that it can be encoded in UTF-8.

    Raises:
        OptionError: The text has a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(
            f"the prompt {text!r} cannot be encoded in UTF-8 ({error.reason}); decode it with the "
            "right encoding"
        ) from None
    return text

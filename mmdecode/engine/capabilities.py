"""What parts declare of themselves, and how a misspelt declaration is found.

A capability is a field of a frozen dataclass, so that a name that does not exist is refused where
the class is defined; so is a public name of a part that is nearly one of those its base declares.
"""

from __future__ import annotations

import difflib
import functools
from dataclasses import dataclass, fields
from typing import Any

from mmdecode.errors import OptionError, refuse_unknown

NEAR = 0.8
"""Names that are more alike than this are taken for misspelt, by difflib's ratio."""


class Capabilities:
    """Base of what a kind of part can do."""

    def __new__(cls, **given: Any) -> Any:
        """Refuses a field that does not exist.

        Raises:
            OptionError: It says which one was meant.
        """
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        refuse_unknown(given, known, "capability")
        return super().__new__(cls)


@dataclass(frozen=True, kw_only=True)
class DrafterCapabilities(Capabilities):
    """What a drafter can do.

    Attributes:
        graph_safe: In every round ``observe`` and ``propose`` run the same operations on the same
            tensors, state changed in place: a captured round may be replayed.
        composable: It can follow rounds that another drafter proposed.
        follows_target: It reads `mmdecode.engine.call.Plan.draft_target`: its tokens follow the
            guided and warped distribution.
        hint: What to use where no rule takes what it proposes.
    """

    graph_safe: bool = False
    composable: bool = True
    follows_target: bool = False
    hint: str = "another draft"


@dataclass(frozen=True, kw_only=True)
class RuleCapabilities(Capabilities):
    """What an acceptance rule can do.

    Attributes:
        drafter_invariant: For a seed the tokens, and not their distribution alone, are the same
            whatever is drafted: a drafter may then be chosen by measured times.
    """

    drafter_invariant: bool = False


class Part:
    """Base of the exchangeable parts of a decoder; a subclass of it declares what a part has."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        kind: Any = cls
        refuse_near_misses(tuple(vars(cls)), kind)


@functools.lru_cache(maxsize=256)  # adapters are looked at in every call
def refuse_near_misses(names: tuple[str, ...], cls: Any) -> None:
    """Refuses names of a part that are nearly those its base declares, and are none of them.

    Args:
        names: To look at.
        cls: The part's class.

    Raises:
        OptionError: Both names, and whose they are.
    """
    if Part in cls.__bases__:
        return
    base = next(one for one in cls.__mro__ if Part in one.__bases__)
    declared = [name for name in _declared(base) if not name.startswith("_")]
    known = {name for one in cls.__mro__[1:] for name in _declared(one)}
    for name in names:
        if name.startswith("_") or name in known:
            continue
        near = difflib.get_close_matches(name, declared, 1, NEAR)
        if near:
            raise OptionError(
                f"{cls.__name__}.{name} is nothing that a {base.__name__} declares; did you mean "
                f"{near[0]!r}? If not, choose a name that is less like it"
            )


def _declared(cls: type) -> set[str]:
    return {*vars(cls), *vars(cls).get("__annotations__", ())}

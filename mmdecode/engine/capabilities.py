"""Capabilities that parts declare, and checks that catch misspelt declarations.

A capability is a field of a frozen dataclass: a field that does not exist is refused where the
class is defined. Also refused there: a public name of a part that is almost one its base declares,
a capability set as an attribute of the class, and a method's name given to a value that is not a
method.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from mmdecode.engine.proposal import KINDS
from mmdecode.errors import OptionError, refuse_unknown

VALUES = {"kinds": KINDS, "modes": ("greedy", "sample")}
"""Values allowed in the lists that parts declare, by name of the list."""
NEAR = 0.8
"""Names at least this similar, by difflib's ratio, are taken for misspelt."""


class Capabilities:
    """Base of capabilities; a subclass lists those of one kind of part."""

    def __new__(cls, **given: Any) -> Any:
        """Refuses a field that does not exist.

        Raises:
            OptionError: A field does not exist; the message suggests one that does.
        """
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        refuse_unknown(given, known, f"capability of {cls.__name__}")
        return super().__new__(cls)


@dataclass(frozen=True, kw_only=True)
class DrafterCapabilities(Capabilities):
    """Capabilities of a drafter.

    Attributes:
        graph_safe: In every round ``observe`` and ``propose`` run the same operations on the same
            tensors, and change state in place, so that a CUDA graph of a round can be replayed.
        composable: It works after rounds that another drafter proposed, as in `FirstOf`.
        follows_target: It reads `mmdecode.engine.call.Plan.draft_target`, so that its tokens come
            from the guided and warped distribution.
        argmax_only: Its session reads no logits of scored nodes in ``observe``. Where no part of a
            call does, only their argmax is computed, and logits are ``(B, N + 1, 0)``. A subclass
            with a ``begin`` of its own has to declare it itself.
        repeatable: The passes of a call depend on the call alone, and neither on measured times nor
            on earlier calls. A job leaves the passes of others out of its results, so that these do
            not depend on interruptions.
        hint: End of the error when the rule takes none of its kinds, as in "use another draft".
    """

    graph_safe: bool = False
    composable: bool = True
    repeatable: bool = True
    follows_target: bool = False
    argmax_only: bool = False
    hint: str = "another draft"


@dataclass(frozen=True, kw_only=True)
class RuleCapabilities(Capabilities):
    """Capabilities of an acceptance rule.

    Attributes:
        drafter_invariant: With one seed the tokens themselves, not only their distribution, are the
            same whatever is drafted. A drafter may then be chosen by measured times.
        argmax_only: It reads the target by `mmdecode.engine.target_logits.TargetLogits.choices`,
            and chooses the argmax. A subclass with its own ``__call__`` has to declare it itself.
    """

    drafter_invariant: bool = False
    argmax_only: bool = False


class Part:
    """Base of the exchangeable parts of a decoder; checks the names that subclasses define."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        kind: Any = cls
        own = vars(cls)
        if "capabilities" not in own and ("__call__" in own or "begin" in own):
            inherited: Any = getattr(kind, "capabilities", None)
            if getattr(inherited, "argmax_only", False):  # what reads logits may be new
                kind.capabilities = replace(inherited, argmax_only=False)
        refuse_near_misses(tuple(vars(cls)), kind)
        refuse_other_kinds(vars(cls), kind)


@functools.lru_cache(maxsize=256)  # an adapter that a caller gives is checked in every call
def refuse_near_misses(names: tuple[str, ...], cls: Any) -> None:
    """Refuses names of a part that are almost, but not quite, those that its base declares.

    Args:
        names: Names that the part defines.
        cls: The part's class.

    Raises:
        OptionError: A name is almost a declared one, or is a capability.
    """
    if Part in cls.__bases__:
        return
    base = _base(cls)
    declared = [name for name in _declared(base) if not name.startswith("_")]
    known = {name for one in cls.__mro__[1:] for name in _declared(one)}
    can = type(vars(base).get("capabilities"))
    abilities = vars(can).get("__dataclass_fields__", ())
    for name in names:
        if name.startswith("_") or name in known:
            continue
        if name in abilities:
            raise OptionError(
                f"{cls.__name__}.{name} is a capability, which a {base.__name__} declares as one; "
                f"write capabilities = {can.__name__}({name}=...)"
            )
        near = difflib.get_close_matches(name, declared, 1, NEAR)
        if near:
            raise OptionError(
                f"{cls.__name__}.{name} is nothing that a {base.__name__} declares; did you mean "
                f"{near[0]!r}? If not, choose a name that is less like it"
            )


def refuse_other_kinds(values: Mapping[str, Any], cls: Any) -> None:
    """Refuses values of a part where its base declares another kind of value.

    Args:
        values: Values of the class, or of an object of it, by name.
        cls: The part's class.

    Raises:
        OptionError: Something else than a method, a list of known names, a guarantee or the
            capabilities of this kind of part stands where the base declares one.
    """
    if Part in cls.__bases__:
        return
    base = _base(cls)
    for name in values:
        meant, value = vars(base).get(name), values[name]
        if not hasattr(value, "__get__"):  # a property has a value for each object only
            _refuse_list(f"{cls.__name__}.{name}", value, meant, VALUES.get(name))
        if name == "guarantee" and not hasattr(value, "__get__") and not _guarantees(value):
            raise OptionError(
                f"{cls.__name__}.guarantee is {value!r}; expected 'exact', 'lossy', or 'exact for "
                "...', which names the distribution that the output follows"
            )
        if inspect.isfunction(meant) and not (callable(value) or hasattr(value, "__get__")):
            raise OptionError(
                f"{cls.__name__}.{name} is {value!r}, and a {base.__name__} declares a method; "
                f"write def {name}({', '.join(inspect.signature(meant).parameters)})"
            )
        if isinstance(meant, Capabilities) and not isinstance(value, type(meant)):
            raise OptionError(
                f"{cls.__name__}.{name} is {value!r}; a {base.__name__} declares them as "
                f"{type(meant).__name__}(...)"
            )


def _refuse_list(where: str, value: Any, meant: Any, known: Sequence[str] | None) -> None:
    """Refuses anything but a list of names, or a mapping, where one is declared."""
    kind = Mapping if isinstance(meant, Mapping) else Collection
    declared = known is not None or isinstance(meant, (tuple, frozenset, Mapping))
    if declared and (isinstance(value, str) or not isinstance(value, kind)):
        example = f"a mapping, as {dict(meant)!r}" if kind is Mapping else f"a tuple, ({value!r},)"
        raise OptionError(f"{where} is {value!r}; write {example}")
    if known is not None:
        refuse_unknown(value, known, f"value for {where}")


def _guarantees(value: Any) -> bool:
    return value in ("exact", "lossy") or str(value).startswith("exact for ")


def _base(cls: Any) -> Any:
    """The base class of this kind of part: `Drafter`, `Guide` and so on."""
    return next(one for one in cls.__mro__ if Part in one.__bases__)


def _declared(cls: type) -> set[str]:
    return {*vars(cls), *vars(cls).get("__annotations__", ())}

"""Finds the weights of a drafter that ship with a model."""

from __future__ import annotations

from collections.abc import Iterable

from mmdecode.checkpoints import paired, zoo_names
from mmdecode.errors import OptionError


def shipped(kinds: Iterable[str], model_id: str | None) -> str:
    """Returns ``zoo:NAME`` of the drafter that ships with a model, of the first kind available.

    Raises:
        OptionError: No drafter of these kinds ships with the model.
    """
    kinds = list(kinds)
    for kind in kinds:
        if (name := paired(model_id, kind)) is not None:
            return name
    name = min(kinds, key=len)  # eagle has the kinds eagle3 and eagle
    if model_id is None:
        raise no_path(name, kinds)
    raise OptionError(
        f"draft {name!r} needs path=..., the folder or Hub id of a drafter; none is shipped for "
        f"{model_id}: train one by 'mmdecode train drafter --kind {name}'"
    )


def no_path(name: str, kinds: Iterable[str]) -> OptionError:
    """Returns the error of a drafter without weights, made where no model is known.

    Args:
        name: Name of the drafter.
        kinds: Kinds of its weights.
    """
    ends = tuple(f"-{kind}" for kind in kinds)
    there = [f"{name}:path=zoo:{one}" for one in zoo_names() if one.endswith(ends)]
    such = f", such as {' or '.join(there)}" if there else ""
    return OptionError(
        f"draft {name!r} needs path=..., the folder, Hub id or zoo: name of weights trained for "
        f"the model{such}: which model it is, is not known here; train some by 'mmdecode train "
        f"drafter --kind {name}'"
    )

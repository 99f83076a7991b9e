"""Initialises a drafter from an existing one: for more steps, other data, or a related kind.

Source: Kang et al. 2025 (ViSpec), arXiv:2509.15235, which starts from an EAGLE drafter trained on
text.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from mmdecode.checkpoints import code_trusted, loading, local_path, unlike
from mmdecode.draft.medusa import Medusa, MedusaHeads
from mmdecode.errors import InputError, OptionError
from mmdecode.models.eagle import EagleModel
from mmdecode.models.feature_drafter import FeatureDrafter, load_drafter
from mmdecode.models.hydra import HydraHeads
from mmdecode.models.vispec import ViSpecModel

ELDERS: dict[type[FeatureDrafter], type[FeatureDrafter]] = {ViSpecModel: EagleModel}
"""Other kinds that a kind may start from, whose weights are a subset of its own."""


def begun(built: nn.Module, name: str, target: str) -> nn.Module:
    """Loads weights into the drafter that is to be trained.

    Args:
        built: The untrained drafter for the target.
        name: Drafter to start from: folder, Hub id or ``zoo:NAME``. One of the same kind keeps its
            own configuration; from one of a kind in `ELDERS`, the weights of equal names are
            taken.
        target: Name of the target, for messages.

    Raises:
        InputError: ``name`` is a drafter of another kind or of other sizes.
        OptionError: The kind cannot start from another drafter.
    """
    found = _loaded(built, name)
    grown = type(found) is not type(built)
    asked = found if grown else built
    names = asked.state_dict().keys()
    wrong = [one for one in unlike(built.state_dict(), found.state_dict()) if one[0] in names]
    if wrong:
        shown = "; ".join(
            f"{name}: {given or 'missing'} there, {wanted or 'nothing'} here"
            for name, wanted, given in wrong[:4]
        )
        raise InputError(
            f"{name} was made for another target or other options than this drafter of {target}: "
            f"{len(wrong)} weights differ ({shown}); start from one of these sizes, or from none"
        )
    if not grown:
        return found
    built.load_state_dict(found.state_dict(), strict=False)
    return built


def _loaded(built: nn.Module, name: str) -> nn.Module:
    if isinstance(built, FeatureDrafter):
        known = [type(built), *([ELDERS[type(built)]] if type(built) in ELDERS else [])]
        return load_drafter(name, {cls.kind: cls for cls in known})
    if isinstance(built, MedusaHeads):
        return Medusa.from_pretrained(name).heads
    if isinstance(built, HydraHeads):
        return HydraHeads.from_pretrained(name)
    if isinstance(built, PreTrainedModel):
        model: Any = None
        with loading(name):
            model = AutoModelForCausalLM.from_pretrained(
                local_path(name), dtype=built.dtype, trust_remote_code=code_trusted()
            )
        return model
    raise OptionError(f"{type(built).__name__} cannot start from another; leave --from out")

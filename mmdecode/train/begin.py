"""Initialisation of a drafter's weights from an existing drafter, to continue its training.

The existing drafter has the same architecture, or a related one (`ELDERS`). Source: Kang et al.
2025 (ViSpec), arXiv:2509.15235, who initialise from an EAGLE drafter that was trained on text.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from mmdecode.checkpoints import code_trusted, loading, local_path
from mmdecode.draft.medusa import Medusa
from mmdecode.draft.medusa_heads import MedusaHeads
from mmdecode.errors import InputError, OptionError
from mmdecode.models.eagle import EagleModel
from mmdecode.models.feature_drafter import FeatureDrafter, load_drafter
from mmdecode.models.hydra import HydraHeads
from mmdecode.models.vispec import ViSpecModel
from mmdecode.weights import unlike

ELDERS: dict[type[FeatureDrafter], type[FeatureDrafter]] = {ViSpecModel: EagleModel}
"""Related architecture with a subset of the weights, to initialise from, by architecture."""


def begun(built: nn.Module, name: str, target: str) -> nn.Module:
    """Returns the drafter to train, with the weights of an existing drafter.

    Args:
        built: Untrained drafter for the target.
        name: Drafter to start from: folder, Hub id or ``zoo:NAME``. If it has the same architecture
            as ``built``, it is returned with its own configuration. If it has the related
            architecture in `ELDERS`, its weights are copied into ``built`` by name.
        target: Class name of the target model, for messages.

    Raises:
        InputError: The drafter ``name`` has an unsuited architecture or weights of other shapes.
        OptionError: Drafters like ``built`` cannot start from an existing drafter.
    """
    found = _loaded(built, name)
    grown = type(found) is not type(built)
    asked = found if grown else built
    names = asked.state_dict().keys()
    wrong = [one for one in unlike(built.state_dict(), found.state_dict()) if one[0] in names]
    if wrong:
        shown = "; ".join(
            f"{name} has shape {given or '(missing)'}, expected {wanted or 'no such weight'}"
            for name, wanted, given in wrong[:4]
        )
        raise InputError(
            f"{name} was trained for another target or with other options than this drafter of "
            f"{target}: {len(wrong)} weights differ ({shown}); start from a drafter with the "
            "expected shapes, or leave --from out"
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
    raise OptionError(
        f"a {type(built).__name__} cannot be initialised from another drafter; leave --from out"
    )

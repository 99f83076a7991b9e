"""Passes of a whole tiny model over prompt and text with nothing cached, for one row.

What a guide makes of cached passes is compared with its formula on these. Attention is edited by a
function of the test's own.
"""

from contextlib import ExitStack, contextmanager, nullcontext

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from mmdecode import registry
from mmdecode._compat import attention_configs
from tests.conformance import test_instructblip as instructblip
from tests.support import tiny
from tests.support.tiny_vlm import IMAGE, vision_inputs, vision_model

NAME = "of_the_test"
EDIT = {}


def attend(module, query, key, value, attention_mask, scaling=None, softcap=None, **_):
    """Eager attention; ``EDIT`` may change the scores of the text model's layers."""
    heads = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    layer = EDIT.get("layers", {}).get(id(module))
    if layer is not None:
        scores = EDIT["change"](scores.clone(), layer)
    if attention_mask is not None:
        scores = scores + attention_mask[..., : scores.shape[-1]]
    weights = scores.softmax(-1)
    if layer is not None:
        EDIT["weights"][layer] = weights
    return (weights @ value).transpose(1, 2), weights


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, eager_mask)


@contextmanager
def edited(model, change):
    """Lets ``change(scores, layer)`` hold; yields the weights by layer."""
    sites = adapter_for(model).attention_sites()
    EDIT.update(layers={id(m): i for i, m in enumerate(sites)}, change=change, weights={})
    try:
        with attention_configs(model, NAME):
            yield EDIT["weights"]
    finally:
        EDIT.clear()


TEXT = "text "
"""Before the name of a text model's family: Gemma3 is both."""
BLIP = "instructblip"


def model_of(family):
    """A tiny model."""
    if family.startswith(TEXT):
        return tiny.text_model(family.removeprefix(TEXT))
    return instructblip.model() if family == BLIP else vision_model(family)


def adapter_for(model):
    """The adapter that decoding finds, of InstructBLIP around its language model."""
    inner = model.language_model if model.config.model_type == BLIP else model
    return registry.adapter_for(inner, model)


def inputs_of(family):
    """Several rows."""
    if family.startswith(TEXT):
        return tiny.prompts(3)
    return instructblip.inputs() if family == BLIP else vision_inputs(family)


def alone(family):
    """The first row by itself, its padding gone."""
    if not family.startswith(TEXT) and family != BLIP:
        return vision_inputs(family, 1)
    inputs = {name: value[:1] for name, value in inputs_of(family).items()}
    real = inputs["attention_mask"][0].bool()
    return inputs | {name: inputs[name][:, real] for name in ("input_ids", "attention_mask")}


class Pass:
    """One pass.

    Attributes:
        logits: Of the last prompt row and all later ones, ``(n + 1, V)``.
        exits: The same of each layer's input through norm and head.
        last: States after the final norm, of the whole text.
        weights: Attention by layer, ``(heads, Q, K)``, where attention was edited.
    """

    def __init__(self, family, new, inputs=None, change=None, hooks=()):
        model, inputs = model_of(family), dict(inputs or alone(family))
        prompt = inputs["input_ids"].shape[1]
        ids = torch.cat([inputs["input_ids"], torch.tensor([new], dtype=torch.long)], 1)
        inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in inputs:
                fill = 1 if family == "paligemma" else 0  # as it tells text from prompt
                inputs[name] = torch.nn.functional.pad(inputs[name], (0, len(new)), value=fill)
        adapter = adapter_for(model)
        whole = model.base_model
        if family == BLIP and "pixel_values" not in inputs:
            whole = model.language_model
        states = {}
        with ExitStack() as stack:
            for index, layer in enumerate(adapter.layers()):
                before = self._before(states, index)
                stack.enter_context(layer.register_forward_pre_hook(before, with_kwargs=True))
                for hook in hooks:
                    stack.enter_context(layer.register_forward_hook(hook(index)))
            weights = stack.enter_context(edited(model, change) if change else nullcontext({}))
            stack.enter_context(torch.no_grad())
            read = []
            decoder = adapter.model.get_decoder()
            hook = decoder.register_forward_hook(lambda _, args, output: read.append(output))
            stack.callback(hook.remove)
            whole(**inputs, use_cache=False)
        self.last = read[0].last_hidden_state[0]
        self.logits = adapter.head(self.last)[prompt - 1 :].detach()
        with torch.no_grad():
            self.exits = [
                adapter.head(adapter.norm(states[i]))[0, prompt - 1 :] for i in range(len(states))
            ]
        self.weights = {layer: value[0] for layer, value in weights.items()}

    @staticmethod
    def _before(states, index):
        def note(_, args, kwargs):
            states[index] = args[0] if args else kwargs["hidden_states"]

        return note


def images_of(inputs, width):
    """Columns that are image tokens, ``(width,)``."""
    found = inputs["input_ids"][0] == IMAGE
    return torch.nn.functional.pad(found, (0, width - len(found)))

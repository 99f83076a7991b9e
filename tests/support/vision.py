"""Guides of images on tiny models: what was scored, and drafted runs next to plain ones."""

import mmdecode
from mmdecode.decoder import Decoder
from mmdecode.engine.contracts import Guide
from mmdecode.testing import drafts
from tests.support.tiny import HiddenPath
from tests.support.tiny_vlm import NEW, vision_inputs, vision_model

SEED = 3


def decode(guide, family="llava", draft=None, batch=3, **options):
    """Generated tokens, row by row."""
    inputs = options.pop("inputs", None) or vision_inputs(family, batch)
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    found = mmdecode.generate(
        options.pop("model", None) or vision_model(family),
        decoder=Decoder(draft, guide, seed=SEED),
        **inputs,
        **options,
    )
    return found[:, inputs["input_ids"].shape[1] :].tolist()


def assert_drafts_change_nothing(make, family="llava", **options):
    """Asserts that chains, trees and smaller batches give the tokens of a plain run."""
    for sampled in (False, True):
        options["do_sample"] = sampled
        rows = decode(make(), family, **options)
        chain = drafts.Known(rows, length=4, wrong_at=[2, 9])
        assert decode(make(), family, chain, **options) == rows
        assert decode(make(), family, HiddenPath(rows), **options) == rows
        alone = options.get("inputs")
        alone = {"inputs": {k: v[:1] for k, v in alone.items()}} if alone else {}
        assert decode(make(), family, batch=1, **{**options, **alone})[0] == rows[0]


class Watched(Guide):
    """A guide, and what it was called with."""

    def __init__(self, guide):
        self.guide, self.scores, self.call = guide, [], None
        self.needs, self.branches, self.edits = guide.needs, guide.branches, guide.edits
        self.requires_inputs, self.neutral = guide.requires_inputs, guide.neutral

    def begin(self, call, prefill):
        self.call = call
        return self.guide.begin(call, prefill)

    def apply(self, constants, call, proposal, outputs):
        self.scores.append(outputs)
        return self.guide.apply(constants, call, proposal, outputs)


def assert_contrast_is_live(guide, family="llava", **options):
    """Asserts that every branch says something else than the main one, at every step."""
    watched = Watched(guide)
    decode(watched, family, **options)
    assert len(watched.scores) == NEW
    for branch in guide.branches:
        for scores in watched.scores:
            far = scores[branch.name].logits[0] - scores["main"].logits[0]
            assert float(far.abs().max()) > 1e-3

"""Image guides add no synchronisation to the loop's one per round."""

import pytest
import torch

import mmdecode
from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.guide.dagcd import DAGCD
from tests.exactness.test_syncs import Counter
from tests.support.tiny_vlm import vision_inputs, vision_model

ASK = ("icd", "ritual", "prompt_bias")  # for questions or eight-bit images
NAMES = [entry.name for entry in registry.describe("guide")]
IMAGES = [n for n in NAMES if "image" in registry.resolve("guide", n)[0].requires_inputs]
GUIDES = [*(set(IMAGES) - set(ASK)), "causalmm:level=both"]
WRITES = ((torch, "tensor"), (torch, "as_tensor"), (torch.Tensor, "new_tensor"))


class Transfers(Counter):
    """Counts tensors made of values on the host, too."""

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        for owner, name in WRITES:
            monkeypatch.setattr(owner, name, self.counted(name, getattr(owner, name)))


def most(guide, monkeypatch):
    """What the round with the most transfers transfers."""
    decoder = Decoder(guide=guide, seed=0)
    inputs = vision_inputs("llava", 2)
    with monkeypatch.context() as patch, Transfers(patch) as counter:
        mmdecode.generate(
            vision_model("llava"), decoder=decoder, max_new_tokens=4, do_sample=False, **inputs
        )
    return counter.most()


@pytest.mark.filterwarnings("ignore:guide CausalMM is inactive")  # a tower of two layers
@pytest.mark.parametrize("guide", sorted(GUIDES))
def test_a_round_of_a_guide_of_images_waits_once(guide, monkeypatch):
    assert most(guide, monkeypatch) == ["tolist"]


def test_weights_of_a_probe_are_handed_over_once(monkeypatch):
    assert most(DAGCD(heads={(0, 1): 2.0, (1, 0): -1.0}), monkeypatch) == ["tolist"]


def test_numbers_that_a_guide_hands_over_in_a_round_are_found(monkeypatch):
    class Weighed(DAGCD):
        def usage(self, words, main):
            return super().usage(words, main) * main.logits.new_tensor([1.0])

    assert most(Weighed(), monkeypatch) == ["new_tensor", "tolist"]

"""Attention edits of PAI, ScalingVis and Conscious Gaze: what they touch, and what they leave."""

from itertools import pairwise

import pytest
import torch

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.engine.attention import AttentionPlan, masked_softmax
from mmdecode.engine.contracts import BranchOutput
from mmdecode.engine.noise import Noise
from mmdecode.errors import OptionError
from mmdecode.guide.conscious_gaze import ConsciousGaze, harsanyi, uniform_noise
from mmdecode.guide.pai import PAI
from mmdecode.guide.scalingvis import ScalingVis
from tests.guide.test_inside import LENGTH, decoded
from tests.support.tiny_vlm import plain

EDITS = {
    "pai": lambda alpha=0.7: PAI(alpha).edits[0],
    "scalingvis": lambda alpha=0.7: ScalingVis(1 + alpha).edits[0],
    "conscious_gaze": lambda alpha=0.7: ConsciousGaze(alpha).edits[0],
}
ROWS, HEADS, QUERIES, KEYS = 2, 3, 4, 9
IMAGES = torch.zeros(ROWS, 6, dtype=torch.bool)
IMAGES[:, 2:5] = True


def scores():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, HEADS, QUERIES, KEYS, generator=draw)


def mask():
    """Causal, the first key of the second row padding, which its queries never see."""
    seen = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(KEYS - QUERIES)
    seen = seen.expand(ROWS, 1, QUERIES, KEYS).clone()
    seen[1, ..., 0] = False
    return seen


def weights_of(edit, strength=None):
    """Attention of one layer; the first row is the branch's, its last two queries decide tokens."""
    decoding = torch.zeros(ROWS, QUERIES, dtype=torch.bool)
    decoding[:, 2:] = True
    plan = AttentionPlan(
        sites={},
        depth=1,
        edits=[] if edit is None else [(edit, slice(0, 1))],
        images=IMAGES,
        decoding_rows=decoding,
        is_prompt=True,
        positions=torch.arange(QUERIES).expand(ROWS, -1),
        keys=torch.arange(KEYS).expand(ROWS, -1),
        noise=Noise.of(0, [0]),
        strengths={} if strength is None else {0: strength},
    )
    return masked_softmax(plan.apply(scores(), 0, mask(), "scores"), mask())


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_of_its_rows_and_never_of_what_the_mask_hides(name):
    before, after = weights_of(None), weights_of(EDITS[name]())
    assert torch.equal(after[1], before[1])  # another branch
    assert torch.equal(after[0, :, :2], before[0, :, :2])  # rows that decide nothing
    assert not torch.isclose(after[0, :, 2:], before[0, :, 2:]).all(-1).any()
    assert (after[~mask().expand_as(after)] == 0).all()
    torch.testing.assert_close(after.sum(-1), torch.ones(ROWS, HEADS, QUERIES))
    # among other keys attention is shared out as before
    others = ~torch.nn.functional.pad(IMAGES[0], (0, KEYS - 6))
    shares = [
        w[0, :, 2:, others] / w[0, :, 2:, others].sum(-1, keepdim=True) for w in (before, after)
    ]
    torch.testing.assert_close(*shares)


@pytest.mark.parametrize("name", ["pai", "conscious_gaze"])
def test_the_image_gets_more_with_alpha(name):
    masses = [
        weights_of(EDITS[name](alpha))[0, :, 2:, 2:5].sum(-1) for alpha in (0.1, 0.5, 1.0, 4.0)
    ]
    # PAI lifts each score by its own size, Conscious Gaze by the mean of the heads
    assert all((b > a).all() for a, b in pairwise(masses))


def test_boosts_are_those_of_the_formulas():
    scores = torch.randn(1, HEADS, QUERIES, KEYS)
    images = torch.nn.functional.pad(IMAGES[:1], (0, KEYS - 6))[:, None, None]

    class Site:
        pass

    Site.images, Site.strength = images, torch.ones(1, 1, QUERIES, 1)
    found = EDITS["pai"](0.2).scores(scores, Site)
    torch.testing.assert_close(found, scores + 0.2 * scores.abs() * images)
    found = EDITS["conscious_gaze"](0.5).scores(scores, Site)
    mean = sum(scores[:, h].abs() for h in range(HEADS)) / HEADS
    torch.testing.assert_close(found, scores + 0.5 * mean[:, None] * images)


def test_layers_are_those_of_the_papers():
    covered = {name: [i for i in range(32) if make().covers(i, 32)] for name, make in EDITS.items()}
    assert covered["pai"] == list(range(2, 32))
    assert covered["conscious_gaze"] == list(range(5, 19))
    assert covered["scalingvis"] == list(range(32))
    assert registry.create("guide", "pai:first=0.5,last=0.5").edits[0].layers == (0.5, 0.5)


def test_a_closed_gate_leaves_attention_alone():
    strength = torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    before, after = weights_of(None), weights_of(EDITS["conscious_gaze"](), strength)
    assert torch.equal(after[0, :, 2], before[0, :, 2])
    assert not torch.equal(after[0, :, 3], before[0, :, 3])


def four(seed=0, rows=3):
    draw = torch.Generator().manual_seed(seed)
    names = ("main", "image", "words", "neither")
    return {n: BranchOutput(logits=torch.randn(rows, 2, 20, generator=draw)) for n in names}


def test_what_only_adds_up_does_not_interact():
    image, words = torch.randn(3, 2, 20), torch.randn(3, 2, 20)
    added = {"main": image + words + 1, "image": image + 1, "words": words + 1}
    added["neither"] = torch.ones_like(image)
    scores = {name: BranchOutput(logits=logits) for name, logits in added.items()}
    assert torch.allclose(harsanyi(scores), torch.zeros(()), atol=1e-5)
    assert not ConsciousGaze(threshold=1e-6).gate(None, scores).any()
    scores = four()
    none = scores["neither"].logits
    parts = [none, scores["image"].logits - none, scores["words"].logits - none, harsanyi(scores)]
    torch.testing.assert_close(sum(parts), scores["main"].logits)


def test_each_node_is_sensed_by_itself():
    scores = four()
    guide = ConsciousGaze(threshold=4.0, candidates=5)
    found = guide.gate(None, scores)
    assert 0 < found.sum() < found.numel()
    for row in range(3):
        alone = {n: BranchOutput(logits=s.logits[row : row + 1]) for n, s in scores.items()}
        assert torch.equal(guide.gate(None, alone), found[row : row + 1])
        for node in range(2):
            main = scores["main"].logits[row, node]
            best = main.argsort(descending=True)[:5]
            values = harsanyi(scores)[row, node, best]
            variance = ((values - values.mean()) ** 2).sum() / 4
            assert bool(found[row, node]) == bool(variance > 4.0)


def test_noise_covers_the_range_of_the_image():
    image = torch.randn(3, 16, 16)
    found = uniform_noise(image, torch.Generator().manual_seed(0))
    again = uniform_noise(image, torch.Generator().manual_seed(0))
    assert torch.equal(found, again)
    assert found.shape == image.shape and found.min() >= image.min() and found.max() <= image.max()
    spread = (found - image.min()) / (image.max() - image.min())
    counts = torch.histc(spread, bins=4, min=0, max=1) / spread.numel()
    assert ((counts - 0.25).abs() < 0.06).all()


NEUTRAL = {
    "pai": "pai:alpha=0,gamma=1,beta=0",
    "scalingvis": "scalingvis:weight=1",
    "adaptvis": "adaptvis:unsure=1,sure=1",
    "conscious_gaze": "conscious_gaze:alpha=0",
    "dagcd": "dagcd:alpha=0",
    "dola": "dola:alpha=0,relative_top=0",
    "dcla": "dcla:tau=-1",
    "dfd": "dfd:sigma=inf,temperature=1",
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_neutral_settings_leave_every_score(name):
    options = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": LENGTH}
    expected = decoded("llava", Decoder(), **options)
    decoder = Decoder(guide=NEUTRAL[name])
    assert decoder.guide.neutral and not registry.create("guide", name).neutral
    found = decoded("llava", decoder, **options)
    for ours, theirs in zip(found.scores, expected.scores, strict=True):
        assert torch.equal(ours, theirs)


def test_parts_of_pai_can_be_switched_off():
    attention = PAI(2.0, gamma=1.0, beta=0.0)
    assert attention.branches == [] and len(attention.edits) == 1
    logits = PAI(0.0, gamma=1.5)
    assert logits.edits == [] and len(logits.branches) == 1
    before = plain("llava", max_new_tokens=LENGTH).tolist()
    both = decoded("llava", Decoder(guide=PAI(2.0, 1.5))).tolist()
    each = [decoded("llava", Decoder(guide=guide)).tolist() for guide in (attention, logits)]
    assert before not in each and both not in each
    # a row without images: the branch without them is the main one
    assert all(found[1] == before[1] for found in (*each, both))


def test_a_gaze_without_boost_keeps_the_sensor_for_the_update():
    guide = ConsciousGaze(alpha=0, update=True)
    assert not guide.neutral
    assert "edited" not in [spec.name for spec in guide.branches] and not guide.edits
    scores = four()
    strong = ConsciousGaze(alpha=0, update=True, update_from=0.0, beta=0.0)
    found = strong.apply(None, None, None, scores)
    torch.testing.assert_close(found, scores["main"].logits + harsanyi(scores))
    weak = ConsciousGaze(alpha=0, update=True, update_from=1e9, beta=0.0)
    assert torch.equal(weak.apply(None, None, None, scores), scores["main"].logits)


@pytest.mark.parametrize(
    "options", ["pai:alpha=-1", "pai:beta=2", "conscious_gaze:alpha=-1", "conscious_gaze:beta=-1",
                "conscious_gaze:candidates=1", "dagcd:alpha=-1", "dagcd:rank=0"]
)  # fmt: skip
def test_options_are_checked(options):
    with pytest.raises(OptionError):
        registry.create("guide", options)

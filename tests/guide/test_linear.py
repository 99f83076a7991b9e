"""The linear family on logits at hand: fixtures of the references, and what each card demands."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmdecode import registry
from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.errors import OptionError
from mmdecode.guide import (
    AGLA,
    ICD,
    M3ID,
    RBD,
    RITUAL,
    VCD,
    CFGImage,
    Contrast,
    Linear,
    Plausible,
    TemperatureMatched,
)
from mmdecode.guide.linear import plausible
from tests.support.target_logits import distribution

DATA = Path(__file__).parents[1] / "data" / "golden"


def logits(*shape, seed=0, scale=3.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same_distribution(found, expected, atol=1e-5):
    """The same tokens are ruled out, and the others are as likely."""
    assert torch.equal(found.isneginf(), expected.isneginf())
    assert torch.allclose(found, expected, atol=atol, rtol=0)


# What the references computed


def cases(name):
    manifest = json.loads((DATA / name / "manifest.json").read_text())
    return {case["key"]: case for case in manifest["cases"]}


VCD_CASES, RITUAL_CASES = cases("vcd"), cases("ritual")


@pytest.mark.parametrize("key", VCD_CASES)
def test_vcd_is_what_the_reference_computed(key):
    case, stored = VCD_CASES[key], load_file(DATA / "vcd" / "logits.safetensors")
    guide = VCD(case["effective_alpha"], case["effective_beta"])
    for step, (main, noised) in enumerate(
        zip(stored["logits.main"], stored["logits.noised_branch"], strict=True)
    ):
        found = distribution(guide, main, *[noised] * bool(guide.branches), length=step)
        assert_same_distribution(found, stored[key][step])
        assert found.isfinite().sum(-1).tolist() == case["survivors"][step]


@pytest.mark.parametrize("key", RITUAL_CASES)
def test_ritual_vcd_and_m3id_are_what_the_reference_of_ritual_computed(key):
    options, stored = (
        RITUAL_CASES[key]["arguments"],
        load_file(DATA / "ritual" / "logits.safetensors"),
    )
    beta = options.get("ritual_beta")
    beta = 0.1 if beta is None else beta

    def alpha(name, default):
        given = options.get(name)
        return default if given is None else given

    if "use_ritual" in options:
        guide, other = RITUAL(alpha("ritual_alpha_pos", 3.0), beta), "pos"
    elif "use_vcd" in options:
        guide, other = VCD(alpha("ritual_alpha_neg", 1.0), beta), "neg"
    elif "use_m3id" in options:
        guide, other = M3ID(beta=beta), "text"
    else:
        guide, other = Linear([], [1.0]), "pos"
    for step, main in enumerate(stored["logits.main"]):
        others = [stored[f"logits.{other}"][step]] * len(guide.branches)
        found = distribution(guide, main, *others, length=step)
        assert_same_distribution(found, stored[key][step], atol=1e-4 if other == "text" else 1e-5)


# Branches that agree show S


TOTALS = {
    "vcd": (VCD(1.0, 0.0), 1),
    "icd": (ICD(1.0, 0.0), 1),
    "m3id": (M3ID(0.3, 0.0), 1),
    "cfg_image": (CFGImage(3.0), 1),
    "rbd": (RBD(1.0, 0.5, 0.0), 1),
    "ritual": (RITUAL(3.0, 0.0), 4),
    "ritual_normalized": (RITUAL(3.0, 0.0, normalize=True), 1),
    "agla": (AGLA(2.0, 0.0), 3),
    "temperature_matched": (TemperatureMatched(4.0, 0.0), 4),
}


@pytest.mark.parametrize("name", TOTALS)
def test_branches_that_agree_give_the_main_distribution_at_temperature_one_over_s(name):
    guide, total = TOTALS[name]
    main = logits(3, 40)
    found = distribution(guide, main, *[main] * len(guide.branches), length=5)
    expected = (total * main).softmax(-1)
    assert torch.allclose(found.softmax(-1), expected, atol=1e-6)
    assert guide.total == pytest.approx(total)


def test_vcd_of_the_same_image_is_the_main_distribution_to_the_bit():
    main = logits(3, 40)
    assert torch.equal(distribution(VCD(1.0, 0.0), main, main), main)


# The cut


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("make", [VCD, RITUAL, AGLA, M3ID], ids=lambda c: c.__name__)
def test_survivors_are_those_that_are_plausible_to_the_main_branch(make, beta):
    main, other = logits(5, 40), logits(5, 40, seed=1)
    found = distribution(make(beta=beta), main, other, length=3)
    p = main.double().softmax(-1)
    expected = p >= beta * p.amax(-1, keepdim=True) * (1 - 1e-9)
    assert torch.equal(found.isfinite(), expected)
    assert found.isfinite().any(-1).all()


@pytest.mark.parametrize("alpha", [0.0, 1.0, 50.0])
def test_beta_one_leaves_the_greedy_token_whatever_the_strength(alpha):
    main, other = logits(5, 40), logits(5, 40, seed=1)
    for guide in (VCD(alpha, 1.0), RITUAL(alpha, 1.0)):
        found = distribution(guide, main, *[other] * len(guide.branches))
        assert torch.equal(found.argmax(-1), main.argmax(-1))
        assert (found.isfinite().sum(-1) == 1).all()


def test_the_distribution_before_the_cut_has_all_tokens():
    main, other = logits(5, 40), logits(5, 40, seed=1)
    guide = VCD(1.0, 0.3)
    combined = distribution(guide, main, other, combined=True)
    assert combined.isfinite().all()
    assert torch.equal(plausible(combined, main, 0.3), distribution(guide, main, other))


def test_tokens_that_a_branch_rules_out_are_out_and_nothing_is_nan():
    main, other = logits(4, 40), logits(4, 40, seed=1)
    main[:, 3], other[:, 3] = -torch.inf, -torch.inf
    main[:, 5], other[:, 7] = -torch.inf, -torch.inf
    guides = [VCD(1.0, 0.0), RITUAL(3.0, 0.0), M3ID(0.1, 0.0), CFGImage(2.0), CFGImage(0.5)]
    for guide in guides:
        for length in (0, 4):
            found = distribution(guide, main, other, length=length)
            ruled_out = found.isneginf().all(0).nonzero()[:, 0].tolist()
            assert ruled_out == [3, 5, 7], guide
            assert found[:, :3].isfinite().all()


def test_the_margin_moves_by_the_strength_times_the_gap_between_branches():
    main, other = logits(6, 2), logits(6, 2, seed=1)
    found = distribution(VCD(0.7, 0.0), main, other)
    margin, noised = main[:, 0] - main[:, 1], other[:, 0] - other[:, 1]
    assert torch.allclose(found[:, 0] - found[:, 1], margin + 0.7 * (margin - noised), atol=1e-5)


# M3ID


def test_m3id_leaves_the_first_token_to_the_bit_and_grows_along_a_path():
    main, other = logits(2, 4, 30), logits(2, 4, 30, seed=1)
    nodes = Proposal(
        tokens=torch.zeros(2, 3, dtype=torch.long), kind="deterministic", tree=Tree((-1, 0, -1))
    )
    guide = M3ID(0.3, 0.0)
    found = distribution(guide, main, other, length=4, proposal=nodes)
    for row, t in enumerate([4, 5, 6, 5]):
        more = (1 - torch.exp(torch.tensor(-0.3 * t))) / torch.exp(torch.tensor(-0.3 * t))
        expected = main[:, row] + more * (main[:, row] - other[:, row])
        assert torch.allclose(found[:, row], expected, atol=1e-3)
    first = logits(2, 30)
    assert torch.equal(distribution(guide, first, other[:, 0], length=0), first)
    late = distribution(M3ID(0.02, 0.1), first, other[:, 0], length=100_000)
    assert late.isfinite().any(-1).all() and not late.isnan().any()


# Guidance by the image


def test_gamma_is_between_and_beyond_the_branches():
    main, other = logits(3, 40).double(), logits(3, 40, seed=1).double()
    assert torch.equal(distribution(CFGImage(0.0), main, other), other.log_softmax(-1))
    found = distribution(CFGImage(2.5), main, other).log_softmax(-1)
    shifted = distribution(CFGImage(2.5), main + 7, other - 3).log_softmax(-1)
    assert torch.allclose(found, shifted, atol=1e-9)  # of either branch only differences count
    for gamma in (0.3, 2.5):
        same = distribution(CFGImage(gamma), main, main)
        assert torch.allclose(same, main.log_softmax(-1), atol=1e-9)
    contrast = distribution(VCD(1.5, 0.0), main, other).log_softmax(-1)
    assert torch.allclose(found, contrast, atol=1e-9)  # gamma is 1 + alpha


def test_log_guidance_with_a_cut_equals_the_formula_of_pai():
    main, other = logits(3, 40), logits(3, 40, seed=1)
    guide = Linear([BranchSpec(name="u")], [1.1, -0.1], 0.1, log_space=True)
    c, u = main.log_softmax(-1), other.log_softmax(-1)
    expected = 1.1 * (c - u) + u
    assert_same_distribution(distribution(guide, main, other), plausible(expected, main, 0.1))


# Relatives


def test_rbd_without_the_visual_branch_is_vcd():
    guide, vcd = RBD(0.8, 0.0, 0.2, step=300), VCD(0.8, 0.2, step=300)
    assert guide.weights == vcd.weights and guide.beta == vcd.beta
    (one,), (other,) = guide.branches, vcd.branches
    assert (one.transform, one.transform_options["change"].args) == (
        other.transform,
        other.transform_options["change"].args,
    )


def test_a_normalized_ritual_of_weight_one_is_the_mean():
    main, other = logits(3, 40), logits(3, 40, seed=1)
    found = distribution(RITUAL(1.0, 0.0, normalize=True), main, other)
    assert torch.allclose(found, (main + other) / 2, atol=1e-6)


# Neutral settings, and options


NEUTRAL = [
    "vcd:alpha=0",
    "icd:alpha=0",
    "m3id:rate=0",
    "ritual:alpha=0",
    "agla:alpha=0",
    "cfg_image:gamma=1",
    "rbd:a=0,b=0",
    "temperature_matched:total=1",
    "pai:alpha=0,gamma=1",
    "plausible:",
]


@pytest.mark.parametrize("spec", NEUTRAL)
def test_what_is_neutral_runs_nothing_and_next_to_a_cut_no_branch(spec):
    glue = "" if spec.endswith(":") else ","
    assert registry.create("guide", f"{spec}{glue}beta=0").neutral
    cut = registry.create("guide", f"{spec}{glue}beta=0.1")
    assert not cut.neutral and not cut.branches
    main = logits(4, 40)
    found = distribution(cut, main, length=3)
    assert torch.equal(found, plausible(main, main, 0.1))  # raw logits, of log guidance too


@pytest.mark.parametrize(
    "spec",
    [
        "vcd:alpha=-1",
        "vcd:beta=1.5",
        "vcd:step=1000",
        "vcd:step=2.5",
        "icd:role=5",
        "icd:role=-1",
        "m3id:rate=-0.1",
        "ritual:alpha=lots",
        "ritual:transform=sheared",
        "agla:keep=0",
        "rbd:keep=2",
        "rbd:a=-1",
        "cfg_image:gamma=-1",
        "cfg_image:without=nothing",
        "temperature_matched:total=0",
        "plausible:beta=-0.1",
        "contrast:prompt=other",
        "contrast:alpha=1",
        "margin_shift:shift=much",
        "margin_shift:yes=Yes",
        "near_ties:gap=-1",
        "prompt_bias:instruction=3",
    ],
)
def test_a_wrong_option_is_refused(spec):
    with pytest.raises(OptionError):
        registry.create("guide", spec)


def test_options_in_a_string_reach_the_guide():
    assert registry.create("guide", "vcd:alpha=0.5,beta=0.2").weights == [1.5, -0.5]
    assert registry.create("guide", "ritual:alpha=3,normalize=true").total == 1
    assert registry.create("guide", "cfg_image:gamma=2,without=black").branches[0].transform == (
        "pictures"
    )
    found = registry.create("guide", "contrast:prompt=last_token,alpha=2")
    assert isinstance(found, Contrast) and found.weights == [3, -2]
    assert isinstance(registry.create("guide", "plausible"), Plausible)


def test_unequal_counts_are_refused():
    with pytest.raises(OptionError, match="weights"):
        Linear([], [1.0, 2.0])

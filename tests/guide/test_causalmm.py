"""CausalMM: maps and logits of the reference's code, and what must hold of any edit."""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmdecode import registry
from mmdecode._compat import attention_configs
from mmdecode.engine.contracts import BranchOutput
from mmdecode.engine.noise import Noise
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.guide import causalmm
from mmdecode.guide.causalmm import INTERVENTIONS, CausalMM, counterfactual, patch_map
from mmdecode.guide.linear import Linear
from tests.guide import uncached
from tests.support.tiny_vlm import vision_inputs, vision_model
from tests.support.vision import (
    Watched,
    assert_contrast_is_live,
    assert_drafts_change_nothing,
    decode,
)

DATA = Path(__file__).parents[1] / "data" / "golden" / "causalmm"
MAPS = load_file(DATA / "attention.safetensors")
LOGITS = load_file(DATA / "logits.safetensors")
CASES = json.loads((DATA / "manifest.json").read_text())["cases"]


def draws(kind):
    """What the reference drew, as draws of ours."""
    whole = MAPS["vision.attention"].flatten(2)
    if kind == "random":
        return MAPS["vision.random.uniform_draws"].flatten(2)
    if kind == "shuffle":  # one order for the heads of all rows
        order = MAPS["vision.shuffle.permutations"]
        return (order.argsort(-1) / order.shape[-1]).expand_as(whole)
    return torch.zeros_like(whole)


@pytest.mark.parametrize("kind", INTERVENTIONS)
def test_maps_are_edited_as_the_reference_edits_those_of_images(kind):
    before = MAPS["vision.attention"]
    whole = before.flatten(2)
    edited = INTERVENTIONS[kind](whole, torch.ones_like(whole).bool(), lambda: draws(kind))
    edited = edited.view_as(before)
    assert torch.allclose(edited, MAPS[f"vision.{kind}"], atol=1e-6)
    features = MAPS["vision.patch_features"]
    found = features * patch_map(edited, features.shape[1])[..., None]
    expected = MAPS[f"vision.{kind}.weighted_features_fp16"].float()
    assert torch.allclose(found, expected, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [("reversed", "reverse_and_normalize"), ("uniform", "uniform"), ("random", "random")],
)
def test_maps_are_those_of_the_reference_for_text_made_to_sum_to_one(kind, theirs):
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    weights, given = MAPS["language.attention"], MAPS["language.random.uniform_draws"]
    found = counterfactual(INTERVENTIONS[kind], weights, seen, of(given))
    expected = MAPS[f"language.{theirs}"]
    expected = expected / expected.sum(-1, keepdim=True)
    lost = expected.isnan().any(-1, keepdim=True)  # 0 / 0, always in the first row
    flat = seen / seen.sum(-1, keepdim=True)
    assert torch.allclose(found, torch.where(lost, flat, expected), atol=1e-6)
    if kind == "reversed":
        assert lost[:, :, 0].all()
        raw = INTERVENTIONS[kind](weights, seen.expand_as(weights), None) * seen
        assert torch.allclose(raw, MAPS["language.reverse"], atol=1e-6)
        level = MAPS["language.row_uniform_input"]
        found = counterfactual(INTERVENTIONS[kind], level, seen, of(given))
        assert torch.allclose(found, flat.expand_as(level), atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["key"])
def test_logits_are_combined_as_the_reference_combines_them(case):
    level = "both" if case["key"].startswith("two") else "vision"
    gamma = 0.5 if case["gamma"] is None else case["gamma"]
    epsilon = 0.1 if case["epsilon"] is None else case["epsilon"]
    names = {"main": "main", "vision": "cf_vision", "language": "cf_language"}
    scores = {
        name: BranchOutput(logits=LOGITS[f"logits.{theirs}"]) for name, theirs in names.items()
    }
    guide = CausalMM(level, gamma=gamma, epsilon=epsilon)
    found, expected = guide.apply(None, None, None, scores), LOGITS[case["key"]]
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.allclose(found, expected, atol=1e-5)
    if level == "both":  # a second level that agrees with the main branch adds nothing
        scores["language"] = scores["main"]
        one = CausalMM("vision", gamma=gamma, epsilon=epsilon).apply(None, None, None, scores)
        assert torch.allclose(guide.apply(None, None, None, scores), one, atol=1e-5)


def of(given):
    """Draws at hand, for a slice of the queries."""
    return lambda part: given[..., part, :]


def of_row(noise, row):
    """The noise of one row alone."""
    return Noise(noise.seed, noise.requests[row : row + 1])


def maps(heads=3, width=7, pads=(0, 2)):
    """Causal attention of rows with padding at the left; padding attends to nothing."""
    slots = torch.arange(width)
    real = slots >= torch.tensor(pads)[:, None]
    seen = (slots <= slots[:, None]) & real[:, None] & real[:, :, None]
    scores = torch.randn(2, heads, width, width, generator=torch.Generator().manual_seed(0))
    seen = seen[:, None]
    weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
    return weights, seen


@pytest.mark.parametrize("kind", INTERVENTIONS)
def test_an_edited_map_is_one_of_attention(kind):
    weights, seen = maps()
    given = torch.rand(weights.shape, generator=torch.Generator().manual_seed(1))
    found = counterfactual(INTERVENTIONS[kind], weights, seen, of(given))
    allowed = seen.expand_as(found)
    some = allowed.any(-1, keepdim=True)
    assert found.isfinite().all() and bool((found >= 0).all())
    assert torch.allclose(found.sum(-1), torch.ones_like(found.sum(-1)))
    assert bool((found[some & ~allowed] == 0).all())  # nothing later, no padding
    assert torch.equal(found[~some.expand_as(found)], weights[~some.expand_as(found)])
    changed = allowed.sum(-1) > 4  # few keys may be shuffled into their own order
    assert bool((found != weights).any(-1)[changed].all())
    if kind == "shuffle":
        for new, old, own in zip(
            found.flatten(0, 2), weights.flatten(0, 2), allowed.flatten(0, 2), strict=True
        ):
            assert torch.allclose(new[own].sort().values, old[own].sort().values, atol=1e-6)


def by_hand(kind, row, given):
    """One query's weights over the keys that it may attend to."""
    values = row.tolist()
    if kind == "random":
        values = given.tolist()
    elif kind == "uniform":
        values = [1.0] * len(values)
    elif kind == "reversed":
        values = [max(values) - value for value in values]
    else:
        order = sorted(range(len(values)), key=lambda key: float(given[key]))
        values = [values[key] for key in order]
    total = sum(values)
    return torch.tensor([v / total for v in values] if total else [1 / len(values)] * len(values))


def recomputed(family, kind, watched, new):
    """Logits of the language branch by one pass over prompt and text, edited by hand."""
    noise = of_row(watched.call.request.noise, 0)

    def change(scores, layer):
        _, heads, queries, keys = scores.shape
        given = noise.pairs(torch.arange(queries)[None], torch.arange(keys)[None], layer, heads)
        edited = torch.full_like(scores, -torch.inf)
        for head in range(heads):
            for query in range(queries):
                row = scores[0, head, query, : query + 1].softmax(-1)
                own = given[0, head, query, : query + 1]
                edited[0, head, query, : query + 1] = by_hand(kind, row, own).log()
        return edited

    return uncached.Pass(family, new, change=change).logits


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
@pytest.mark.parametrize("kind", INTERVENTIONS)
def test_the_language_branch_is_that_of_uncached_passes(family, kind):
    guide = Watched(CausalMM("language", kind))
    rows = decode(guide, family)
    cached = torch.cat([scores["language"].logits[0] for scores in guide.scores])
    assert torch.allclose(cached, recomputed(family, kind, guide, rows[0][:-1]), atol=2e-4)


def pass_with(model, inputs, change):
    """Logits of the whole model with the scores of its image encoder changed."""
    sites = {id(m): i for i, m in enumerate(registry.adapter_for(model).tower_sites())}
    uncached.EDIT.update(layers=sites, change=change, weights={})
    try:
        with torch.no_grad(), attention_configs(model, uncached.NAME):
            return model(**inputs).logits[:, -1]
    finally:
        uncached.EDIT.clear()


@pytest.mark.filterwarnings("ignore:guide CausalMM is inactive")  # where it edits a layer too deep
@pytest.mark.parametrize(("layers", "edited"), [((0.0, 1.0), (0, 1)), ((1.0, 1.0), (1,))])
@pytest.mark.parametrize("family", ["llava", "paligemma"])
def test_the_vision_branch_reads_images_encoded_with_the_edit(family, layers, edited):
    guide = Watched(CausalMM("vision", "uniform", layers=layers))
    decode(guide, family, batch=1)
    found = guide.scores[0]["vision"].logits[:, 0]
    flat = functools.partial(
        lambda scores, layer: torch.zeros_like(scores) if layer in edited else scores
    )
    inputs = vision_inputs(family, batch=1)
    assert torch.allclose(found, pass_with(vision_model(family), inputs, flat), atol=1e-4)
    same = pass_with(vision_model(family), inputs, lambda scores, layer: scores)
    if edited != (1,) or family != "llava":  # LLaVA reads the states before the last layer
        assert not torch.allclose(found, same, atol=1e-2)


def test_the_released_form_scales_the_features_before_the_projector():
    model, inputs = vision_model("llava"), vision_inputs("llava")
    guide = Watched(CausalMM("vision", "uniform", released=True))
    rows = decode(guide)
    patches = 4
    with (
        torch.no_grad(),
        model.base_model.multi_modal_projector.register_forward_pre_hook(
            lambda _, args: (args[0] / (patches + 1),)  # the mean of a map of N keys is 1 / N
        ),
    ):
        expected = model(**inputs).logits[:, -1]
    assert torch.allclose(guide.scores[0]["vision"].logits[:, 0], expected, atol=1e-4)
    assert decode(CausalMM("vision", "shuffle", released=True)) != rows
    assert not model.base_model.multi_modal_projector._forward_pre_hooks
    with pytest.raises(IncompatibleError, match="projector"):
        decode(CausalMM(released=True), "paligemma")
    with pytest.raises(IncompatibleError, match="square"):
        patch_map(torch.ones(1, 1, 6, 6), 5)


@pytest.mark.filterwarnings("ignore:guide")  # that says that branches agree
@pytest.mark.parametrize("level", causalmm.LEVELS)
def test_an_intervention_that_changes_nothing_leaves_the_cut(level, monkeypatch):
    monkeypatch.setitem(INTERVENTIONS, "identity", lambda rows, allowed, draws: rows)
    guide = CausalMM(level, "identity", epsilon=0.3)
    options = {"do_sample": True, "temperature": 2.0}
    assert decode(guide, **options) == decode(Linear([], [1.0], 0.3), **options)


def test_without_gamma_and_cut_nothing_is_run():
    guide = CausalMM("both", gamma=0.0, epsilon=0.0)
    assert guide.neutral and not guide.edits and not guide.branches


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("level", "kind", "family"),
    [
        ("both", "shuffle", "llava"),
        ("both", "random", "qwen2_5_vl"),
        ("language", "shuffle", "gemma3"),
        ("vision", "reversed", "smolvlm"),
    ],
)
def test_drafts_and_batches_change_nothing(level, kind, family):
    assert_drafts_change_nothing(lambda: CausalMM(level, kind, gamma=0.7), family)
    assert_contrast_is_live(CausalMM(level, kind), family)


def test_draws_depend_on_the_position_and_the_request():
    guide = Watched(CausalMM("language", "random"))
    decode(guide)
    noise = guide.call.request.noise
    queries, keys = torch.tensor([[4, 5]] * 3), torch.arange(6).expand(3, 6)
    found = noise.pairs(queries, keys, layer=1, heads=2)
    assert found.shape == (3, 2, 2, 6) and len(set(found.flatten().tolist())) == found.numel()
    other = noise.pairs(queries.flip(1), keys.flip(1), layer=1, heads=2)
    assert torch.equal(other.flip(2, 3), found)
    assert not torch.equal(noise.pairs(queries, keys, layer=0, heads=2), found)
    assert torch.equal(of_row(noise, 2).pairs(queries[:1], keys[:1], 1, 2)[0], found[2])


@pytest.mark.parametrize("kind", INTERVENTIONS)
@pytest.mark.parametrize("level", ["language", "vision", "released"])
def test_no_random_numbers_without_an_intervention_that_uses_them(level, kind, monkeypatch):
    requested = []
    pairs, uniform = Noise.pairs, causalmm.uniform
    monkeypatch.setattr(Noise, "pairs", lambda *a, **k: requested.append(1) or pairs(*a, **k))
    monkeypatch.setattr(causalmm, "uniform", lambda *a: requested.append(1) or uniform(*a))
    released = level == "released"
    guide = CausalMM("vision" if released else level, kind, released=released)
    decode(guide, batch=1, max_new_tokens=2)
    assert bool(requested) == (kind in ("random", "shuffle"))


@pytest.mark.parametrize("kind", ["random", "shuffle"])
def test_few_random_weights_are_made_at_once(kind, monkeypatch):
    guide = Watched(CausalMM("language", kind))
    whole, largest = decode(guide), []

    def pairs(noise, queries, keys, layer, heads):
        found = original(noise, queries, keys, layer, heads)
        largest.append(found.numel())
        return found

    original = Noise.pairs
    monkeypatch.setattr(Noise, "pairs", pairs)
    assert decode(CausalMM("language", kind)) == whole
    prompt = max(largest)
    largest.clear()
    parts = Watched(CausalMM("language", kind, at_once=prompt // 5))
    assert decode(parts) == whole
    assert max(largest) <= prompt // 5
    for before, after in zip(guide.scores, parts.scores, strict=True):
        assert torch.allclose(before["language"].logits, after["language"].logits, atol=1e-6)


def test_bad_settings_are_refused():
    for wrong in (
        {"level": "audio"},
        {"intervention": "identity"},
        {"gamma": -1.0},
        {"epsilon": 2.0},
        {"layers": (0.5, 0.2)},
    ):
        with pytest.raises(OptionError):
            CausalMM(**wrong)
    guide = registry.create("guide", "causalmm:level=both,intervention=uniform,first=0.5")
    assert guide.edits[0].layers == (0.5, 1.0)

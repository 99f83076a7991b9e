"""Drafting from the target's states: perfect and random drafters, and drafters of other models."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mmdecode
from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.draft import features
from mmdecode.draft.eagle import Eagle
from mmdecode.draft.features import FeatureDraft
from mmdecode.draft.growing import grow, tree_mask
from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.cache import RaggedCache
from mmdecode.engine.contracts import Guide
from mmdecode.errors import IncompatibleError, InputError, OptionError, UnsupportedModelError
from mmdecode.guide.vcd import VCD
from mmdecode.models import eagle as models
from mmdecode.models.feature_drafter import FeatureDrafter, Rows
from mmdecode.testing import check_draft
from tests.support.sessions import noting
from tests.support.tiny import NEW, VOCAB, WIDTH, prompts, text_model
from tests.support.tiny_vlm import vision_inputs, vision_model
from tests.support.traced import traced

SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}
SECTIONS = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}


def random_drafter(kind="eagle", seed=0, own_embedding=False, **config):
    """Weights large enough that what is drafted does not settle on one token."""
    torch.manual_seed(seed)
    drafter = models.KINDS[kind]({**SIZES, **config}, own_embedding)
    for name, weight in drafter.named_parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=1.0 if "fc" in name else 0.3)
    return drafter


def reduced(seed=0):
    """EAGLE-3 with a third of the vocabulary."""
    drafter = random_drafter("eagle3", seed, draft_vocab_size=VOCAB // 3)
    drafter.d2t.copy_(torch.arange(VOCAB // 3) * 2)  # ids 0, 3, 6, ...
    return drafter


def inputs_of(family, batch=3):
    return prompts(batch) if family == "llama" else vision_inputs(family, batch)


def model_of(family):
    return text_model("llama") if family == "llama" else vision_model(family)


def decode(family, draft=None, guide=None, inputs=None, do_sample=False, trace=False, **options):
    """New tokens by row, and the decoder."""
    inputs = inputs or inputs_of(family)
    accept, guided = options.pop("accept", "auto"), options.pop("draft_guided", None)
    decoder = Decoder(draft, guide, accept, seed=7, draft_guided=guided)
    decoder = traced(decoder) if trace else decoder
    options = {"max_new_tokens": NEW, "do_sample": do_sample, **options}
    options |= {"top_k": 0} if do_sample else {}
    out = mmdecode.generate(model_of(family), decoder=decoder, **inputs, **options)
    return out[:, inputs["input_ids"].shape[1] :].tolist(), decoder


# A drafter that is the target


class Oracle(FeatureDrafter):
    """The target itself, over a drafter's rows and with a drafter's cache.

    Rows begin with a prompt's second token, so the first, the same in all prompts, is put back as
    a row before them.
    """

    kind, marker = "oracle", "oracle."

    def __init__(self, model, first):
        config = model.config.get_text_config()
        rope = config.rope_parameters if "mrope_section" in config.rope_parameters else None
        super().__init__({**SIZES, "rope_parameters": rope})
        self.anchor = nn.Parameter(torch.zeros(1))
        self.target, self.first = [model], first  # a list, so that it is no module of this one
        self.cache_layers = config.num_hidden_layers

    def levels(self, num_layers):
        return ("last",)

    def prepare(self, rows):
        embed = self.target[0].get_input_embeddings()(torch.tensor(self.first))
        start = rows.kept.long().argmax(1, keepdim=True)
        # the next token's position is one more than a row's, but before images
        after = rows.positions[..., -1:] + 1
        positions = F.pad(torch.cat([rows.positions[..., 1:], after], -1) - 1, (1, 0))
        here = start if positions.ndim == 2 else start[:, None].expand(-1, 3, -1)
        embeds = F.pad(rows.embeds, (0, 0, 1, 0))
        index = start[..., None].expand(-1, -1, embeds.shape[-1])
        return replace(
            rows,
            embeds=embeds.scatter(1, index, embed.expand_as(index)),
            features=F.pad(rows.features, (0, 0, 1, 0)),
            positions=positions.scatter(-1, here, -1),
            kept=F.pad(rows.kept, (1, 0)).scatter(1, start, True),
            images=F.pad(rows.images, (1, 0)),
        )

    def forward(self, rows, mask, past):
        positions = rows.positions + 1
        return (
            self.target[0]
            .get_decoder()(
                inputs_embeds=rows.embeds,
                attention_mask=mask,
                position_ids=positions if positions.ndim == 2 else positions.transpose(0, 1),
                past_key_values=past,
                use_cache=True,
            )
            .last_hidden_state
        )


def with_first(inputs, first=1):
    """Prompts that all begin with one token."""
    first_real = inputs["attention_mask"].argmax(1, keepdim=True)
    return {**inputs, "input_ids": inputs["input_ids"].scatter(1, first_real, first)}


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("family", ["llama", "llava", "llava_next", "qwen2_5_vl"])
def test_a_drafter_that_is_the_target_is_always_right(family, do_sample):
    """Rows of other lengths, images of other sizes: every state, position and slot is right."""
    inputs = with_first(inputs_of(family))
    expected, _ = decode(family, inputs=inputs, do_sample=do_sample)
    draft = FeatureDraft(Oracle(model_of(family), 1), depth=3, top_k=1)
    found, decoder = decode(family, draft, inputs=inputs, do_sample=do_sample)
    assert found == expected
    assert decoder.stats.accepted == decoder.stats.drafted > 0
    assert decoder.stats.passes == math.ceil((NEW - 1) / 4)


class Longer(Guide):
    """A distribution that asks what the caller did after more words, instead of it."""

    neutral = False

    def __init__(self, inputs):
        ids = F.pad(inputs["input_ids"], (5, 0), value=3)
        ids[:, 0] = 1
        mask = torch.ones_like(ids, dtype=torch.bool)
        distribution = BranchSpec(
            name="edited", prompt=ids, prompt_mask=mask, stage=2, replaces_after_prefill="main"
        )
        self.branches = (distribution,)

    def begin(self, call, prefill):
        return None

    def apply(self, constants, call, proposal, outputs):
        return outputs["main"].logits


def test_it_reads_the_prompt_of_the_branch_that_runs():
    inputs = with_first(inputs_of("llama"))
    guide = Longer(inputs)
    expected, _ = decode("llama", guide=guide, inputs=inputs)
    assert expected != decode("llama", inputs=inputs)[0]
    draft = FeatureDraft(Oracle(model_of("llama"), 1), depth=3, top_k=1)
    found, decoder = decode("llama", draft, guide, inputs=inputs)
    assert found == expected
    assert decoder.stats.accepted == decoder.stats.drafted > 0


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_a_tree_of_such_a_drafter_holds_the_right_path(family):
    inputs = with_first(inputs_of(family))
    draft = FeatureDraft(Oracle(model_of(family), 1), depth=3, top_k=3, nodes=21)
    found, decoder = decode(family, draft, inputs=inputs)
    assert found == decode(family, inputs=inputs)[0]
    # the most likely token may lead where less likely paths go on, so not every path is whole
    assert decoder.stats.acceptance_length > 3


def test_a_mask_that_shows_siblings_to_one_another_is_found(monkeypatch):
    def causal(begin, pads, attended, *rest):
        return tree_mask(begin, pads, torch.ones_like(attended), *rest)

    inputs = with_first(inputs_of("llama"))
    make = lambda: FeatureDraft(Oracle(model_of("llama"), 1), depth=3, top_k=3, nodes=21)  # noqa: E731
    _, right = decode("llama", make(), inputs=inputs)
    monkeypatch.setattr(features, "tree_mask", causal)
    found, wrong = decode("llama", make(), inputs=inputs)
    assert found == decode("llama", inputs=inputs)[0]  # drafts never change a token
    assert wrong.stats.acceptance_length < right.stats.acceptance_length


# Any drafter


DRAFTS = {
    "chain": lambda: Eagle(random_drafter(), depth=3, top_k=1),
    "tree": lambda: Eagle(random_drafter(seed=1), depth=3, top_k=3, nodes=9),
    "eagle3": lambda: Eagle(random_drafter("eagle3"), depth=2, top_k=2, nodes=5),
    "reduced": lambda: Eagle(reduced(), depth=3, top_k=2, nodes=6),
    "own_embedding": lambda: Eagle(random_drafter(own_embedding=True), depth=2, top_k=1),
    "hidden_images": lambda: Eagle(random_drafter(), depth=2, top_k=2, nodes=5, images="hidden"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_a_random_drafter_changes_no_token(family, draft, do_sample):
    expected, _ = decode(family, do_sample=do_sample)
    found, decoder = decode(family, DRAFTS[draft](), do_sample=do_sample)
    assert found == expected
    assert decoder.stats.drafted > 0


def table_drafter():
    torch.manual_seed(0)
    sizes = {"hidden_size": 4, "target_hidden_size": 1, "vocab_size": 5, "intermediate_size": 4}
    return models.Eagle3Model({**sizes, "num_attention_heads": 2}, own_embedding=True)


def test_it_passes_the_public_check():
    check_draft(lambda: Eagle(table_drafter(), depth=2, top_k=2, nodes=4))


@pytest.mark.parametrize(
    ("family", "draft"), [("llava_next", "tree"), ("qwen2_5_vl", "tree"), ("qwen2_5_vl", "reduced")]
)
def test_a_row_drafts_in_a_batch_what_it_drafts_alone(family, draft):
    inputs = inputs_of(family, 4)
    names = ("pixel_values", "image_sizes", "image_grid_thw")
    raw = {name: inputs[name] for name in names if name in inputs}
    own = registry.adapter_for(model_of(family)).split(raw, inputs["input_ids"])
    _, batched = decode(family, DRAFTS[draft](), inputs=inputs, trace=True)
    for row, images in enumerate(own):
        width = int(inputs["attention_mask"][row].sum())
        rest = {k: v[row : row + 1, -width:] for k, v in inputs.items() if k not in raw}
        _, alone = decode(family, DRAFTS[draft](), inputs={**rest, **images}, trace=True)
        assert alone.trace[0] == batched.trace[row]
        assert any(r.drafted for r in alone.trace[0])


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
def test_guided_decoding_is_drafted_as_any(do_sample):
    expected, _ = decode("llava", guide=VCD(), do_sample=do_sample)
    assert expected != decode("llava", do_sample=do_sample)[0]
    inputs = with_first(inputs_of("llava"))
    for draft in (DRAFTS["tree"](), DRAFTS["hidden_images"]()):
        assert decode("llava", draft, VCD(), do_sample=do_sample)[0] == expected
    expected, _ = decode("llava", guide=VCD(), inputs=inputs, do_sample=do_sample)
    draft = FeatureDraft(Oracle(model_of("llava"), 1), depth=3, top_k=1)
    found, decoder = decode("llava", draft, VCD(), inputs=inputs, do_sample=do_sample)
    assert found == expected
    assert decoder.stats.accepted > 0


# Trees


def test_siblings_do_not_see_one_another():
    drafter = random_drafter()
    begin, pads = torch.tensor([3, 2]), torch.tensor([0, 1])
    generator = torch.Generator().manual_seed(3)
    embeds = torch.randn(2, 5, 2, WIDTH, generator=generator)

    def states_of(embeds):
        cache = RaggedCache(1, 2, begin.device)
        cache.open(8)  # committed rows
        drafter(rows(embeds[:, :3, 0], 0), torch.zeros(2, 1, 3, 8), cache)
        cache.set_start(begin)
        found, above, attended = [], torch.tensor([[0, 0], [0, 0]]), None
        for level in range(2):
            attended = features.extended(attended, above)
            cache.open(8, offset=2 * level)
            mask = tree_mask(begin, pads, attended, 8, torch.float32)
            found.append(drafter(rows(embeds[:, 3 + level], 3 + level), mask, cache))
            above = torch.tensor([[0, 1], [1, 0]])
        return torch.stack(found)  # (level, B, node, H)

    def rows(embeds, position):
        positions = torch.full(embeds.shape[:2], position)
        return Rows(embeds=embeds, features=embeds.flip(-1), positions=positions)

    with torch.no_grad():
        before = states_of(embeds)
        changed = embeds.clone()
        changed[:, 3, 0] += 1  # the first node of the first level
        moved = (states_of(changed) - before).abs().amax(-1) > 0
    # row 0: its child is node 0; row 1: node 1
    assert moved.tolist() == [[[True, False], [True, False]], [[True, False], [False, True]]]


def brute_force(table, depth, top_k, nodes):
    """Kept paths and their order, by recursion over everything: the rule in plain words."""
    frontier, found = [((), 0.0)], []
    for _ in range(depth):
        below = []
        for path, weight in frontier:
            distribution = table[path[-1] if path else 0].log_softmax(-1)
            for token in distribution.argsort(descending=True)[:top_k].tolist():
                below.append(((*path, token), weight + float(distribution[token])))
        found += below
        frontier = sorted(below, key=lambda pair: -pair[1])[:top_k]
    best = sorted(found, key=lambda pair: -pair[1])[:nodes]
    return {path for path, _ in best}


def test_the_tree_is_the_most_likely_of_its_size_and_closed_under_parents():
    table = torch.randn(8, 9, 9, generator=torch.Generator().manual_seed(0)) * 2
    rows = torch.arange(8)[:, None]
    grown = grow(table[:, :1], lambda _, tokens, above: table[rows, tokens], levels=4, top_k=3)
    assert grown.tokens.shape[1] == 3 + 3 * 9
    kept = grown.best(11)
    for row in range(8):
        paths = []
        nodes = zip(kept.tokens[row].tolist(), kept.parents[row].tolist(), strict=True)
        for token, parent in nodes:
            assert parent < len(paths)
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert set(paths) == brute_force(table[row], 4, 3, 11)


def test_equal_scores_never_orphan_a_node():
    certain = torch.full((1, 1, 6), -torch.inf)
    certain[..., 2] = 0.0  # a child as likely as its parent
    grown = grow(certain, lambda level, tokens, above: certain.expand(-1, 2, -1), levels=4, top_k=2)
    for nodes in range(1, 8):
        kept = grown.best(nodes)
        order = torch.arange(nodes)
        assert bool((kept.parents < order).all()) and bool((kept.parents >= -1).all())
        assert kept.parents[0, 0] == -1
        assert kept.tokens[0, : min(nodes, 1)].tolist() == [2]


def test_noise_chooses_children_and_does_not_weigh_them():
    table = torch.randn(1, 1, 7, generator=torch.Generator().manual_seed(0))
    noise = torch.zeros(1, 1, 7)
    noise[..., [1, 4]] = 50.0
    grown = grow(table, lambda *_: table, 1, 2, lambda level: noise)
    assert sorted(grown.tokens[0].tolist()) == [1, 4]
    distribution = table[0, 0].log_softmax(-1)
    torch.testing.assert_close(grown.scores[0], distribution[grown.tokens[0]])


def test_a_reduced_vocabulary_proposes_its_own_tokens_by_the_targets_ids():
    seen = set()
    draft = noting(
        Eagle(reduced(), depth=3, top_k=2, nodes=6),
        proposed=lambda _, proposal: seen.update(proposal.tokens.flatten().tolist()),
    )
    for do_sample in (False, True):
        decode("llama", draft, do_sample=do_sample)
    assert len(seen) > 5
    assert seen <= set(range(0, 3 * (VOCAB // 3), 3))


# Rows of a prompt


def test_rows_that_are_left_out_are_packed_to_the_right_in_their_order():
    kept = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 1]]).bool()
    embeds = torch.arange(10.0).view(2, 5, 1)
    positions = torch.arange(5).expand(2, 3, 5)
    rows = Rows(
        embeds=embeds,
        features=-embeds,
        positions=positions,
        kept=kept,
        images=~kept,
        carried=embeds,
    )
    packed, pads = rows.packed()
    assert pads.tolist() == [0, 2]
    assert packed.embeds[0, :, 0].tolist() == [1, 2, 4]
    assert packed.carried[0, :, 0].tolist() == [1, 2, 4]
    assert packed.features[1, 2:, 0].tolist() == [-9]
    assert packed.positions[0, 2].tolist() == [1, 2, 4]


def test_hidden_images_take_no_slot():
    draft = DRAFTS["hidden_images"]()
    widths = {}

    def note(session):
        call = session.call
        words = call.request.prompt_mask & ~call.plan.adapter.spans(
            "image", call.request.prompt_ids
        )
        widths[session.draft.images] = (session._width, int(words.sum(1).max()) - 1)

    inputs = vision_inputs("llava", 2)
    for images in ("all", "hidden"):
        noted = noting(Eagle(draft.drafter, depth=2, top_k=1, images=images), opened=note)
        decode("llava", noted, inputs=inputs)
    assert widths["all"][0] == inputs["input_ids"].shape[1] - 1
    assert widths["hidden"][0] == widths["hidden"][1] < widths["all"][0]


def test_sections_of_three_axes_turn_as_one_where_positions_are_equal():
    generator = torch.Generator().manual_seed(1)
    embeds = torch.randn(1, 4, WIDTH, generator=generator)
    positions = torch.arange(4)[None]
    one = random_drafter()
    three = random_drafter(rope_parameters=SECTIONS)
    three.load_state_dict(one.state_dict())
    mask = torch.zeros(1, 1, 4, 4)
    with torch.no_grad():
        found = []
        for drafter, where in (
            (one, positions),
            (three, positions[:, None].expand(-1, 3, -1)),
            (three, torch.stack([positions, positions + 1, positions * 2], 1)),
        ):
            cache = RaggedCache(1, 1, embeds.device)
            cache.open(4)
            rows = Rows(embeds=embeds, features=embeds, positions=where)
            found.append(drafter(rows, mask, cache))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


# What does not fit


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": 16, "target_hidden_size": 16}, "width 16, the model has 32"),
        ({"vocab_size": 90}, "vocabulary of 90, the model has 80"),
        ({"target_num_layers": 9}, "layers of 9, the model has 2"),
    ],
)
def test_a_drafter_for_another_target_is_refused_naming_both(change, says):
    drafter = random_drafter(**change)
    with pytest.raises(IncompatibleError, match=f"Eagle.*LlamaForCausalLM.*{says}"):
        decode("llama", Eagle(drafter))


def test_levels_that_a_target_does_not_have_are_refused():
    drafter = random_drafter("eagle3", eagle_aux_hidden_state_layer_ids=[0, 1, 7])
    with pytest.raises(IncompatibleError, match="layer 7, the model has 2"):
        decode("llama", Eagle(drafter))


def test_levels_are_read_off_the_configuration():
    name = "eagle_aux_hidden_state_layer_ids"
    assert random_drafter("eagle3").levels(32) == (2, 16, 29)
    assert random_drafter("eagle3", **{name: [1, 3]}).levels(32) == (1, 3)
    assert random_drafter("eagle3", eagle_config={name: [1, 46, 90]}).levels(94) == (2, 47, 91)


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": True},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {**SECTIONS, "mrope_interleaved": True}},
    ],
    ids=["window", "activation", "dynamic", "interleaved"],
)
def test_a_form_that_is_not_known_is_refused(change):
    with pytest.raises(UnsupportedModelError):
        random_drafter(**change)


@pytest.mark.parametrize("options", [{"depth": -1}, {"top_k": 0}, {"nodes": 0}, {"images": "no"}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(OptionError):
        Eagle(random_drafter(), **options)


# Checkpoints


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_saved_drafter_is_the_same_and_is_made_by_a_string(kind, tmp_path):
    drafter = random_drafter(kind)
    for parameter in drafter.parameters():
        parameter.data = parameter.data.half().float()
    drafter.save_pretrained(tmp_path)
    draft = registry.create("draft", f"eagle:path={tmp_path},length=3")
    assert (draft.depth, draft.top_k) == (3, 1)
    found, expected = draft.drafter.state_dict(), drafter.state_dict()
    assert type(draft.drafter) is type(drafter) and found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_what_is_no_drafter_is_refused(tmp_path):
    text_model("llama").save_pretrained(tmp_path / "target")
    with pytest.raises(InputError, match="holds no drafter"):
        Eagle.from_pretrained(tmp_path / "target")
    drafter = random_drafter()
    drafter.config["intermediate_size"] = 40
    drafter.save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="gate_proj"):
        Eagle.from_pretrained(tmp_path / "other")


def test_half_precision_does_not_round_the_original():
    drafter = random_drafter()
    weights = {key: value.clone() for key, value in drafter.state_dict().items()}
    placed = Eagle(drafter, depth=2, top_k=1).placed
    half = placed.like(torch.zeros(1, dtype=torch.float16))
    assert next(half.parameters()).dtype == torch.float16
    assert placed.like(torch.zeros(1)) is drafter
    assert placed.like(torch.ones(2, dtype=torch.float16)) is half  # made once
    assert all(torch.equal(value, weights[key]) for key, value in drafter.state_dict().items())

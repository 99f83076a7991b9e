"""Vision-language models: token for token what plain greedy `generate` gives, whatever drafts."""

import copy
import dataclasses
import inspect

import pytest
import torch

import mmdecode
from mmdecode.adapters.vision.base import VisionLanguageAdapter
from mmdecode.adapters.vision.chameleon import ChameleonAdapter
from mmdecode.adapters.vision.paligemma import PaliGemmaAdapter
from mmdecode.adapters.vision.qwen_vl import QwenVLAdapter
from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.draft.lookup import PromptLookup
from mmdecode.engine.adapter import MAIN, BranchSpec
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.contracts import Requirements
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import IncompatibleError
from mmdecode.guide.linear import Linear
from mmdecode.testing import drafts
from mmdecode.testing.checks import check_adapter
from tests.conformance.test_protocol import state_of
from tests.support import seams
from tests.support.tiny import DifferentError
from tests.support.tiny_vlm import (
    CONFIGS,
    DRAFTS,
    NEW,
    assert_same,
    ours,
    plain,
    reference,
    vision_inputs,
    vision_model,
)

FAMILIES = pytest.mark.parametrize("family", CONFIGS)
TWO = pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
EVERY_DRAFT = pytest.mark.parametrize("draft", DRAFTS)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("draft", ["none", "known_tree"])
@FAMILIES
def test_drafted_tokens_are_those_of_generate(family, draft):
    assert_same(family, draft)


@pytest.mark.one_in(3)
@EVERY_DRAFT
@TWO
def test_every_draft_gives_the_tokens_of_generate(family, draft):
    assert_same(family, draft, processors="penalties", batch=4)


@pytest.mark.one_in(3)
@FAMILIES
def test_the_images_decide_what_is_written(family):
    """Else nothing here would prove that they were seen."""
    inputs = vision_inputs(family)
    other = {**inputs, "pixel_values": inputs["pixel_values"] * -1.5}
    rows = [plain(family, inputs=i)[:, -NEW:] for i in (inputs, other)]
    differ = [one != two for one, two in zip(*(r.tolist() for r in rows), strict=True)]
    assert differ == [True, False, True]
    assert ours(Decoder(), family, inputs=other)[:, -NEW:].tolist() == rows[1].tolist()


@pytest.mark.one_in(2)
@FAMILIES
def test_text_alone_is_that_of_generate(family):
    assert_same(family, "known_tree", images=False)


@pytest.mark.parametrize("draft", ["none", "known_tree", "text_assistant"])
@TWO
def test_a_prompt_of_one_token_is_enough(family, draft):
    ids = torch.tensor([[5], [41]])
    expected = plain(family, inputs={"input_ids": ids})
    decoder = Decoder(DRAFTS[draft](family, expected[:, 1:].tolist()))
    assert ours(decoder, family, inputs={"input_ids": ids}).tolist() == expected.tolist()


@FAMILIES
def test_logits_are_those_of_generate(family):
    options = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 6}
    expected = plain(family, **options)
    _, rows = reference(family)
    found = ours(Decoder(DRAFTS["known_tree"](family, rows)), family, **options)
    theirs, mine = torch.stack(expected.logits), torch.stack(found.logits)
    lowest = torch.finfo(theirs.dtype).min
    assert ((mine == lowest) == (theirs == lowest)).all()
    scale = float(theirs[theirs > lowest].abs().max())
    torch.testing.assert_close(mine, theirs, atol=1e-5 * max(scale, 1), rtol=1e-5)


@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen3_vl"])
def test_eager_attention_gives_the_same(family):
    assert_same(family, "known_tree", attention="eager")


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3", "paligemma"])
def test_end_of_sequence_inside_an_accepted_block_ends_the_row_there(family):
    _, rows = reference(family)
    token = next(t for index, t in enumerate(rows[0]) if index > 3 and t not in rows[0][:index])
    decoder = assert_same(family, "known_tree", eos_token_id=token, pad_token_id=0)
    last = decoder.trace[0][-1]
    assert (*last.accepted, last.decided)[last.kept - 1] == token
    decoder = assert_same(family, "known", eos_token_id=token, pad_token_id=0)
    last = decoder.trace[0][-1]
    assert last.kept <= len(last.accepted), "nothing was cut: the case did not occur"


def alone(inputs, row, images):
    """Row ``row`` without its padding; ``images`` are the indices of its own."""
    width = int(inputs["attention_mask"][row].sum())
    return {
        name: value[images] if name == "pixel_values" else value[row : row + 1, -width:]
        for name, value in inputs.items()
    }


@pytest.mark.parametrize("family", ["llava", "gemma3", "paligemma"])
def test_a_row_alone_is_the_row_in_a_padded_batch(family):
    inputs = vision_inputs(family)
    _, rows = reference(family)
    for row, images in ((0, [0]), (2, [1, 2])):
        found = ours(Decoder(PromptLookup()), family, inputs=alone(inputs, row, images))
        assert found[0, -NEW:].tolist() == rows[row]


@pytest.mark.parametrize("family", ["llava", "idefics3", "emu3"])
def test_cached_scoring_of_trees_is_that_of_whole_passes(family):
    """With pixels, as transformers hands them over before 5.23."""
    inputs = vision_inputs(family, batch=4)
    ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
    rows = [0, 3]
    own = {"pixel_values": inputs["pixel_values"][rows]}
    if family == "emu3":
        own["image_sizes"] = inputs["image_sizes"][rows]
    elif family == "llava":
        own["pixel_values"] = inputs["pixel_values"][[0, 3]]
    check_adapter(VisionLanguageAdapter, vision_model(family), ids[rows], mask[rows], own)


@pytest.mark.parametrize("draft", ["none", "known_tree", "text_assistant"])
def test_guidance_is_that_of_transformers(draft):
    """The unconditional branch of transformers reads no image; ours neither."""
    for negative in (None, torch.tensor([[3, 9, 27]])):
        options = {"guidance_scale": 1.8, "negative_prompt_ids": negative}
        expected = plain("llava", batch=1, **options)
        assert expected.tolist() != plain("llava", batch=1).tolist()
        decoder = Decoder(DRAFTS[draft]("llava", expected[:, -NEW:].tolist()))
        assert ours(decoder, "llava", batch=1, **options).tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "paligemma"])
def test_a_branch_of_text_along_with_images_changes_neither(family):
    words = torch.tensor([[3, 9, 27, 11, 8, 2, 40, *range(5, 30)]])  # wider than the prompts
    spec = BranchSpec(name="words", prompt=words)
    inputs = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    if family == "paligemma":
        inputs["token_type_ids"] = torch.ones_like(words)
    alone = plain(family, inputs=inputs)[:, -NEW:].tolist()
    for weights, expected in (
        ([0.0, 1.0], alone * 3),
        ([1.0, 1e-12], reference(family)[1]),
    ):
        decoder = Decoder(drafts.Known(expected), Linear([spec], weights))
        assert ours(decoder, family)[:, -NEW:].tolist() == expected


class Forks(drafts.TestDrafter):
    """Reads the prompt for itself, and scores its rows before and after another order."""

    def begin(self, call, prefill):
        branches = ModelRunner(call.plan.adapter, [MAIN])
        branches.prefill(call, {})
        tokens = torch.tensor([[5, 9, 8]]).expand(call.batch, -1)
        proposal = Proposal(tokens=tokens, kind="deterministic")
        rows = torch.tensor([2, 0, 0])
        before = branches.score(call, proposal, {})["main"].logits[rows]
        branches.select_rows(rows)
        ids, length = call.rows.ids[rows], call.rows.length[rows]
        kept = dataclasses.replace(call.rows, ids=ids, length=length)
        moved = dataclasses.replace(call, rows=kept)
        self.logits = before, branches.score(moved, proposal, {})["main"].logits
        return super().begin(call, prefill)


@TWO
def test_rows_may_be_reordered_and_forked(family):
    draft = Forks()
    ours(Decoder(draft), family, max_new_tokens=2)
    torch.testing.assert_close(*draft.logits)


@TWO
def test_layers_that_draft_see_the_images(family):
    decoder = Decoder(LayerSkip(skip=(), length=3))  # all of them, so all should be accepted
    assert ours(decoder, family).tolist() == reference(family)[0].tolist()
    assert decoder.stats.accepted == decoder.stats.drafted > 0


def test_a_second_branch_with_the_same_images_is_the_same():
    decoder = Decoder(guide=Linear([BranchSpec(name="again")], [0.5, 0.5]))
    assert ours(decoder, "llava").tolist() == reference("llava")[0].tolist()


@pytest.mark.parametrize("draft", ["known_tree", "text_assistant", "medusa_tree"])
def test_sampled_answers_are_the_same_with_any_draft(draft):
    options = {"do_sample": True, "temperature": 0.9, "top_k": 40, "num_return_sequences": 2}
    options |= {"max_new_tokens": NEW, **vision_inputs("llava", batch=2)}
    model = vision_model("llava")
    expected = model.generate(**options, custom_generate=Decoder(seed=3))
    assert len({tuple(row) for row in expected.tolist()}) == 4
    rows = expected[:, -NEW:].tolist()
    decoder = Decoder(DRAFTS[draft]("llava", rows), seed=3)
    assert model.generate(**options, custom_generate=decoder).tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "gemma3", "chameleon"])
def test_half_precision_runs_and_gives_no_nan(family):
    model = copy.deepcopy(vision_model(family)).to(torch.bfloat16)
    inputs = vision_inputs(family)
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    options = {"return_dict_in_generate": True, "output_logits": True}
    decoder = Decoder(drafts.RandomTrees())
    out = model.generate(**inputs, max_new_tokens=5, custom_generate=decoder, **options)
    assert torch.stack(out.logits).isfinite().all()


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "chameleon"])
def test_decoding_leaves_no_trace_on_the_model(family):
    before = state_of(vision_model(family))
    reads_layers = drafts.Constant(3)
    wanted = Requirements(hidden=frozenset({0, 1, "last"}), prompt_hidden=True)
    reads_layers.needs = lambda adapter: wanted
    for draft in (reads_layers, DRAFTS["medusa_tree"](family, [])):
        assert ours(Decoder(draft), family).tolist() == reference(family)[0].tolist()
    after = state_of(vision_model(family))
    assert after[:-1] == before[:-1]
    assert all(torch.equal(value, after[-1][name]) for name, value in before[-1].items())


def second(family):
    """Another model with the same inputs."""
    return vision_model(family, seed=9)


@TWO
def test_an_assistant_that_reads_the_images_needs_pixels(family):
    expected = plain(family)
    decoder = Decoder(Assistant(second(family), length=3))
    if "mm_encoder_outputs" in inspect.signature(vision_model(family).forward).parameters:
        with pytest.raises(IncompatibleError, match=r"mmdecode\.attach"):
            ours(decoder, family)
    else:  # before 5.23 pixels reach a decoder anyway
        assert ours(decoder, family).tolist() == expected.tolist()
    options = {"max_new_tokens": NEW, "do_sample": False, **vision_inputs(family)}
    found = mmdecode.generate(vision_model(family), decoder=decoder, **options)
    assert found.tolist() == expected.tolist()
    with mmdecode.attach(vision_model(family)):
        assert ours(decoder, family).tolist() == expected.tolist()
    assert decoder.stats.drafted > 0


@FAMILIES
def test_the_front_door_gives_the_same(family):
    expected, rows = reference(family)
    options = {"max_new_tokens": NEW, "do_sample": False, **vision_inputs(family)}
    decoder = Decoder(DRAFTS["known"](family, rows))
    found = mmdecode.generate(vision_model(family), decoder=decoder, **options)
    assert found.tolist() == expected.tolist()


def assert_noticed(family, draft, **options):
    with pytest.raises(DifferentError):
        assert_same(family, draft, **options)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3", "paligemma"])
def test_positions_off_by_one_after_the_prompt_are_noticed(family, monkeypatch):
    assert_same(family, "known")
    forward = VisionLanguageAdapter.forward

    def shifted(self, tokens, mask, positions, past):
        begun = (past.rows.start > 0).long()[:, None]
        return forward(self, tokens, mask, positions + begun, past)

    monkeypatch.setattr(VisionLanguageAdapter, "forward", shifted)
    assert_noticed(family, "known")


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_rows_that_forget_how_far_their_images_reach_are_noticed(family, monkeypatch):
    opened = QwenVLAdapter.open

    def at_the_token(self, cache, prompt):
        past = opened(self, cache, prompt)
        past.offsets = torch.zeros_like(past.offsets)
        return past

    monkeypatch.setattr(QwenVLAdapter, "open", at_the_token)
    assert_noticed(family, "known")


@pytest.mark.parametrize("family", ["gemma3", "paligemma", "paligemma2"])
def test_images_read_in_one_direction_are_noticed(family, monkeypatch):
    read = VisionLanguageAdapter.model_inputs

    def causal(self, call):
        inputs = read(self, call)
        inputs.pop("token_type_ids")
        return inputs

    monkeypatch.setattr(VisionLanguageAdapter, "model_inputs", causal)
    assert_noticed(family, "none")


@pytest.mark.parametrize("family", ["gemma3", "paligemma2"])
def test_a_dropped_window_is_noticed(family, monkeypatch):
    seams.BLOCK_MASK.plant(monkeypatch, seams.without_window)
    assert_noticed(family, "known_tree")


def test_positions_from_zero_are_noticed_on_paligemma(monkeypatch):
    monkeypatch.setattr(PaliGemmaAdapter, "first_position", 0)
    prefill = VisionLanguageAdapter.prefill
    monkeypatch.setattr(
        VisionLanguageAdapter,
        "prefill",
        lambda self, prompt, mask, positions, past: prefill(
            self, prompt, mask, positions + 1, past
        ),
    )
    assert_noticed("paligemma", "known")


def test_image_tokens_in_the_text_are_noticed_on_chameleon(monkeypatch):
    assert_same("chameleon", "none")
    monkeypatch.delattr(ChameleonAdapter, "head")
    assert_noticed("chameleon", "none")


@FAMILIES
def test_images_that_are_not_read_are_noticed(family, monkeypatch):
    assert_same(family, "none")
    read = VisionLanguageAdapter.model_inputs
    unseen = ("pixel_values", "mm_encoder_outputs")

    def blind(self, call):
        return {k: v for k, v in read(self, call).items() if k not in unseen}

    monkeypatch.setattr(VisionLanguageAdapter, "model_inputs", blind)
    assert_noticed(family, "none")

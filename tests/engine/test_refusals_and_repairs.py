"""Findings of a review, each held by a test that failed before the repair."""

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation import logits_process as lp

import mmdecode as mm
from mmdecode.accept import Typical
from mmdecode.decoder import Decoder
from mmdecode.draft import PromptLookup
from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.proposal import MAX_NODES, Proposal
from mmdecode.errors import IncompatibleError, OptionError, UnsupportedModelError
from mmdecode.guide import Linear
from mmdecode.testing import drafts
from tests.support import tiny_models
from tests.support.sessions import Wrapped

MODEL = tiny_models.llama(
    vocab_size=61,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    eos_token_id=60,
    bos_token_id=1,
    pad_token_id=0,
    initializer_range=0.4,
)
IDS = torch.randint(1, 60, (2, 6), generator=torch.Generator().manual_seed(4))
MASK = torch.ones_like(IDS)


def generate(decoder=None, ids=IDS, mask=MASK, **options):
    options = {"max_new_tokens": 20, "do_sample": False} | options
    return MODEL.generate(ids, attention_mask=mask, custom_generate=decoder, **options)


def test_end_and_length_criteria_of_the_caller_replace_those_of_the_config():
    third = int(generate()[0, 8])
    for criterion in (MaxLengthCriteria(9), EosTokenCriteria(third)):
        rules = StoppingCriteriaList([criterion])
        plain = generate(stopping_criteria=rules, ids=IDS[:1], mask=MASK[:1])
        ours = generate(
            Decoder(PromptLookup()), stopping_criteria=rules, ids=IDS[:1], mask=MASK[:1]
        )
        assert torch.equal(plain, ours)


@pytest.mark.parametrize(
    ("processor", "instead"),
    [
        (lp.ClassifierFreeGuidanceLogitsProcessor(1.5), "guide='cfg:scale=...'"),
        (
            lp.SynthIDTextWatermarkLogitsProcessor(3, [1, 2], 64, 0, 8, "cpu"),
            "drop watermarking_config",
        ),
    ],
    ids=["batch_of_pairs", "synthid"],
)
def test_processors_that_no_node_can_be_given_to_are_refused(processor, instead):
    with pytest.raises(IncompatibleError, match=instead):
        generate(Decoder(), logits_processor=LogitsProcessorList([processor]))


PENALISED = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 1,
    "bad_words_ids": None,  # some that plain generate writes
    "sequence_bias": [[[8], 2.0], [[9, 10], 4.0]],
    "exponential_decay_length_penalty": (4, 1.3),
    "forced_eos_token_id": 60,
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [*PENALISED, "all"])
def test_penalties_of_generate_hold_at_drafted_tokens(name, padded):
    options = dict(PENALISED) if name == "all" else {name: PENALISED[name]}
    ids, mask = IDS.repeat(1, 2), MASK.repeat(1, 2)
    if padded:
        ids, mask = ids.clone(), mask.clone()
        ids[1, :4], mask[1, :4] = 0, 0
    unchanged = generate(ids=ids, mask=mask)
    if "bad_words_ids" in options:
        end = unchanged[0, 12:].tolist()
        options["bad_words_ids"] = [[end[1]], end[3:5], end[6:9]]
    plain = generate(ids=ids, mask=mask, **options)
    for draft in (PromptLookup(), drafts.RandomTrees()):
        decoder = Decoder(draft)
        assert torch.equal(plain, generate(decoder, ids, mask, **options)), draft
    assert decoder.stats.drafted > 0
    assert not torch.equal(plain, unchanged)


@pytest.mark.parametrize("row", [[1, 1, 1, 1, 1, 0], [1, 1, 0, 1, 1, 1]])
def test_padding_that_is_not_on_the_left_is_refused(row):
    mask = MASK.clone()
    mask[1] = torch.tensor(row)
    with pytest.raises(IncompatibleError, match="left"):
        generate(Decoder(), mask=mask)


def test_a_longer_draft_than_can_be_scored_is_cut():
    class Long(PromptLookup):
        def begin(self, call, prefill):
            return Watched(super().begin(call, prefill))

    class Watched(Wrapped):
        def propose(self, budget):
            assert budget <= MAX_NODES
            return super().propose(budget)

    ids = torch.cat([IDS[:, :3]] * 150, 1)
    call = {"ids": ids, "mask": torch.ones_like(ids), "max_new_tokens": 320}
    assert torch.equal(generate(**call), generate(Decoder(Long(length=400)), **call))


def test_a_tree_of_too_many_nodes_is_refused():
    class Huge(drafts.TestDrafter):
        def draft(self, call, budget):
            tokens = torch.ones(call.batch, MAX_NODES + 1, dtype=torch.long)
            return Proposal(tokens=tokens, kind="deterministic")

    with pytest.raises(OptionError, match="nodes"):
        generate(Decoder(Huge()))


def test_a_draft_that_changes_its_kind_is_refused():
    class Liar(drafts.TestDrafter):
        kinds = ("iid",)

        def draft(self, call, budget):
            return Proposal(
                tokens=torch.ones(call.batch, 1, dtype=torch.long), kind="deterministic"
            )

    ids = torch.cat([IDS[:, :3]] * 3, 1)
    with pytest.raises(IncompatibleError, match="kind"):
        generate(
            Decoder(Liar(), accept="rejection"),
            ids=ids,
            mask=torch.ones_like(ids),
            do_sample=True,
            max_new_tokens=200,
        )


def test_typical_runs_with_processors_of_unknown_type_and_unused_nodes():
    ids = torch.cat([IDS[:, :3]] * 3, 1)
    output = generate(
        Decoder(PromptLookup(), accept=Typical()),
        ids=ids,
        mask=torch.ones_like(ids),
        repetition_penalty=1.3,
    )
    assert output.shape[1] > ids.shape[1]


def test_methods_that_a_decoder_would_replace_silently_are_refused():
    with pytest.raises(IncompatibleError, match="penalty_alpha"):
        generate(Decoder(), penalty_alpha=0.6, top_k=4)


def test_a_criterion_may_answer_for_all_rows_at_once():
    calls = []

    def enough(ids, scores, **_):
        calls.append(ids.shape[1])
        return torch.tensor([ids.shape[1] >= 12] * len(ids))

    def enough_at_once(ids, scores, **_):
        return ids.shape[1] >= 12

    plain = generate(stopping_criteria=StoppingCriteriaList([enough]))
    ours = generate(Decoder(), stopping_criteria=StoppingCriteriaList([enough_at_once]))
    assert torch.equal(plain, ours)


def test_a_scaled_main_branch_is_not_neutral():
    branch = BranchSpec(name="other", prompt="last_token")
    assert not Linear([branch], [2.0, 0.0]).neutral
    assert Linear([branch], [1.0, 0.0]).neutral


def test_an_attention_that_takes_no_tree_masks_is_refused():
    from mmdecode.adapters.attention import refuse_attention

    class Flash:
        class config:
            _attn_implementation = "flash_attention_2"

    with pytest.raises(UnsupportedModelError, match="set_attn_implementation"):
        refuse_attention(Flash())


def test_assistant_model_is_a_draft_and_raw_inputs_may_be_added():
    decoder = Decoder()
    ids = mm.generate(
        MODEL,
        IDS,
        attention_mask=MASK,
        decoder=decoder,
        assistant_model=MODEL,
        mm_inputs={"text": ["a", "b"]},
        max_new_tokens=20,
        do_sample=False,
    )
    assert torch.equal(ids, generate())
    assert decoder.stats.acceptance_length > 2


def test_rows_are_named_by_their_raw_inputs_of_any_type():
    from mmdecode.engine.request import _bytes

    half = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert _bytes(half) != _bytes(half.flip(0))
    wave = torch.zeros(5000).numpy()
    other = wave.copy()
    other[2500] = 1
    assert _bytes(wave) != _bytes(other)

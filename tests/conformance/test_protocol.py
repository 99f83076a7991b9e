"""The protocol of `generate` apart from tokens: stopping, outputs, sampling, refusals, clean-up."""

import functools

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria

from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.medusa import Medusa
from mmdecode.engine.contracts import Requirements
from mmdecode.errors import IncompatibleError
from mmdecode.testing import drafts
from tests.support.tiny import (
    NEW,
    TEXT_DRAFTS,
    TREE,
    VOCAB,
    WHISPER_DRAFTS,
    assert_same,
    audio,
    model_of,
    ours,
    plain,
    prompts,
    random_block,
    random_heads,
    reference,
    small_of,
    text_model,
    undrafted_rows,
    whisper_model,
)

SOME_DRAFTS = ("none", "lookup", "assistant", "medusa_tree", "known", "known_tree")


class StopAtSum(StoppingCriteria):
    """Ends a row by its own history: where the ids of its last three columns sum to a multiple."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -3:].sum(1) % 7 == 0


@pytest.mark.parametrize("draft", TEXT_DRAFTS)
def test_custom_stopping_criteria_end_rows_inside_a_block(draft):
    # transformers pads a row that ended only where there is an end-of-sequence id
    options = {"stopping_criteria": [StopAtSum()], "pad_token_id": 0, "eos_token_id": VOCAB + 1}
    options["batch"] = 4
    expected = plain("llama", **options)
    rows = reference("llama", (("batch", 4),))[1]
    lengths = (expected[:, 9:] != 0).sum(1).tolist()
    assert len(set(lengths)) > 1 and min(lengths) < NEW, "the criterion never acted"
    assert ours(Decoder(TEXT_DRAFTS[draft]("llama", rows)), "llama", **options).tolist() == (
        expected.tolist()
    )


@pytest.mark.parametrize("draft", SOME_DRAFTS)
@pytest.mark.parametrize("family", ["llama", "whisper"])
def test_scores_and_logits_are_those_of_generate(family, draft):
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    options["repetition_penalty"] = 1.2
    expected = plain(family, **options)
    rows = undrafted_rows(family, repetition_penalty=1.2)
    table = WHISPER_DRAFTS if family == "whisper" else TEXT_DRAFTS
    found = ours(Decoder(table[draft](family, rows)), family, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits"):
        theirs, mine = getattr(expected, name), getattr(found, name)
        assert len(mine) == len(theirs)
        scale = float(torch.stack(theirs).abs().nan_to_num(posinf=0).max())
        torch.testing.assert_close(
            torch.stack(mine), torch.stack(theirs), atol=1e-5 * max(scale, 1), rtol=1e-5
        )
    model = model_of(family)
    theirs, mine = (
        model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        for out in (expected, found)
    )
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_scores_of_a_row_that_ended_early_are_those_of_generate_up_to_its_end():
    rows = reference("llama", ())[1]
    options = {"eos_token_id": rows[0][3], "pad_token_id": 0, "return_dict_in_generate": True}
    options["output_scores"] = True
    expected = plain("llama", **options)
    found = ours(Decoder(drafts.Known(rows)), "llama", **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    for position in range(4):
        mine, theirs = found.scores[position], expected.scores[position]
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-5)


SAMPLING = {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.95}


@functools.cache
def sampled_alone(family, row, seed=3):
    """Row ``row`` sampled by our undrafted loop, in a batch of its own."""
    model = model_of(family)
    if family == "whisper":
        inputs = {"input_features": audio(3)["input_features"][row : row + 1]}
        inputs |= {"language": "en", "task": "transcribe"}
        new = slice(0, None)
        inputs["mm_request"] = [str(row)]
    else:
        batch = prompts(3)
        width = int(batch["attention_mask"][row].sum())
        inputs = {key: value[row : row + 1, -width:] for key, value in batch.items()}
        new = slice(width, None)
    out = model.generate(
        **inputs, **SAMPLING, max_new_tokens=NEW, custom_generate=Decoder(seed=seed)
    )
    return out[0, new].tolist()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("draft", TEXT_DRAFTS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0), (1,)])
def test_sampled_text_is_the_same_with_any_draft_batch_and_order(draft, order):
    batch = {key: value[list(order)] for key, value in prompts(3).items()}
    expected = [sampled_alone("llama", row) for row in order]
    decoder = Decoder(TEXT_DRAFTS[draft]("llama", expected), seed=3)
    out = text_model("llama").generate(
        **batch, **SAMPLING, max_new_tokens=NEW, custom_generate=decoder
    )
    assert out[:, 9:].tolist() == expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("draft", WHISPER_DRAFTS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0)])
def test_sampled_transcripts_are_the_same_with_any_draft_batch_and_order(draft, order):
    expected = [sampled_alone("whisper", row) for row in order]
    decoder = Decoder(WHISPER_DRAFTS[draft]("whisper", expected), seed=3)
    out = whisper_model().generate(
        audio(3)["input_features"][list(order)],
        language="en",
        task="transcribe",
        **SAMPLING,
        max_new_tokens=NEW,
        mm_request=[str(row) for row in order],
        custom_generate=decoder,
    )
    assert out.tolist() == expected


def test_requests_and_seeds_have_noise_of_their_own():
    ids = torch.tensor([[5, 6, 7]] * 2)
    model = text_model("llama")

    def sample(seed, **options):
        decoder = Decoder(seed=seed)
        out = model.generate(
            ids, **SAMPLING, max_new_tokens=NEW, custom_generate=decoder, **options
        )
        return out[:, 3:].tolist()

    first, second = sample(3, mm_request=["a", "b"])
    assert first != second
    assert sample(3, mm_request=["b", "a"]) == [second, first]
    assert sample(4, mm_request=["a", "b"]) != [first, second]
    torch.manual_seed(0)
    sampled = sample(None)
    torch.manual_seed(0)
    assert sample(None) == sampled != sample(None)


@pytest.mark.parametrize("draft", ["lookup", "assistant", "medusa_tree"])
def test_several_sequences_per_prompt_differ_and_do_not_depend_on_the_draft(draft):
    options = {**prompts(2), **SAMPLING, "max_new_tokens": NEW, "num_return_sequences": 3}
    model = text_model("llama")
    expected = model.generate(**options, custom_generate=Decoder(seed=1))
    assert len({tuple(row) for row in expected.tolist()}) == 6
    decoder = Decoder(TEXT_DRAFTS[draft]("llama", expected[:, 7:].tolist()), seed=1)
    assert model.generate(**options, custom_generate=decoder).tolist() == expected.tolist()


REFUSED = {
    "beams": (lambda: {"num_beams": 3}, "num_beams=3 .* pass num_beams=1"),
    "no_cache": (lambda: {"use_cache": False}, "leave use_cache out"),
    "attentions": (
        lambda: {"output_attentions": True, "return_dict_in_generate": True},
        "not recorded",
    ),
    "hidden_states": (
        lambda: {"output_hidden_states": True, "return_dict_in_generate": True},
        "not recorded",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_drafted_loop_cannot_honour_is_refused(case):
    options, message = REFUSED[case]
    with pytest.raises(IncompatibleError, match=message):
        ours(Decoder(PromptLookup()), "llama", **options())


def test_beams_are_refused_on_whisper_too():
    with pytest.raises(IncompatibleError, match="pipeline"):
        ours(Decoder(), "whisper", num_beams=2)


def test_embeddings_as_a_prompt_are_refused():
    model = text_model("llama")
    embeds = model.get_input_embeddings()(torch.tensor([[1, 2, 3]])).detach()
    with pytest.raises(IncompatibleError, match="inputs_embeds"):
        model.generate(inputs_embeds=embeds, max_new_tokens=3, custom_generate=Decoder())


def test_a_filled_cache_is_continued():
    model, ids, found = text_model("llama"), torch.tensor([[1, 2, 3]]), []
    for decoder in (None, Decoder()):
        cache = DynamicCache()
        with torch.no_grad():
            model(ids[:, :2], past_key_values=cache)
        options = {"max_new_tokens": 3, "do_sample": False, "custom_generate": decoder}
        found.append(model.generate(ids, past_key_values=cache, **options).tolist())
    assert found[0] == found[1]


def test_a_request_that_is_refused_leaves_the_decoder_usable():
    decoder = Decoder(PromptLookup())
    with pytest.raises(IncompatibleError):
        ours(decoder, "llama", num_beams=2)
    assert ours(decoder, "llama").tolist() == plain("llama").tolist()


def state_of(model):
    """Everything on a model that decoding could leave changed."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    modules = {
        name: (sorted(vars(module)), [len(getattr(module, hook)) for hook in hooks])
        for name, module in model.named_modules()
    }
    return (
        modules,
        model.config.to_dict(),
        model.config._attn_implementation,
        model.generation_config.to_dict(),
        model.training,
        {name: value.clone() for name, value in model.state_dict().items()},
    )


@pytest.mark.parametrize("family", ["llama", "whisper"])
def test_decoding_leaves_no_trace_on_the_model(family):
    model = model_of(family)
    before = state_of(model)
    table = WHISPER_DRAFTS if family == "whisper" else TEXT_DRAFTS
    for draft in table.values():
        ours(Decoder(draft(family, [[1] * NEW] * 3)), family)
    reads_layers = drafts.Constant(3)
    reads_layers.needs = lambda adapter: Requirements(hidden=frozenset({0, 1, "last"}))
    ours(Decoder(reads_layers), family)

    class Broken(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        ours(Decoder(PromptLookup()), family, stopping_criteria=[Broken()])
    after = state_of(model)
    assert after[:-1] == before[:-1]
    for name, value in before[-1].items():
        assert torch.equal(value, after[-1][name]), name
    if family != "whisper":
        plain_now = plain(family)
        assert ours(Decoder(), family).tolist() == plain_now.tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_half_precision_runs_and_gives_no_nan(attention):
    model = text_model.__wrapped__("llama", attention).to(torch.bfloat16)
    small = text_model.__wrapped__("llama", attention, seed=9, layers=1).to(torch.bfloat16)
    for draft in (
        PromptLookup(),
        Assistant(small, length=3),
        Medusa(random_heads(), paths=TREE),
        drafts.RandomTrees(),
    ):
        out = model.generate(
            **prompts(3),
            max_new_tokens=NEW,
            output_logits=True,
            return_dict_in_generate=True,
            custom_generate=Decoder(draft),
        )
        assert out.sequences.shape == (3, 9 + NEW)
        assert torch.stack(out.logits).isfinite().all()


def test_half_precision_whisper_runs_with_a_block():
    model = whisper_model.__wrapped__().to(torch.bfloat16)
    out = model.generate(
        audio(2)["input_features"].bfloat16(),
        language="en",
        task="transcribe",
        max_new_tokens=NEW,
        custom_generate=Decoder(Medusa(random_heads(), random_block(), TREE)),
    )
    assert out.shape == (2, NEW)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("draft", TEXT_DRAFTS)
def test_guidance_under_a_draft_is_the_guidance_of_transformers_without_one(draft):
    """Their processor keeps a cache of its own, which only an undrafted loop moves correctly."""
    negative = torch.tensor([[3, 9, 27]])
    for options in ({}, {"negative_prompt_ids": negative}):
        options = {**options, "guidance_scale": 1.8, "batch": 1}
        expected = plain("llama", **options)
        assert expected.tolist() != plain("llama", batch=1).tolist()
        rows = expected[:, 7:].tolist()
        decoder = Decoder(TEXT_DRAFTS[draft]("llama", rows))
        assert ours(decoder, "llama", **options).tolist() == expected.tolist()


@pytest.mark.parametrize("draft", ["none", "known_tree", "assistant"])
def test_guidance_in_a_padded_batch_with_penalties(draft):
    options = {"guidance_scale": 1.8, "processors": "penalties"}
    expected = plain("llama", **options)
    decoder = Decoder(TEXT_DRAFTS[draft]("llama", expected[:, 9:].tolist()))
    assert ours(decoder, "llama", **options).tolist() == expected.tolist()


def test_the_same_decoder_serves_model_after_model():
    decoder = Decoder(Assistant(small_of("llama"), length=3))
    for family in ("llama", "qwen2", "llama"):
        assert ours(decoder, family).tolist() == plain(family).tolist()
    assert_same("qwen2", "lookup")

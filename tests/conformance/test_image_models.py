"""Models of image tokens: token for token the family's own sampling, with any drafter."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from mmdecode import registry
from mmdecode.adapters.images.base import ImageAdapter
from mmdecode.adapters.images.llamagen import LlamaGenAdapter, LlamaGenPast
from mmdecode.decoder import Decoder
from mmdecode.draft.amateur import Amateur
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.jacobi import Jacobi
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.cache import bucket
from mmdecode.engine.masks import chain
from mmdecode.engine.noise import Noise, Role, request_key
from mmdecode.errors import (
    ShapeError,
)
from mmdecode.guide.guidance import Guidance
from mmdecode.image_ar.grammar import Grammar
from mmdecode.image_ar.raster import generate
from mmdecode.image_ar.sampling import guided
from mmdecode.models import llamagen as llamagen_model
from mmdecode.models import vq
from tests.support import seams
from tests.support.tiny_images import (
    BEGINS,
    CLOSES,
    CODES,
    DRAFTS,
    ENDS,
    EOF,
    EOL,
    FIRST,
    GRID,
    GUIDED,
    MODELS,
    OPENS,
    PAD,
    SAMPLING,
    SEED,
    STARTS,
    TEXTS,
    conditions,
    draw,
    image_model,
    opening,
    rows_of_ids,
    scale_of,
)

FAMILIES = pytest.mark.parametrize("family", MODELS)
MODES = pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "llamagen"


# Each family's own logits, for one image without padding or cache


def own_prompts(family, row):
    """Ids of a row's prompt, and of the prompt without its text."""
    prompt = [BEGINS, *TEXTS[row], *opening(family)]
    if family == "janus":
        nothing = [BEGINS, *[PAD] * len(TEXTS[row]), OPENS]
    else:
        nothing = [BEGINS, *opening(family)]
    return torch.tensor([prompt]), torch.tensor([nothing])


def own_logits(family, row, tokens):
    """Logits of the tokens that can follow ``tokens``, with the condition and without."""
    model = image_model(family)
    tokens = torch.tensor([tokens], dtype=torch.long)
    if family == "imagegpt":
        logits = model(torch.cat([torch.tensor([[CODES]]), tokens], 1)).logits[:, -1]
        return logits, logits
    if family.startswith("llamagen"):
        given, mask = conditions(family, (row,)), None
        if family == "llamagen":
            condition = torch.tensor(given["classes"])
        else:
            padded = 6 - given["features"].shape[1]
            condition = F.pad(given["features"], (0, 0, padded, 0))
            mask = F.pad(given["mask"], (padded, 0))
        codes = F.pad(tokens, (0, 1))
        both = [condition, model.unconditional(condition)]
        return [model.code_logits(c, codes, mask)[:, -1] for c in both]
    found = []
    for prompt in own_prompts(family, row):
        if family == "janus":
            words = model.get_input_embeddings()(prompt)
            embeds = [words, model.prepare_embeddings_for_image_generation(tokens)]
            states = model.model.language_model(inputs_embeds=torch.cat(embeds, 1))
            found.append(model.model.generation_head(states.last_hidden_state[:, -1]))
            continue
        ids = torch.cat([prompt, tokens + first_of(family)], 1)
        logits = model.lm_head(model.model(ids).last_hidden_state[:, -1])
        found.append(logits[:, first_of(family) : FIRST + CODES])
    return found


def first_of(family):
    """The id of the first token in the vocabulary of image tokens."""
    return ENDS if family == "emu3" else FIRST


def allowed(family, index):
    """Tokens that are allowed at an index, over the vocabulary of image tokens."""
    if family != "emu3":
        return torch.ones(CODES, dtype=torch.bool)
    rows, columns = GRID
    body = rows * (columns + 1)
    if index >= body:
        tokens = [(EOF, CLOSES, ENDS)[index - body]]
    elif index % (columns + 1) == columns:
        tokens = [EOL]
    else:
        tokens = range(FIRST, FIRST + CODES)
    mask = torch.zeros(FIRST + CODES - ENDS, dtype=torch.bool)
    mask[[token - ENDS for token in tokens]] = True
    return mask


@torch.no_grad()
def own_drawing(family, row, do_sample):
    """An image, token by token."""
    noise = Noise.of(SEED, [request_key(f"image {row}", 0)])
    rows, columns = GRID
    tokens = []
    for index in range(rows * (columns + 1) + 3 if family == "emu3" else 16):
        law = guided(*own_logits(family, row, tokens), scale_of(family))
        law = law.float().masked_fill(~allowed(family, index), -torch.inf)
        if do_sample:
            gumbel = noise.gumbel(torch.tensor([[index]]), Role.TARGET, law.shape[-1])
            law = SAMPLING.warp(law) + gumbel[:, 0]
        tokens.append(int(law.argmax(-1)))
    return tokens


OWN = {}


def reference(family, do_sample):
    """Images of three rows; generated once."""
    if (family, do_sample) not in OWN:
        OWN[family, do_sample] = [own_drawing(family, row, do_sample) for row in range(3)]
    return OWN[family, do_sample]


@pytest.mark.one_in(2)
@MODES
@FAMILIES
def test_a_padded_batch_draws_what_each_family_draws_itself(family, do_sample):
    expected = reference(family, do_sample)
    assert draw(family, do_sample=do_sample).tolist() == expected
    if do_sample:
        assert len({token for row in expected for token in row}) >= 8


@pytest.mark.one_in(6)
@pytest.mark.parametrize("draft", DRAFTS)
@FAMILIES
def test_drafts_change_nothing(family, draft):
    for do_sample in (False, True):
        decoder = Decoder(DRAFTS[draft](family))
        assert draw(family, decoder, do_sample=do_sample).tolist() == reference(family, do_sample)
        if draft == "itself":
            assert decoder.stats.acceptance_rate == 1.0, "guided, placed and warped like the target"


@pytest.mark.parametrize("draft", ["lookup", "recycling:nodes=6", "layer_skip:exit_layer=1"])
@pytest.mark.parametrize("family", ["llamagen_captions", "emu3"])
def test_drafts_of_text_change_nothing_either(family, draft):
    assert draw(family, Decoder(draft), do_sample=True).tolist() == reference(family, True)


@pytest.mark.parametrize("family", GUIDED)
def test_a_model_drafts_from_its_unconditional_branch(family):
    decoder = Decoder(Amateur(2, transform="unconditional"))
    assert draw(family, decoder, do_sample=True).tolist() == reference(family, True)
    assert decoder.stats.accepted


@pytest.mark.parametrize("family", ["llamagen_captions", "emu3", "imagegpt"])
def test_branches_that_are_read_apart_say_the_same(family, monkeypatch):
    monkeypatch.setattr(ImageAdapter, "stack", lambda self, prompts: list(prompts))
    decoder = Decoder(Jacobi(6))
    assert draw(family, decoder, do_sample=True).tolist() == reference(family, True)


@pytest.mark.parametrize("family", ["llamagen_captions", "emu3"])
def test_reordered_rows_keep_their_state(family, monkeypatch):
    """As search would move them."""
    order = torch.tensor([2, 0, 1])

    def there_and_back(score):
        def scored(self, call, proposal, earlier):
            self.select_rows(order)
            self.select_rows(order.argsort())
            return score(self, call, proposal, earlier)

        return scored

    seams.SCORE.plant(monkeypatch, there_and_back)
    assert draw(family, do_sample=True).tolist() == reference(family, True)


@FAMILIES
def test_a_row_alone_is_the_row_in_a_batch(family):
    for row in range(3):
        decoder = Decoder(Jacobi(6))
        assert (
            draw(family, decoder, (row,), do_sample=True)[0].tolist()
            == reference(family, True)[row]
        )


@FAMILIES
def test_rows_are_named_by_what_they_draw_and_equal_ones_differ(family):
    rows = (1, 0, 1) if family != "imagegpt" else (0, 1, 2)
    found = draw(family, rows=rows, do_sample=True, request=None).tolist()
    other = draw(family, rows=rows[::-1][:2], do_sample=True, request=None).tolist()
    assert found[:2] == other[:2] and found[0] != found[2]


@pytest.mark.parametrize("family", ["emu3", "chameleon"])
def test_codes_are_what_the_model_calls_the_tokens(family):
    model, options = image_model(family), {"sampling": SAMPLING, "seed": SEED}
    found = generate(model, **conditions(family), **options)
    ids = found.tokens + first_of(family)
    if family == "emu3":
        rows, columns = GRID
        ids = ids[:, :-3].view(-1, rows, columns + 1)[..., :-1]
    named = model.model.vocabulary_mapping.bpe2img
    assert found.codes.flatten().tolist() == [named[token] for token in ids.flatten().tolist()]


# Other people's loops


@pytest.mark.skipif(
    version("transformers").startswith("5.17."),
    reason="image generation of Janus raises a TypeError in transformers 5.17",
)
def test_janus_draws_as_its_own_generate():
    given = conditions("janus")
    own = image_model("janus").generate(
        **given, generation_mode="image", guidance_scale=2.5, do_sample=False, max_length=64
    )
    assert draw("janus", Decoder(Jacobi(8))).tolist() == own.tolist()


def test_emu3_draws_as_its_own_generate():
    given = conditions("emu3")
    given.pop("grid")
    codes = list(range(FIRST, FIRST + CODES))
    rows, columns = GRID

    def grammar(_, ids):
        index = len(ids) - 1 - ids.tolist().index(STARTS)
        return (torch.arange(FIRST + CODES - ENDS)[allowed("emu3", index)] + ENDS).tolist()

    negative = rows_of_ids([[BEGINS, 12, 33, *opening("emu3")]] * 3)
    own = image_model("emu3").generate(
        **given,
        prefix_allowed_tokens_fn=grammar,
        guidance_scale=2.5,
        negative_prompt_ids=negative["input_ids"],
        negative_prompt_attention_mask=negative["attention_mask"],
        do_sample=False,
        max_new_tokens=rows * (columns + 1) + 3,
        eos_token_id=None,
    )
    found = draw("emu3", Decoder(Jacobi(8)), negative_prompt_ids=negative["input_ids"][:1])
    assert (found + ENDS).tolist() == own[:, given["input_ids"].shape[1] :].tolist()
    assert set(found.flatten().tolist()) & {c - ENDS for c in codes}
    assert found.tolist() != reference("emu3", False), "the negative prompt was not read"


@pytest.mark.parametrize("draft", ["plain", "window", "itself"])
def test_llamagen_draws_the_golden_codes(draft):
    cases = json.loads((GOLDEN / "config.json").read_text())
    classes = llamagen_model.load_published(GOLDEN / "gpt_c2i_model.pt", grid_size=4, num_heads=3)
    captions = llamagen_model.load_published(GOLDEN / "gpt_t2i_model.pt", grid_size=3, num_heads=2)
    tokenizer = vq.load_published(GOLDEN / "vq.pt")
    for name, model, given, case, guidance in (
        ("c2i", classes, {}, "greedy_nocfg", 1),
        ("c2i", classes, {}, "greedy_cfg", None),
        ("c2i", classes, {}, "greedy_cfg_interval", 5),
        ("t2i", captions, {"masked": True}, "greedy_nocfg", 1),
        ("t2i", captions, {"masked": True}, "greedy_cfg", None),
        ("t2i", captions, {"masked": False}, "greedy_cfg_nomask", None),
    ):
        io, scale = load_file(GOLDEN / f"{name}_io.safetensors"), cases[name]["cases"]["cfg_scale"]
        guidance = guidance or scale
        if case == "greedy_cfg_interval":
            guidance = Guidance(scale, until=guidance + 1)
        if name == "c2i":
            given = {"classes": io["full.in.cond"].tolist(), "vq": tokenizer}
        elif given["masked"]:
            given = {"features": io["pad.in.caption_embs"], "mask": io["pad.in.emb_masks"]}
        else:
            given = {"features": io["full.in.caption"]}
        drafts = {"plain": None, "window": Jacobi(8), "itself": Assistant(model, 4)}
        decoder = Decoder(drafts[draft])
        found = generate(model, decoder=decoder, guidance=guidance, do_sample=False, **given)
        assert found.tokens.tolist() == io[f"{case}.out.codes"].tolist(), case
        if case == "greedy_cfg" and name == "c2i":
            pixels = ((io["image.out.image"] + 1) / 2).clamp(0, 1)
            torch.testing.assert_close(found.pixels(), pixels, atol=1e-4, rtol=0.0)


# Caches


@FAMILIES
def test_keys_after_rejected_windows_are_those_of_a_fresh_pass(family, monkeypatch):
    kept = []
    seams.KEEP.plant(
        monkeypatch, lambda keep: lambda self, *args: (keep(self, *args), kept.append(self))[0]
    )
    adapters = []
    begin = Jacobi.begin
    monkeypatch.setattr(
        Jacobi, "begin", lambda self, call, *a: (adapters.append(call), begin(self, call, *a))[1]
    )
    tokens = draw(family, Decoder(Jacobi(6, siblings=2)), do_sample=True)
    branches, call = kept[-1], adapters[-1]
    fresh = ModelRunner(branches.adapter, branches.specs)
    call.rows.length.zero_()
    with torch.no_grad():
        fresh.prefill(call, {})
        block, repeat = tokens[:, :-1], len(branches.specs)
        visible = bucket(fresh.width + block.shape[1])
        fresh.run(block.repeat(repeat, 1), *chain(block.shape[1], "cpu"), visible=visible)
    end = fresh.width + block.shape[1]
    assert branches.cache.start.tolist() == [end] * len(fresh.pads)
    for mine, theirs in zip(branches.cache.layers, fresh.cache.layers, strict=True):
        for row, pad in enumerate(fresh.pads.tolist()):
            for name in ("keys", "values"):
                found, expected = (getattr(x, name)[row, :, pad:end] for x in (mine, theirs))
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# Mutants: what is checked above would notice


def fails(family, do_sample=True):
    """Whether drawing differs from the family's own."""
    found = [draw(family, Decoder(d), do_sample=do_sample).tolist() for d in (None, Jacobi(6))]
    expected = reference(family, do_sample)
    return all(rows != expected for rows in found)


@FAMILIES
def test_mutant_positions_off_by_one(family, monkeypatch):
    if family.startswith("llamagen"):
        cls = LlamaGenAdapter
    else:
        cls = type(registry.image_adapter_for(image_model(family), **options_of(family)))
    forward = cls.forward
    monkeypatch.setattr(
        cls,
        "forward",
        lambda self, tokens, mask, positions, past: forward(
            self, tokens, mask, (positions - 1).clamp_min(0), past
        ),
    )
    assert fails(family)


def options_of(family):
    return {"grid": GRID} if family == "emu3" else {}


@pytest.mark.parametrize("family", GUIDED)
def test_mutant_unconditional_rows_of_other_tokens(family, monkeypatch):
    def other_tokens(run):
        def ran(self, tokens, *args, prompt=None, **options):
            if prompt is None:
                tokens = torch.cat([tokens[:3], tokens[3:].roll(1, 0)])
            return run(self, tokens, *args, prompt=prompt, **options)

        return ran

    seams.RUN_BRANCHES.plant(monkeypatch, other_tokens)
    assert fails(family)


def test_mutant_padding_counted_in_captions(monkeypatch):
    monkeypatch.setattr(
        LlamaGenAdapter,
        "open",
        lambda self, cache, prompt: LlamaGenPast(cache, torch.zeros_like(prompt.ids[:, :1])),
    )
    assert fails("llamagen_captions")


def test_mutant_grammar_off_by_one(monkeypatch):
    at_nodes = Grammar.at_nodes

    def later(self, scores, nodes):
        nodes.prefix_length = nodes.prefix_length + 1
        return at_nodes(self, scores, nodes)

    monkeypatch.setattr(Grammar, "at_nodes", later)
    with pytest.raises(ShapeError):  # codes are at the wrong positions
        draw("emu3")


def test_mutant_caption_without_its_mask(monkeypatch):
    condition_prompt = LlamaGenAdapter.condition_prompt

    def unmasked(self, inputs, nothing):
        inputs = {**inputs, "slot_mask": torch.ones_like(inputs["slot_mask"])}
        return condition_prompt(self, inputs, nothing)

    monkeypatch.setattr(LlamaGenAdapter, "condition_prompt", unmasked)
    assert fails("llamagen_captions")

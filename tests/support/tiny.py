"""Tiny random models, what plain `generate` makes of them, and drafts that get far into them."""

import functools

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GenerationConfig,
    LlamaConfig,
    LogitsProcessor,
    MistralConfig,
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    MoonshineStreamingConfig,
    MoonshineStreamingForConditionalGeneration,
    Qwen2Config,
    Qwen3Config,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from mmdecode import registry
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.medusa import Medusa
from mmdecode.draft.medusa_heads import MedusaHeads
from mmdecode.draft.none import NoDraft
from mmdecode.engine.proposal import Proposal
from mmdecode.testing import drafts
from tests.support.traced import Traced

VOCAB, WIDTH, NEW = 80, 32, 14
SPECIAL = {"eos": 60, "sot": 61, "en": 62, "de": 63, "transcribe": 64, "translate": 65}
NO_TIMESTAMPS = 67  # timestamps follow
ALWAYS_SUPPRESSED = [2, 5, *range(61, 67)]


WINDOW = 4  # less than any prompt and what follows it
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}
TEXT_CONFIGS = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen2_mixed": (Qwen2Config, {"use_sliding_window": True, **MIXED}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "gemma": (GemmaConfig, {"head_dim": 8}),
    "gemma2": (
        Gemma2Config,
        {**GEMMA, **MIXED, "final_logit_softcapping": 6.0, "attn_logit_softcapping": 3.0},
    ),
    "gemma3": (Gemma3TextConfig, {**GEMMA, **MIXED}),
}


@functools.cache
def text_model(family, attention="sdpa", seed=0, layers=2):
    """Weights large enough that the output does not settle on one token."""
    cls, options = TEXT_CONFIGS[family]
    options = dict(options)
    if "layer_types" in options:
        options["layer_types"] = options["layer_types"][:layers]
    if options.get("attn_logit_softcapping"):
        attention = "eager"  # transformers caps attention in no other
    config = cls(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **options,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@functools.cache
def whisper_model(attention="sdpa", seed=2, layers=2, multilingual=True):
    """With all the ids that Whisper's own `generate` asks for."""
    config = WhisperConfig(
        vocab_size=100,
        d_model=WIDTH,
        num_mel_bins=8,
        encoder_layers=1,
        decoder_layers=layers,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=20,
        max_target_positions=64,
        init_std=0.4,
        pad_token_id=SPECIAL["eos"],
        bos_token_id=SPECIAL["eos"],
        eos_token_id=SPECIAL["eos"],
        decoder_start_token_id=SPECIAL["sot"],
        begin_suppress_tokens=None,
        suppress_tokens=None,
    )
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config).eval()
    model.generation_config = GenerationConfig(
        is_multilingual=multilingual,
        lang_to_id={"<|en|>": SPECIAL["en"], "<|de|>": SPECIAL["de"]},
        task_to_id={"transcribe": SPECIAL["transcribe"], "translate": SPECIAL["translate"]},
        no_timestamps_token_id=NO_TIMESTAMPS,
        max_initial_timestamp_index=10,
        # timestamps too: a stray one at zero would let transformers repeat a window for ever
        suppress_tokens=[*ALWAYS_SUPPRESSED, *range(NO_TIMESTAMPS, 100)],
        begin_suppress_tokens=[1, SPECIAL["eos"]],
        decoder_start_token_id=SPECIAL["sot"],
        pad_token_id=SPECIAL["eos"],
        eos_token_id=SPECIAL["eos"],
        bos_token_id=SPECIAL["eos"],
        return_timestamps=False,
    )
    return model


@functools.cache
def moonshine_model(attention="sdpa", seed=3, layers=2, width=WIDTH, multiple=None):
    """Of each head's dimensions 14 of 16 are rotated; of width 36, 16 of 18, as the real 32 of 36.

    ``multiple``: what a head's width is padded to, 8 in the real one.
    """
    config = MoonshineConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=48,
        encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=layers,
        encoder_num_attention_heads=2,
        decoder_num_attention_heads=2,
        partial_rotary_factor=0.9,
        pad_head_dim_to_multiple_of=multiple,
        max_position_embeddings=32,
        initializer_range=0.4,
        pad_token_id=0,
        eos_token_id=None,
    )
    config._attn_implementation = attention
    torch.manual_seed(seed)
    return MoonshineForConditionalGeneration(config).eval()


@functools.cache
def moonshine_streaming_model(attention="sdpa", seed=10, layers=2, width=WIDTH, multiple=None):
    """Encoder of width 24, so that its states are projected; ``multiple`` as in Moonshine."""
    config = MoonshineStreamingConfig(
        encoder_config={
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "sliding_windows": [[4, 3], [3, 0]],
            "initializer_range": 0.4,
        },
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,  # no field of the config, but the model reads it
        pad_head_dim_to_multiple_of=multiple,
        max_position_embeddings=128,
        initializer_range=0.4,
        pad_token_id=0,
        eos_token_id=None,
    )
    config._attn_implementation = attention
    torch.manual_seed(seed)
    return MoonshineStreamingForConditionalGeneration(config).eval()


MODELS = {
    "whisper": whisper_model,
    "moonshine": moonshine_model,
    "moonshine_padded": functools.partial(moonshine_model, width=36, multiple=8),
    "moonshine_streaming": moonshine_streaming_model,
    "moonshine_streaming_padded": functools.partial(
        moonshine_streaming_model, seed=13, width=36, multiple=8
    ),
}


def model_of(family, attention="sdpa"):
    return MODELS[family](attention) if family in MODELS else text_model(family, attention)


def small_of(family):
    """A smaller model with the same vocabulary."""
    options = {"seed": 9, "layers": 1}
    return MODELS[family](**options) if family in MODELS else text_model(family, **options)


def prompts(batch, seed=1):
    """Left-padded prompts of uneven length; token 0 is padding and an ordinary token too."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [7, 3, 9, 5][:batch]
    ids = torch.zeros(batch, max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(VOCAB, (length,), generator=generator)
        mask[row, -length:] = 1
    ids[0, -2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def audio(batch, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {"input_features": torch.randn(batch, 8, 40, generator=generator)}


def waves(batch, seed=1):
    """Samples of uneven length, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [6000, 1800, 4000, 2900][:batch]
    samples = torch.randn(batch, max(lengths), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_values": samples * mask, "attention_mask": mask.long()}


def inputs_of(family, batch):
    if family.startswith("moonshine"):
        return waves(batch)
    if family == "whisper":
        return {**audio(batch), "language": "en", "task": "transcribe"}
    return prompts(batch)


class PrefixBias(LogitsProcessor):
    """Adds noise that depends on every id of the prefix and on its length."""

    def __call__(self, input_ids, scores):
        order = torch.arange(1, input_ids.shape[1] + 1)
        key = (input_ids * order).sum(1, keepdim=True) + 7 * input_ids.shape[1]
        return scores + 4 * torch.sin(key * 0.37 + torch.arange(scores.shape[1]) * 1.3)


def allowed(row, ids):
    """Two thirds of the vocabulary, another part for each row and last token."""
    return [token for token in range(60) if (token + int(ids[-1]) + row) % 3]


PROCESSORS = {
    "no_processor": dict,
    "penalties": lambda: {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "prefix_bias": lambda: {"logits_processor": [PrefixBias()]},
    "prefix_allowed": lambda: {"prefix_allowed_tokens_fn": allowed},
    "bad_words": lambda: {"bad_words_ids": [[3], [17], [4, 5], [*range(6, 8)]]},
}


def plain(family, attention="sdpa", batch=3, processors="no_processor", **options):
    """What transformers generates greedily without us."""
    options = {"max_new_tokens": NEW, **PROCESSORS[processors](), **options}
    return model_of(family, attention).generate(
        **inputs_of(family, batch), do_sample=False, **options
    )


def ours(decoder, family, attention="sdpa", batch=3, processors="no_processor", **options):
    """The same through a decoder."""
    return plain(family, attention, batch, processors, custom_generate=decoder, **options)


def generated(trace):
    """Rows of a trace: the tokens that each committed."""
    return [[token for r in row for token in (*r.accepted, r.decided)[: r.kept]] for row in trace]


def undrafted_rows(family, **options):
    """What our own loop commits without a draft, per row."""
    decoder = Traced()
    ours(decoder, family, **options)
    return generated(decoder.trace)


@functools.cache
def reference(family, options):
    """Plain output and the rows to draft from, computed once; ``options`` as sorted items."""
    expected, rows = plain(family, **dict(options)), undrafted_rows(family, **dict(options))
    assert len({token for row in rows for token in row}) >= 8, "the model repeats itself too much"
    return expected, rows


class HiddenPath(drafts.Known):
    """A tree for each row and round in which the right tokens hang after wrong siblings.

    Levels have three siblings, the right one at a random place, each a child of the right one
    above; so what is accepted is rarely in consecutive slots.
    """

    def __init__(self, rows, length=3, seed=0):
        super().__init__(rows, length)
        self.generator = torch.Generator().manual_seed(seed)

    def draft(self, call, budget):
        right = super().draft(call, budget).tokens
        tokens, parents = [], []
        for row in right.tolist():
            nodes, above, parent = [], [], -1
            for token in row:
                choice = int(torch.randint(3, (), generator=self.generator))
                for sibling in range(3):
                    other = (token + 1 + sibling) % self.vocab
                    nodes.append(token if sibling == choice else other)
                    above.append(parent)
                parent = len(nodes) - 3 + choice
            broken = row.index(-1) * 3 if -1 in row else len(nodes)
            tokens.append(nodes[:broken] + [-1] * (len(nodes) - broken))
            parents.append(above)
        return Proposal(
            tokens=torch.tensor(tokens), kind="deterministic", parents=torch.tensor(parents)
        )


def random_heads(count=3, layers=1, own_outputs=False, vocab=VOCAB, seed=4, vocabulary=None):
    torch.manual_seed(seed)
    some = None if vocabulary is None else torch.tensor([*vocabulary])
    heads = MedusaHeads(count, layers, WIDTH, vocab if own_outputs else None, some)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads


def random_block(family="whisper"):
    config = model_of(family).config
    torch.manual_seed(6)
    layer = registry.adapter_class(config.model_type).extra_layer(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 3), (0, 0, 0), (1, 0, 2)]

DRAFTS = {
    "none": lambda family, rows: NoDraft(),
    "lookup": lambda family, rows: PromptLookup(length=5),
    "assistant": lambda family, rows: Assistant(small_of(family), length=3),
    "assistant_is_target": lambda family, rows: Assistant(model_of(family), length=3),
    "medusa_chain": lambda family, rows: Medusa(random_heads()),
    "medusa_tree": lambda family, rows: Medusa(random_heads(layers=2), paths=TREE),
    "layer_skip": lambda family, rows: LayerSkip(exit_layer=1, length=3),
    "known": lambda family, rows: drafts.Known(rows, length=4, wrong_at=[2, 9]),
    "known_tree": lambda family, rows: HiddenPath(rows),
    "random_trees": lambda family, rows: drafts.RandomTrees(),
}
TEXT_DRAFTS = {
    **DRAFTS,
    "medusa_own_outputs": lambda family, rows: Medusa(random_heads(own_outputs=True), paths=TREE),
}
WHISPER_DRAFTS = {
    **DRAFTS,
    "first_layer_skipped": lambda family, rows: LayerSkip(skip=[0], length=3),
    "medusa_block": lambda family, rows: Medusa(random_heads(), random_block()),
    "medusa_block_tree": lambda family, rows: Medusa(random_heads(), random_block(), TREE),
}


MOONSHINE_DRAFTS = {
    **DRAFTS,
    "first_layer_skipped": lambda family, rows: LayerSkip(skip=[0], length=3),
    "lookahead": lambda family, rows: registry.create("draft", "lookahead"),
    "recycling": lambda family, rows: registry.create("draft", "recycling"),
    "medusa_block_some": lambda family, rows: Medusa(
        random_heads(vocabulary=range(0, VOCAB, 3)), random_block(family), TREE
    ),
}
TABLES = {"whisper": WHISPER_DRAFTS, "moonshine": MOONSHINE_DRAFTS}


class DifferentError(AssertionError):
    """A decoder generated something else than `generate`."""


def assert_same(family, draft, **options):
    """Asserts that a decoder with the named draft generates what `generate` does."""
    expected, rows = reference(family, tuple(sorted(options.items())))
    table = TABLES.get(family.split("_")[0], TEXT_DRAFTS)
    decoder = Traced(table[draft](family, rows))
    assert_generates(decoder, draft, lambda: ours(decoder, family, **options), expected)
    return decoder


def assert_generates(decoder, draft, call, expected):
    """Asserts what `call` generates, and that a draft that is mostly right was accepted."""
    found = call()
    if found.tolist() != expected.tolist():
        raise DifferentError(f"{found.tolist()} instead of {expected.tolist()}")
    if draft in ("known", "known_tree", "assistant_is_target"):
        assert decoder.stats.accepted > 0

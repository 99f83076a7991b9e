"""Every setting and argument of ``generate``: honoured, without effect, or refused with a hint."""

import functools
import inspect
import re
import threading

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    TextIteratorStreamer,
    WatermarkingConfig,
)

from mmdecode.decoder import Decoder
from mmdecode.engine.checks import refuse_settings
from mmdecode.engine.settings import ARGUMENTS, SETTINGS, Refused
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.testing.drafts import RandomTrees
from tests.support import tiny_models
from tests.support.tiny import VOCAB, audio, text_model, whisper_model

IDS = torch.randint(1, 60, (2, 6), generator=torch.Generator().manual_seed(4))
NEW = 8
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
ONE = {"do_sample": True, "top_k": 1}  # the only token left is sampled


def generate(decoder=None, ids=IDS, model=None, **options):
    model = model or text_model("llama")
    options = {**GREEDY, "attention_mask": torch.ones_like(ids), **options}
    return model.generate(ids, custom_generate=decoder, **options)


# The tables

OF_RECORDS = {"transformers_version", "_from_model_config", "_commit_hash"}


def test_the_table_has_every_field_of_a_generation_config_and_no_other():
    fields = set(vars(GenerationConfig()))
    assert fields <= set(SETTINGS)
    assert set(SETTINGS) - fields <= OF_RECORDS


def test_every_argument_of_generate_is_in_the_table():
    named = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    parts = (GenerationMixin.generate, GenerationMixin._extract_generation_mode_kwargs)
    source = "".join(map(inspect.getsource, parts))
    taken = set(re.findall(r'\bkwargs\.pop\("(\w+)"', source))
    assert {"tokenizer", "assistant_tokenizer"} <= taken
    assert named | taken <= set(ARGUMENTS)


HONOURED = {
    "max_length": {"max_length": 9, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 3},
    "min_length": {"min_length": 12, "eos_token_id": 7},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": 7},
    "max_time": {"max_time": 1e4},
    "do_sample": ONE,
    "temperature": {"do_sample": True, "temperature": 1e-5},
    "top_k": ONE,
    "top_p": {"do_sample": True, "top_p": 1e-6},
    "min_p": {"do_sample": True, "min_p": 1.0},
    "top_h": {"do_sample": True, "top_h": 1e-6},
    "typical_p": {"do_sample": True, "typical_p": 1e-6},
    "epsilon_cutoff": {"do_sample": True, "epsilon_cutoff": 0.99},
    "eta_cutoff": {"do_sample": True, "eta_cutoff": 0.99, "temperature": 0.05},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[i] for i in range(1, 40)]},
    "renormalize_logits": {"renormalize_logits": True, "no_repeat_ngram_size": 1},
    "forced_bos_token_id": {"forced_bos_token_id": 5, "ids": IDS[:, :1]},
    "forced_eos_token_id": {"forced_eos_token_id": 5},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (2, 9.0),
        "eos_token_id": 7,
    },
    "suppress_tokens": {"suppress_tokens": list(range(1, 40))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(1, 40))},
    "sequence_bias": {"sequence_bias": [[[9], 50.0]]},
    "guidance_scale": {"guidance_scale": 2.0},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=20.0)},
    "num_return_sequences": {"num_return_sequences": 2, **ONE},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "return_dict_in_generate": {"return_dict_in_generate": True},
    "pad_token_id": {"pad_token_id": 3, "eos_token_id": 7},
    "bos_token_id": {"bos_token_id": 3},
    "eos_token_id": {"eos_token_id": list(range(1, 70, 2))},
    "decoder_start_token_id": {"decoder_start_token_id": 3},
}
WITHOUT_EFFECT = {
    "early_stopping": True,
    "diversity_penalty": 0.5,
    "length_penalty": 2.0,
    "cache_config": {"nbits": 4},
    "max_cache_len": 40,
    "compile_config": None,
    "disable_compile": True,
    "continuous_batching_config": None,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.1,
    "max_matching_ngram_size": 3,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "assistant_ensemble_weight": 0.5,
}
REFUSED = {
    "num_beams": (3, "search with beams"),
    "num_beam_groups": (2, "groups beams"),
    "constraints": ([object()], "under constraints"),
    "force_words_ids": ([[5]], "these words"),
    "penalty_alpha": (0.6, "drop penalty_alpha"),
    "dola_layers": ("high", "drop dola_layers"),
    "low_memory": (True, "contrastive search"),
    "use_cache": (False, "leave use_cache out"),
    "cache_implementation": ("offloaded", "one of its own"),
    "prefill_chunk_size": (4, "in one pass"),
    "token_healing": (True, "model.heal_tokens"),
    "output_attentions": (True, "forward pass over the result"),
    "output_hidden_states": (True, "forward pass over the result"),
    "use_mtp": (True, "mmdecode methods draft"),
    "prompt_lookup_num_tokens": (4, "draft='lookup"),
    "assistant_early_exit": (1, "draft='layer_skip'"),
    "is_assistant": (True, "leave it out"),
    "speculation_type": ("dflash", "mmdecode methods draft"),
}


def test_every_verdict_is_tested():
    assert set(REFUSED) == {n for n, v in SETTINGS.items() if isinstance(v, Refused)}
    assert set(WITHOUT_EFFECT) | OF_RECORDS == {n for n, v in SETTINGS.items() if v == "no effect"}
    assert set(HONOURED) | {"stop_strings"} == {n for n, v in SETTINGS.items() if v == "honoured"}


@pytest.mark.parametrize("name", HONOURED)
def test_an_honoured_setting_changes_what_it_changes_in_plain_generate(name):
    options = HONOURED[name]
    expected, found = generate(**options), generate(Decoder(RandomTrees()), **options)
    if not options.get("return_dict_in_generate"):
        assert found.tolist() == expected.tolist()
        return
    assert found.sequences.tolist() == expected.sequences.tolist()
    for field in ("scores", "logits"):
        if expected.get(field) is None:
            assert found.get(field) is None
        else:
            assert torch.allclose(
                torch.stack(found[field]), torch.stack(expected[field]), atol=1e-4
            )


@pytest.mark.filterwarnings("ignore:Passing ContinuousBatchingConfig:FutureWarning")
@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_setting_without_effect_has_none_in_plain_generate_either(name):
    option = {name: WITHOUT_EFFECT[name]}
    assert generate().tolist() == generate(**option).tolist()
    assert generate(Decoder(), **option).tolist() == generate().tolist()


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_cannot_be_honoured_is_refused_with_a_hint(name):
    value, hint = REFUSED[name]
    with pytest.raises(IncompatibleError, match=f"(?s){name}.*{hint}"):
        if name in ("cache_implementation", "is_assistant"):  # generate wants a GPU, an assistant
            refuse_settings(GenerationConfig(**{name: value}))
        generate(Decoder(), **{name: value})


@pytest.mark.parametrize(
    "option",
    [
        {"num_beams": 1},
        {"low_memory": False},
        {"penalty_alpha": 0.0},
        {"use_cache": True},
        {"cache_implementation": "static"},
        {"token_healing": False},
        {"force_words_ids": None},
    ],
    ids=str,
)
def test_a_neutral_value_is_not_refused(option):
    assert generate(Decoder(), **option).tolist() == generate().tolist()


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ({"assistant_model": text_model("llama")}, "Decoder(draft=mmdecode.draft.Assistant("),
        ({"synced_gpus": True}, "decode with plain generate"),
        ({"position_ids": torch.arange(6).expand(2, -1) + 3}, "from the attention mask"),
    ],
    ids=["assistant_model", "synced_gpus", "position_ids"],
)
def test_an_argument_that_generate_drops_is_refused_with_a_hint(option, hint):
    with pytest.raises(IncompatibleError, match=re.escape(hint)):
        generate(Decoder(), **option)
    wrapped = functools.partial(Decoder(), mm_request=["a", "b"])
    with pytest.raises(IncompatibleError, match=re.escape(hint)):
        generate(wrapped, **option)


# Streamers


def character_tokenizer():
    """One printable character for each id of the tiny models."""
    tokenizer = Tokenizer(models.BPE({chr(33 + i): i for i in range(VOCAB)}, [], unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def read(decoder, **options):
    """What a reader in a thread of its own gets of a call, and the error that it ended with."""
    streamer = TextIteratorStreamer(character_tokenizer())
    parts, failed = [], []
    reader = threading.Thread(target=lambda: parts.extend(streamer), daemon=True)
    reader.start()
    try:
        generate(decoder, ids=IDS[:1], streamer=streamer, **options)
    except Exception as error:
        failed.append(error)
    reader.join(timeout=20)
    assert not reader.is_alive(), "the streamer was never ended"
    return "".join(parts), failed


def test_a_reader_of_a_streamer_gets_the_text_of_plain_generate_and_an_end():
    expected = read(None)
    assert len(expected[0]) == 6 + NEW and not expected[1]
    assert read(Decoder()) == expected
    assert read(Decoder(RandomTrees())) == expected
    assert read(functools.partial(Decoder(), mm_request=["a"])) == expected


class Broken(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"stopping_criteria": [Broken()]}, RuntimeError),
        ({"force_words_ids": [[5]]}, IncompatibleError),
        ({"assistant_model": text_model("llama")}, IncompatibleError),
        ({"stop_strings": "x"}, OptionError),
    ],
    ids=["a broken criterion", "refused", "an assistant", "no tokenizer"],
)
def test_a_reader_of_a_streamer_is_let_go_when_the_call_fails(options, error):
    _, failed = read(Decoder(), **options)
    assert [type(e) for e in failed] == [error]


class Collector:
    def __init__(self):
        self.tokens, self.ends = [], 0

    def put(self, value):
        self.tokens += value.reshape(-1).tolist()

    def end(self):
        self.ends += 1


def test_whisper_streams_too():
    features = audio(1)["input_features"]
    call = {"language": "en", "task": "transcribe", "max_new_tokens": 6}
    theirs, mine = Collector(), Collector()
    whisper_model().generate(features, streamer=theirs, **call)
    whisper_model().generate(features, streamer=mine, custom_generate=Decoder(), **call)
    assert mine.tokens == theirs.tokens
    assert mine.ends == theirs.ends == 1


# Stop strings


def test_stop_strings_with_a_tokenizer_end_rows_as_in_plain_generate():
    tokenizer = character_tokenizer()
    stop = tokenizer.decode(generate()[0, 9:11])
    call = {"stop_strings": [stop], "tokenizer": tokenizer, "eos_token_id": VOCAB + 1}
    expected = generate(**call)
    assert expected[0, 11:].tolist() == [0] * (expected.shape[1] - 11)
    for decoder in (Decoder(), Decoder(RandomTrees())):
        assert generate(decoder, **call).tolist() == expected.tolist()


def test_stop_strings_without_a_tokenizer_are_refused_with_a_hint():
    with pytest.raises(OptionError, match=r"mmdecode\.generate\(model.*tokenizer"):
        generate(Decoder(), stop_strings="x")


# Training mode


def gpt2():
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, pad_token_id=0)
    return GPT2LMHeadModel(config)


def tiny_llama(dropout):
    ends = {"vocab_size": VOCAB, "eos_token_id": None}
    return tiny_models.llama(**ends, num_hidden_layers=1, attention_dropout=dropout).train()


@pytest.mark.parametrize("model", [gpt2().train(), tiny_llama(0.1)], ids=["gpt2", "llama"])
def test_a_model_in_training_mode_is_refused_with_what_to_call(model):
    with pytest.raises(IncompatibleError, match=r"in training mode.*call model\.eval\(\)"):
        generate(Decoder(), model=model)
    model.eval()
    assert generate(Decoder(), model=model).tolist() == generate(model=model).tolist()


def test_training_mode_without_dropout_harms_nobody():
    model = tiny_llama(0.0)
    assert generate(Decoder(), model=model).tolist() == generate(model=model).tolist()
    model.model.gradient_checkpointing = True
    with pytest.raises(IncompatibleError, match=r"call model\.eval\(\)"):
        generate(Decoder(), model=model)


# Prompts that are not given as ids


def filled(cache):
    model = text_model("llama")
    model(IDS[:, :4], past_key_values=cache, use_cache=True)
    return cache


CONFIG = text_model("llama").config
CACHES = {
    "static": lambda: filled(StaticCache(config=CONFIG, max_cache_len=32)),
    "of the source alone": lambda: EncoderDecoderCache(DynamicCache(), filled(DynamicCache())),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_holds_tokens_is_refused_with_a_hint(name):
    with pytest.raises(IncompatibleError, match=r"hold tokens \(4\).*whole prompt.*as input_ids"):
        generate(Decoder(), past_key_values=CACHES[name]())


def test_an_empty_cache_is_none():
    for cache in (DynamicCache(config=CONFIG), StaticCache(config=CONFIG, max_cache_len=32)):
        assert generate(Decoder(), past_key_values=cache).tolist() == generate().tolist()


def test_a_prompt_of_embeddings_is_refused_with_a_hint_unless_its_ids_are_known():
    model = text_model("llama")
    embeds = model.get_input_embeddings()(IDS)
    options = {**GREEDY, "custom_generate": Decoder()}
    with pytest.raises(IncompatibleError, match=r"without ids.*pass input_ids"):
        model.generate(inputs_embeds=embeds, **options)
    found = model.generate(IDS, inputs_embeds=embeds, **options)
    assert found.tolist() == generate().tolist()


def test_names_of_a_caller_are_no_arguments_of_generate():
    def call(model, **kwargs):
        """Calls what is inside of the decorator of ``generate``, which has such a name too."""
        inner = inspect.unwrap(GenerationMixin.generate)
        with torch.no_grad():
            return inner(model, IDS, custom_generate=Decoder(), **GREEDY)

    found = call(text_model("llama"), tokenizer="mine", assistant_tokenizer="mine")
    assert found.tolist() == generate().tolist()

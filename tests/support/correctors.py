"""Tiny random language models with a tokenizer of bytes, lists, and what writes or marks texts."""

import functools

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn.functional import one_hot
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from mmdecode.asr.correction.corrector import Correction
from mmdecode.asr.correction.n_best_lists import NBestList
from mmdecode.asr.correction.transcripts import Corrected, ListCorrection
from mmdecode.asr.results import DecidedWord
from mmdecode.engine.contracts import Guide
from mmdecode.guide.fusion import Given
from tests.support import tiny_models

LISTS = [
    NBestList("a", ("the cat sat on a mat", "the cat sits on the mat", "a cat sat on a map")),
    NBestList("b", ("who goes there", "who goes their")),
    NBestList("c", ("it was formed by floyd soil liu", "it was formed by floyd soylu")),
    NBestList("d", ("yes",)),
    NBestList("e", ("i saw her duck", "i saw a duck", "i saw her dock", "eye saw her duck")),
]
TEMPLATE = "{best}\n{others}\n=\n"


@functools.cache
def tokenizer(ends=False):
    """One token a byte; with ``ends``, texts end with the end-of-sequence token, as T5's do."""
    byte_characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "</s>": 1} | {letter: n for n, letter in enumerate(byte_characters, 2)}
    built = Tokenizer(models.BPE(vocab, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    if ends:
        built.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=built, pad_token="<pad>", eos_token="</s>")


@functools.cache
def model(family, seed=2):
    """Weights large enough that what was read decides what is written."""
    torch.manual_seed(seed)
    vocab = len(tokenizer())
    ids = {"pad_token_id": 0, "eos_token_id": 1, "vocab_size": vocab}
    if family == "t5":
        config = T5Config(
            **ids, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=2,
            dropout_rate=0.0, decoder_start_token_id=0, initializer_factor=2.0,
        )  # fmt: skip
        built = T5ForConditionalGeneration(config)
    elif family == "bart":
        config = BartConfig(
            **ids, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=0.0,
            max_position_embeddings=160, decoder_start_token_id=0, bos_token_id=0,
            forced_eos_token_id=None, init_std=0.5,
        )  # fmt: skip
        built = BartForConditionalGeneration(config)
    else:
        built = tiny_models.llama(
            seed, **ids, hidden_size=16, intermediate_size=32, max_position_embeddings=256,
            bos_token_id=0, initializer_range=0.5,
        )  # fmt: skip
    return built.eval()


class Writes(Guide):
    """A guide under which each row generates a given text.

    Args:
        texts: By the row's first hypothesis, as ids with their end.
    """

    branches = ()
    neutral = False

    def __init__(self, texts):
        self.texts = texts

    def begin(self, call, prefill):
        rows = [self.texts[tuple(row[0])] for row in call.request.inputs["source_ids"]]
        width = call.request.max_new_tokens + 64
        return torch.tensor([[*row, *[row[-1]] * (width - len(row))] for row in rows])

    def apply(self, constants, call, proposal, outputs):
        logits = outputs["main"].logits
        depths = torch.nn.functional.pad(proposal.structure()[1], (1, 0))
        tokens = constants.gather(
            1, (call.rows.length[:, None] + depths).clamp_max(constants.shape[1] - 1)
        )
        return one_hot(tokens, logits.shape[-1]).log() + 0.0 * logits


class Marked(ListCorrection):
    """Puts a mark after the first hypothesis, and remembers what it was asked."""

    def __init__(self, batch_size=8):
        self.asked, self.size, self.batches = [], batch_size, []

    @property
    def count(self):
        return 3

    @property
    def batch_size(self):
        return self.size

    def __call__(self, lists, audio=None):
        self.asked += zip(lists, audio, strict=True)
        self.batches.append([one.id for one in lists])
        found = []
        for index, one in enumerate(lists):
            text = f"{one.best} indeed"
            words = [DecidedWord(text=word, by="both") for word in text.split()]
            correction = Correction(id=one.id, index=index, text=text, best=one.best, tokens=3)
            found.append(Corrected(correction=correction, words=words))
        return found


def given_of(processor, clips):
    """A Whisper's inputs in a fusion, for clips of a window."""
    ids = processor.tokenizer.convert_tokens_to_ids
    names = "<|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>".split()
    waves = [clip.samples() for clip in clips]
    features = processor.feature_extractor(waves, sampling_rate=16_000, return_tensors="pt")
    return [Given(features=one, prompt=tuple(ids(names))) for one in features.input_features]

"""`mmdecode.generate`: what a plain callable is not given by transformers."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StoppingCriteria

import mmdecode
from mmdecode.draft.lookup import PromptLookup
from mmdecode.engine.decoder import Decoder
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.testing.drafts import Known
from tests.conformance.tiny import NEW, VOCAB, plain, prompts, reference, small_of, text_model


def letters():
    """One printable character for each id of the tiny models."""
    vocabulary = {chr(33 + index): index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def generate(batch=1, decoder=None, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, **prompts(batch), **options}
    return mmdecode.generate(text_model("llama"), decoder=decoder, **options)


class Collector:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.tokens, self.blocks, self.ends = [], [], 0

    def put(self, value):
        self.blocks.append(value.reshape(-1).tolist())
        self.tokens += self.blocks[-1]

    def end(self):
        self.ends += 1


def test_without_a_decoder_it_is_plain_generate():
    assert generate(3).tolist() == plain("llama").tolist()


@pytest.mark.parametrize("draft", ["none", "known"])
def test_stop_strings_end_rows_where_generate_ends_them(draft):
    rows = reference("llama", (("batch", 4),))[1]
    tokenizer = letters()
    stops = [tokenizer.decode(rows[0][3:5]), tokenizer.decode(rows[2][6:7])]
    options = {"stop_strings": stops, "tokenizer": tokenizer, "pad_token_id": 0}
    options["eos_token_id"] = VOCAB + 1  # so that transformers pads rows that ended
    expected = plain("llama", batch=4, **options)
    decoder = Decoder(Known(rows)) if draft == "known" else None
    found = generate(4, decoder, **options)
    assert found.tolist() == expected.tolist()
    assert int((found[0, 9:] != 0).sum()) <= 5


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(OptionError, match="pass tokenizer"):
        generate(stop_strings="x")


@pytest.mark.parametrize("draft", [None, "known"])
def test_a_streamer_gets_the_tokens_that_generate_would_stream(draft):
    rows = reference("llama", (("batch", 1),))[1]
    theirs, mine = Collector(), Collector()
    options = {"eos_token_id": rows[0][10], "pad_token_id": 0}
    expected = plain("llama", batch=1, streamer=theirs, **options)
    generate(1, Decoder(Known(rows)) if draft else None, streamer=mine, **options)
    assert mine.tokens == theirs.tokens == expected[0].tolist()
    assert mine.ends == theirs.ends == 1
    assert draft is None or max(map(len, mine.blocks[1:])) > 2


class Broken(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        raise RuntimeError("broken")


def test_a_streamer_is_ended_when_decoding_fails():
    streamer = Collector()
    with pytest.raises(RuntimeError, match="broken"):
        generate(streamer=streamer, stopping_criteria=[Broken()])
    assert streamer.ends == 1


def test_a_streamer_is_ended_when_the_request_is_refused():
    streamer = Collector()
    with pytest.raises(IncompatibleError, match="num_beams"):
        generate(streamer=streamer, num_beams=2)
    assert streamer.ends == 1


def test_a_streamer_for_several_rows_is_refused():
    with pytest.raises(IncompatibleError, match="the batch has 2"):
        generate(2, streamer=Collector())


def test_a_draft_model_is_an_assistant():
    decoder = Decoder()
    found = generate(3, decoder, draft_model=small_of("llama"))
    assert found.tolist() == plain("llama").tolist()
    assert decoder.stats.drafted > 0
    with pytest.raises(IncompatibleError, match="one draft"):
        generate(3, Decoder(PromptLookup()), draft_model=small_of("llama"))


def test_request_names_decide_the_noise():
    ids = torch.tensor([[5, 6, 7], [5, 6, 7]])
    options = {"do_sample": True, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    decoder = Decoder(seed=1)
    first, second = generate(2, decoder, request=["a", "b"], **options).tolist()
    assert first != second
    assert generate(2, decoder, request=["b", "a"], **options).tolist() == [second, first]

"""Numbers per token by which a stream commits: against eager attention and passes of one row."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from mmdecode import Decoder
from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.asr.alignment import evidence as module
from mmdecode.asr.alignment.cross_attention import CrossAttention, cross_attention, every_head
from mmdecode.asr.alignment.evidence import KINDS, Evidence, frames_of
from mmdecode.asr.audio.reading import source_of
from mmdecode.asr.recognizers.base import Recognizer
from mmdecode.asr.recognizers.generic import GenericRecognizer, MaskedStates
from mmdecode.asr.recognizers.moonshine import MoonshineRecognizer
from mmdecode.asr.recognizers.whisper import WhisperRecognizer
from mmdecode.asr.transcriber import load
from mmdecode.draft.lookup import PromptLookup
from mmdecode.errors import OptionError, UnknownNameError
from mmdecode.zoo.real_clips import real_clips
from mmdecode.zoo.speech import speech_test
from tests.support.moonshine import NAME, needs_wheel
from tests.support.tiny_recognizers import MODELS

RATE = 16_000
HEADS = [[0, 1], [1, 0], [1, 1]]
SECONDS = (1.9, 0.7, 1.25)
SLOW = (needs_wheel, pytest.mark.slow)
FAMILIES = pytest.mark.parametrize("family", ["whisper", "moonshine"])


@pytest.fixture(scope="module")
def recognizers(kit, processor):
    """A tiny recogniser of each family; the first two name alignment heads."""
    whisper = kit.build_model(processor, scale=3.0)
    whisper.generation_config.alignment_heads = HEADS
    made = {
        "whisper": WhisperRecognizer(whisper, processor, TranscribeOptions()),
        "moonshine": MoonshineRecognizer(
            *MODELS["moonshine"](alignment_heads=HEADS), TranscribeOptions()
        ),
        "speech_to_text": GenericRecognizer(*MODELS["speech_to_text"](), TranscribeOptions()),
    }
    return made


@torch.no_grad()
def encoded_by(ours, kit, seconds=SECONDS):
    waves = [kit.noise(length, seed) for seed, length in enumerate(seconds)]
    return ours.encode(ours.features(waves), list(seconds))


def rows_of(family):
    """Prompts and tokens of three windows, all of other lengths."""
    if family == "whisper":
        return [[257, 258, 260], [256, 9, 257, 258, 260], [257, 258, 260]], [
            [300, 5, 6, 7],
            [9],
            [263, 8, 90],
        ]
    return [[0]] * 3, [[5, 6, 7, 20], [9], [8, 30]]


@torch.no_grad()
def eager_weights(ours, encoded, row, ids):
    """Cross-attention by layer of transformers' eager attention, for one row alone."""
    model = ours.model
    before = model.config._attn_implementation
    frames = frames_of(ours, encoded, row)[0]
    states = encoded.states[row : row + 1]
    if ours.capabilities.fixed_windows:
        audio = BaseModelOutput(last_hidden_state=states)
    else:
        audio = MaskedStates(last_hidden_state=states[:, :frames])
    model.set_attn_implementation("eager")
    try:
        found = model(
            encoder_outputs=audio,
            decoder_input_ids=torch.tensor([ids]),
            output_attentions=True,
            use_cache=False,
        ).cross_attentions
    finally:
        model.set_attn_implementation(before)
    return torch.stack([one[0] for one in found]), frames  # (layers, heads, L, S)


@pytest.mark.parametrize("mutant", [None, "scale", "shared keys"])
@FAMILIES
def test_recorded_weights_are_those_of_eager_attention(
    recognizers, kit, family, mutant, monkeypatch
):
    ours = recognizers[family]
    encoded = encoded_by(ours, kit)
    prompts, tokens = rows_of(family)
    heads = every_head(ours.model)
    assert len(heads) == 4
    attention = ours.model.get_decoder().layers[0].encoder_attn
    if mutant == "scale":
        monkeypatch.setattr(attention, "scaling", 0.5 * attention.scaling)
    ids = [[*p, *t] for p, t in zip(prompts, tokens, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in ids], batch_first=True)
    with torch.no_grad(), cross_attention(ours.model.get_decoder(), heads) as read:
        monkeypatch.undo()  # the model itself is sound
        ours.logits(padded, encoded)
    if mutant == "shared keys":
        read.keys = {layer: keys[:, :1] for layer, keys in read.keys.items()}
    for row, own in enumerate(ids):
        stock, frames = eager_weights(ours, encoded, row, own)
        stock = stock.flatten(0, 1)[..., :frames]
        stock = stock / stock.sum(-1, keepdim=True)
        same = torch.allclose(read.weights(row, frames)[:, : len(own)], stock, atol=1e-5)
        assert same == (mutant is None)


def test_query_heads_share_keys_as_in_repeated_keys():
    from transformers.models.moonshine.modeling_moonshine import repeat_kv

    torch.manual_seed(0)
    read = CrossAttention([(0, head) for head in range(4)])
    read.queries[0], read.keys[0] = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8)
    repeated = repeat_kv(read.keys[0], 2)
    expected = (read.queries[0] @ repeated.transpose(-1, -2)).softmax(-1)[0]
    torch.testing.assert_close(read.weights(0, 5), expected)


@FAMILIES
def test_attention_is_the_audio_after_the_frame_of_eager_attention(recognizers, kit, family):
    ours = recognizers[family]
    encoded = encoded_by(ours, kit)
    prompts, tokens = rows_of(family)
    found = Evidence(ours)(["attention"] * 3, prompts, tokens, encoded)
    seen = set()
    for row in range(3):
        stock, frames = eager_weights(ours, encoded, row, [*prompts[row], *tokens[row]])
        mean = sum(stock[layer][head] for layer, head in HEADS)[..., :frames]
        first = len(prompts[row]) - 1
        at = mean[first : first + len(tokens[row])].argmax(-1)
        frame_s = 0.04 if family == "whisper" else SECONDS[row] / frames
        assert frame_s == pytest.approx(0.04 if family == "whisper" else 384 / RATE, rel=0.1)
        assert 0 <= frames * frame_s - SECONDS[row] < frame_s + 1e-9
        assert found[row] == pytest.approx(((frames - at) * frame_s).tolist(), abs=1e-6)
        assert all(0 < value <= SECONDS[row] + 0.04 for value in found[row])
        seen.update(found[row])
    assert len(seen) > 3


@FAMILIES
def test_planted_attention_is_found_whatever_the_order_of_heads(
    recognizers, kit, family, monkeypatch
):
    ours = recognizers[family]
    encoded = encoded_by(ours, kit)
    prompts, tokens = rows_of(family)
    planted = [[3, 9, 12, 25], [2], [0, 25, 4][: len(tokens[2])]]

    def weights(self, row, frames):
        first = len(prompts[row]) - 1
        found = torch.full((len(self.heads), first + 9, frames), 0.01)
        for at, frame in enumerate(planted[row]):
            found[:, first + at, frame] = 1.0
        # one head looks elsewhere, less than the mean of all of them
        found[self.heads.index((1, 1)), first : first + len(planted[row]), 1] += 2.0
        return found

    monkeypatch.setattr(CrossAttention, "weights", weights)
    for order in itertools.permutations(HEADS):
        evidence = Evidence(ours)
        evidence.heads = [tuple(head) for head in order]
        found = evidence(["attention"] * 3, prompts, tokens, encoded)
        for row in range(3):
            frames, frame_s = frames_of(ours, encoded, row)
            expected = [(frames - frame) * frame_s for frame in planted[row]]
            assert found[row] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("family", ["whisper", "moonshine", "speech_to_text"])
def test_probabilities_are_those_of_a_pass_per_token(recognizers, kit, family):
    ours = recognizers[family]
    encoded = encoded_by(ours, kit)
    prompts, tokens = rows_of(family)
    if family == "speech_to_text":
        prompts = [[1]] * 3
    ending = Evidence(ours)(["ending"] * 3, prompts, tokens, encoded)
    confidence = Evidence(ours)(["confidence"] * 3, prompts, tokens, encoded)
    for row in range(3):
        alone = encoded.rows([row])
        if encoded.mask is not None:
            kept = alone.states[:, encoded.mask[row]]
            alone = dataclasses.replace(alone, states=kept, mask=None)
        for at, token in enumerate(tokens[row]):
            ids = torch.tensor([[*prompts[row], *tokens[row][: at + 1]]])
            with torch.no_grad():
                before = ours.logits(ids[:, :-1], alone)[0, -1].softmax(-1)
                after = ours.logits(ids, alone)[0, -1].softmax(-1)
            ends = [1]
            if family == "whisper":
                config = ours.config
                begin = config.no_timestamps_token_id + 1
                first = round((SECONDS[row] - 0.5) / 0.04 + 0.49)
                ends = [config.eos_token_id, *range(begin + first, begin + 51)]
            assert confidence[row][at] == pytest.approx(float(before[token]), abs=1e-5)
            assert ending[row][at] == pytest.approx(1 - float(after[ends].sum()), abs=1e-5)


def test_timestamps_of_the_last_half_second_end_a_text(recognizers):
    ours = recognizers["whisper"]
    begin, eos = ours.config.no_timestamps_token_id + 1, ours.config.eos_token_id
    text = ours.tokenizer.convert_ids_to_tokens
    assert [text(token) for token in ours.ends(1.0)[:3]] == [text(eos), "<|0.52|>", "<|0.56|>"]
    assert ours.ends(1.02)[1] == begin + 13 and ours.ends(1.021)[1] == begin + 14
    assert ours.ends(0.3)[1] == begin
    assert ours.ends(2.0)[-1] == begin + 50 == len(ours.tokenizer) - 1
    assert recognizers["moonshine"].ends(1.0) == [1]


@pytest.mark.parametrize("mutant", [None, "padding"])
@pytest.mark.parametrize("family", ["whisper", "moonshine", "speech_to_text"])
def test_a_row_has_the_numbers_that_it_has_alone(recognizers, kit, family, mutant, monkeypatch):
    ours = recognizers[family]
    prompts, tokens = rows_of(family)
    kinds = [kind for kind in KINDS if family != "speech_to_text" or kind != "attention"]
    evidence = Evidence(ours)
    alone = [
        [evidence([kind], [p], [t], encoded_by_itself(ours, kit, row))[0] for kind in kinds]
        for row, (p, t) in enumerate(zip(prompts, tokens, strict=True))
    ]
    if mutant:
        monkeypatch.setattr(
            module, "frames_of", lambda ours, encoded, row: (encoded.states.shape[1], 0.04)
        )
    encoded = encoded_by(ours, kit)
    same = True
    for turn in range(len(kinds)):
        mixed = [(row + turn) % len(kinds) for row in range(3)]  # rows of several kinds in a pass
        found = evidence([kinds[one] for one in mixed], prompts, tokens, encoded)
        for row, one in enumerate(mixed):
            assert len(found[row]) == len(tokens[row])
            same &= found[row] == pytest.approx(alone[row][one], abs=1e-5)
    assert same == (mutant is None or family == "speech_to_text")


def encoded_by_itself(ours, kit, row):
    with torch.no_grad():
        return ours.encode(ours.features([kit.noise(SECONDS[row], row)]), [SECONDS[row]])


@FAMILIES
def test_numbers_do_not_depend_on_the_draft(recognizers, kit, family):
    ours = recognizers[family]
    options = dataclasses.replace(ours.options, max_new_tokens=12)
    waves = [kit.noise(length, seed) for seed, length in enumerate(SECONDS)]
    found = []
    for draft in (None, PromptLookup(3, 1)):
        transcriber = Transcriber(ours.model, ours.processor, Decoder(draft, seed=0), options)
        own = transcriber.recognizer
        tokens = [transcript.tokens for transcript in transcriber(waves)]
        with torch.no_grad():
            encoded = own.encode(own.features(waves), SECONDS)
        language = ours.config.lang_to_id["<|en|>"] if family == "whisper" else None
        prompts = [own.prompt(language, [])] * 3
        found.append([Evidence(own)([kind] * 3, prompts, tokens, encoded) for kind in KINDS])
    assert found[0] == found[1]
    assert any(len(row) > 4 for row in found[0][0])


def test_windows_without_tokens_need_no_pass(recognizers, kit, monkeypatch):
    ours = recognizers["moonshine"]
    encoded = encoded_by(ours, kit)
    some = Evidence(ours)(["attention"] * 3, [[0]] * 3, [[], [5], []], encoded)
    assert [len(row) for row in some] == [0, 1, 0]
    monkeypatch.setattr(MoonshineRecognizer, "logits", None)
    assert Evidence(ours)(["ending"] * 3, [[0]] * 3, [[]] * 3, encoded) == [[], [], []]


def test_what_a_model_cannot_give_is_refused_before_any_audio(recognizers, model, processor):
    """The heads that word times fall back to are not named."""
    unnamed = Evidence(WhisperRecognizer(model, processor, TranscribeOptions()))
    for evidence in (unnamed, Evidence(recognizers["speech_to_text"])):
        name = evidence.recognizer.name
        with pytest.raises(OptionError, match=f"{name}.*mmdecode train alignment-heads"):
            evidence.check("attention")
        evidence.check("ending")
        evidence.check("confidence")
    for family in ("whisper", "moonshine"):
        Evidence(recognizers[family]).check("attention")
    with pytest.raises(UnknownNameError, match="attention"):
        unnamed.check("atention")
    bare = object.__new__(type("Bare", (Recognizer,), {}))
    bare.model = model
    with pytest.raises(OptionError, match="Bare defines no logits"):
        Evidence(bare).check("ending")


def test_a_pass_leaves_no_hooks(recognizers, kit, monkeypatch):
    ours = recognizers["whisper"]
    encoded = encoded_by(ours, kit)
    monkeypatch.setattr(ours, "logits", lambda ids, encoded: 1 / 0)
    before = hooks_of(ours)  # transformers leaves some where it returned attentions
    with pytest.raises(ZeroDivisionError):
        Evidence(ours)(["attention"] * 3, *rows_of("whisper"), encoded)
    assert hooks_of(ours) == before


def hooks_of(ours):
    return sum(len(part._forward_hooks) for part in ours.model.modules())


@pytest.mark.parametrize("name", ["zoo:whisper-synth", pytest.param(NAME, marks=SLOW)])
def test_a_trained_model_attends_to_what_it_writes(name):
    """Along the words of a clip, and near the end of the audio where the text ends."""
    model, processor = load(name, "cpu", None)
    ours = Transcriber(model, processor).recognizer
    if name == NAME:
        samples = real_clips()[0].samples()
    else:
        samples = next(clip for clip in speech_test() if 5 < clip.duration_s < 8).samples()
    tokens = Transcriber(model, processor)(samples).tokens
    seconds = len(samples) / RATE
    with torch.no_grad():
        encoded = ours.encode(ours.features([samples]), [seconds])
    language = ours.language_of(source_of({"audio": samples, "language": "en"}, RATE))
    prompt = [ours.prompt(language, [])]
    found = {kind: Evidence(ours)([kind], prompt, [tokens], encoded)[0] for kind in KINDS}
    kept = [at for at, token in enumerate(tokens) if ours.is_text(token)]
    found = {kind: [values[at] for at in kept] for kind, values in found.items()}
    after = np.array(found["attention"])
    order = np.corrcoef(after, np.arange(len(after)))[0, 1]
    assert len(after) > 8 and order < -0.85
    assert after[0] > seconds / 2 and after[-1] < 2.0
    assert found["ending"][-1] < 0.5 and min(found["ending"][:-3]) > 0.5
    assert np.median(found["confidence"]) > 0.5

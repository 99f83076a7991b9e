"""`check_recognizer`, which known mistakes fail, and plug-ins that bring a family of their own."""

import sys

import numpy as np
import pytest
import torch

from mmdecode import registry
from mmdecode.asr import Transcriber
from mmdecode.asr.recognizers.base import of_type
from mmdecode.asr.recognizers.causal_whisper import CausalWhisperRecognizer
from mmdecode.asr.recognizers.contract import Span
from mmdecode.asr.recognizers.generic import GenericRecognizer
from mmdecode.asr.recognizers.moonshine import MoonshineRecognizer
from mmdecode.asr.recognizers.whisper import WhisperRecognizer
from mmdecode.errors import MMDecodeError
from mmdecode.models.causal_whisper import window_features
from mmdecode.testing import check_recognizer
from tests.support.causal import causal_whisper, mel_of
from tests.support.plugins import install
from tests.support.tiny_recognizers import MODELS


class Short(MoonshineRecognizer):
    """Windows of two seconds, so that a check has little to decode."""

    window_s = 2.0


@pytest.fixture(scope="module")
def moonshine():
    return MODELS["moonshine"]()


def check(kind, parts):
    check_recognizer(lambda options: kind(*parts, options))


def test_moonshine_passes(moonshine):
    check(Short, moonshine)


@pytest.mark.slow
def test_whisper_and_the_generic_one_pass(model, processor):
    check(WhisperRecognizer, (model, processor))
    check(type("Short", (GenericRecognizer,), {"window_s": 2.0}), MODELS["speech_to_text"]())


@pytest.mark.slow
def test_the_causal_one_passes_next_to_generate_with_a_mask():
    model, processor = causal_whisper(8)

    def plain(samples):
        features = window_features(mel_of(model, processor), torch.from_numpy(samples))[None]
        mask = torch.ones(1, features.shape[2] - 1)  # the last frame is only context
        return model.generate(
            features, attention_mask=mask, return_timestamps=True, language="en", task="transcribe"
        )[0].tolist()

    check_recognizer(lambda options: CausalWhisperRecognizer(model, processor, options), plain)


class LosesTheRest(Short):
    def span(self, recording, seek, seams):
        span = super().span(recording, seek, seams)
        return Span(span.frames, recording.frames) if seek else span


class Gap(Short):
    def span(self, recording, seek, seams):
        span = super().span(recording, seek, seams)
        return Span(max(span.frames - 9, 1), span.following, span.joined)


class Overlaps(Short):
    def span(self, recording, seek, seams):
        return super().span(recording, seek, seams)._replace(joined=False)


class TooLong(Short):
    def span(self, recording, seek, seams):
        return Span(recording.frames - seek, recording.frames)


class HearsPadding(Short):
    def encode(self, windows, seconds):
        longest = max(one["input_values"].shape[1] for one in windows)
        windows = [
            {
                name: torch.nn.functional.pad(value, (0, longest - value.shape[1]))
                for name, value in one.items()
            }
            for one in windows
        ]
        return super().encode(windows, seconds)


class NoMask(Short):
    def encode(self, windows, seconds):
        encoded = super().encode(windows, seconds)
        return type(encoded)(encoded.inputs, encoded.seconds, encoded.states)


class EndIsText(Short):
    def text_tokens(self, tokens):
        return [token for token in tokens if token]


class PromptIsText(Short):
    def text(self, tokens):
        return self.tokenizer.decode(tokens)


class MoreThanItCan(Short):
    def refuse(self, options):
        pass


class Shortest(Short):
    def most_tokens(self, seconds):
        return max(1, 8 - int(seconds))


class OtherPrompt(Short):
    def prompt(self, language, context):
        return [7]


class OutsideWindow(Short):
    def split(self, tokens, whole, sequential):
        split = super().split(tokens, whole, sequential)
        return split._replace(segments=[(a, 9 * b, t) for a, b, t in split.segments])


class Loses(Short):
    def split(self, tokens, whole, sequential):
        return super().split(tokens[:-1], whole, sequential)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (LosesTheRest, "leaves no frame out"),
        (Gap, "leaves no frame out"),
        (Overlaps, "but joined is False"),
        (TooLong, "expected 1 to 32000"),
        (HearsPadding, "only windows of one length together|False for states of padding"),
        (NoMask, "must be False for states of padding"),
        (EndIsText, "are end or padding tokens"),
        (PromptIsText, "expected that text leaves these out"),
        (MoreThanItCan, "word_timestamps was not refused, but capabilities has no word_times"),
        (Shortest, "no smaller number"),
        (OutsideWindow, "a segment from 0.000"),
        (Loses, "by plain generate"),
    ],
)
def test_a_mistake_is_found_and_named(wrong, words, moonshine):
    with pytest.raises(AssertionError, match=words):
        check(wrong, moonshine)


def test_what_generate_says_may_be_given(moonshine):
    ours = lambda options: Short(*moonshine, options)  # noqa: E731
    with pytest.raises(AssertionError, match=r"gives \[.+\] through the loop, but \[5\] by plain"):
        check_recognizer(ours, plain=lambda samples: [5])


# ---- plug-ins


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """A distribution with a family of its own, one that cannot be loaded, and a taken name."""
    lines = "mine = strange_ears:Mine\nlost = strange_gone:Lost\nwhisper = strange_ears:Mine"
    install(
        tmp_path,
        "stranger",
        {"mmdecode.recognizers": lines},
        strange_ears="""
from mmdecode.asr.recognizers.generic import GenericRecognizer
class Mine(GenericRecognizer):
    "Windows of one second."
    model_types = ("speech_to_text", "moonshine")
    window_s = 1.0
""",
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("strange_ears", None)


def test_a_plugin_brings_a_family_and_a_broken_one_is_left_out(plugins):
    with pytest.warns(RuntimeWarning) as caught:
        ours = Transcriber(*MODELS["speech_to_text"]())
    messages = " ".join(str(one.message) for one in caught)
    assert "'whisper', which exists already" in messages
    assert type(ours.recognizer).__name__ == "Mine" and ours.window_s == 1.0
    found = ours(0.1 * np.random.default_rng(0).standard_normal(32_000))
    assert found.stats["windows"] > 1


def test_our_families_stay_ours_and_a_broken_plugin_is_named(plugins, moonshine):
    assert type(Transcriber(*moonshine).recognizer) is MoonshineRecognizer
    with pytest.warns(RuntimeWarning) as caught:
        assert of_type("speecht5") is GenericRecognizer
    assert any("'lost' of stranger" in str(one.message) for one in caught)
    with pytest.raises(MMDecodeError, match="uninstall stranger"):
        registry.resolve("recognizers", "lost")

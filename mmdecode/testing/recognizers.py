"""Checks that a recogniser implements the interface of `mmdecode.asr.recognizers.base`.

A recogniser connects a family of speech models to the transcription loop. `check_recognizer` is for
recognisers that you write, and raises AssertionError with the difference. It decodes short noise,
so that any model will do, even a tiny random one. ``tests/asr/test_check_recognizer.py`` has
recognisers with typical mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationMixin

from mmdecode.asr.audio.reading import source_of
from mmdecode.asr.decoding.long_form import LongForm
from mmdecode.asr.options import TranscribeOptions
from mmdecode.asr.recognizers.base import Recognizer
from mmdecode.asr.recognizers.contract import Encoded
from mmdecode.decoder import Decoder
from mmdecode.draft.lookup import PromptLookup
from mmdecode.errors import MMDecodeError, OptionError

TOLERANCE = 1e-4
"""Largest allowed difference of encoder states."""
BEYOND: dict[str, dict[str, Any]] = {
    "word_times": {"word_timestamps": True},
    "prompts": {"prompt": "a"},
    "silence": {"no_speech_threshold": 0.5, "logprob_threshold": -1.0},
    "languages": {"task": "translate"},
    "fixed_windows": {"padding": "silence"},
}
"""For each capability of a recogniser, options that need it."""


def check_recognizer(
    make: Callable[[TranscribeOptions], Recognizer],
    plain: Callable[[np.ndarray], Sequence[int]] | None = None,
) -> None:
    """Checks the properties of a recogniser that the transcription loop relies on.

    * Options that the model family does not support are refused, and the error names the option.
    * Windows cover every sample of a recording; none is empty or longer than ``window_frames``.
    * Encoder states and text of a window are the same alone and in a batch, and the text is the
      same with and without a draft. An encoder cache changes no states.
    * The text of a window is that of plain ``generate``, end and padding tokens are not text, and
      segments lie inside the recording.

    Args:
        make: Function from options to the recogniser, with a model in float32 or float64.
        plain: Function from samples ``(T,)`` of one window to the ids that ``generate`` returns,
            without prompt and end token; ``None``: ``model.generate`` is called with the output of
            `Recognizer.features` if that is a mapping, otherwise there is no such comparison.

    Raises:
        AssertionError: A property does not hold.
    """
    usual = make(TranscribeOptions())
    _check_ids(usual)
    _check_refusals(make, usual)
    recordings = _recordings(usual)
    for samples in recordings:
        _check_windows(usual, samples)
    whole = round(usual.window_s * usual.rate)
    short = [samples for samples in recordings if len(samples) <= whole]
    with torch.no_grad():
        _check_encoding(usual, short)
        _check_encoder_cache(usual, short[-1])
    texts = [_decoded(make(TranscribeOptions(batch_size=1)), None, [one])[0] for one in recordings]
    _same(_decoded(usual, None, recordings), texts, "together", "alone")
    if usual.capabilities.drafts:
        drafted = _decoded(usual, PromptLookup(3, 1), recordings)
        _same(drafted, texts, "drafted", "undrafted")
    plain = plain or _generate(usual)
    if plain is not None:
        spoken = [usual.text_tokens(plain(one)) for one in short]
        ours = [usual.text_tokens(texts[index]) for index in range(len(short))]
        _same(ours, spoken, "through the loop", "by plain generate")
    for tokens in texts:
        _check_text(usual, tokens)


def _recordings(ours: Recognizer) -> list[np.ndarray]:
    """Makes recordings of noise, those of at most one window first; the last one has pauses."""
    random = np.random.default_rng(0)
    lengths = [min(seconds, ours.window_s) for seconds in (0.05, 0.7, 1.6, 2.0)]
    found = [0.1 * random.standard_normal(round(s * ours.rate)) for s in lengths]
    long = 0.1 * random.standard_normal(round(2.3 * ours.window_s * ours.rate))
    pauses = (np.arange(len(long)) / ours.rate) % (ours.window_s / 3) > 0.4
    return [one.astype(np.float32) for one in (np.ones(1), *found, long, long * pauses)]


def _check_ids(ours: Recognizer) -> None:
    assert ours.rate > 0, f"rate is {ours.rate}; expected samples per second"
    assert ours.window_frames > 0, f"window_frames is {ours.window_frames}; expected at least 1"
    assert ours.eos_token_ids, "eos_token_ids is empty; expected the ids that end a transcript"
    texts = ours.text_tokens([*ours.eos_token_ids, ours.pad])
    assert not texts, f"text_tokens keeps {texts}, which are end or padding tokens"
    vocab = ours.model.config.get_text_config(decoder=True).vocab_size
    prompt = ours.prompt(None, [])
    assert prompt, "prompt is empty; expected the ids at which the decoder starts"
    strange = [token for token in (*prompt, ours.pad) if not 0 <= token < vocab]
    assert not strange, f"prompt or pad contain {strange}; expected ids below {vocab}"
    counts = [ours.most_tokens(seconds) for seconds in (1 / ours.rate, 1.0, ours.window_s)]
    assert counts == sorted(counts) and counts[0] >= 1, (
        f"most_tokens for one sample, a second and a window are {counts}; expected at least 1, and "
        "no smaller number for a longer time"
    )


def _check_refusals(make: Callable[[TranscribeOptions], Recognizer], usual: Recognizer) -> None:
    for capability, options in BEYOND.items():
        if getattr(usual.capabilities, capability):
            continue
        name = next(iter(options))
        try:
            make(TranscribeOptions(**options))
        except OptionError as error:
            assert name in str(error), f"the refusal does not name {name}: {error}"
        else:
            raise AssertionError(f"{name} was not refused, but capabilities has no {capability}")


def _check_windows(ours: Recognizer, samples: np.ndarray) -> None:
    """Checks the windows of a recording in sequential mode."""
    recording = ours.open(source_of((samples, ours.rate), ours.rate))
    seek, what = 0, f"of a recording of {len(samples)} samples"
    while seek < recording.frames:
        span = ours.span(recording, seek, [])
        assert 0 < span.frames <= ours.window_frames, (
            f"a window {what} has {span.frames} frames; expected 1 to {ours.window_frames}"
        )
        ours.read(recording, seek, span.frames)
        end, following = seek + span.frames, span.following
        if following is None:
            assert ours.capabilities.timestamps, "following is None without timestamps"
            following = end
        assert seek < following <= end, (
            f"the window {what} from frame {seek} to {end} is followed by one that begins at "
            f"{following}; expected a later start that leaves no frame out"
        )
        assert span.joined or following == end, (
            f"windows {what} overlap from {following} to {end}, but joined is False"
        )
        seek = following


def _check_encoding(ours: Recognizer, recordings: Sequence[np.ndarray]) -> None:
    windows, seconds = [], []
    for samples in recordings:
        recording = ours.open(source_of((samples, ours.rate), ours.rate))
        frames = min(recording.frames, ours.window_frames)
        windows.append(ours.read(recording, 0, frames))
        seconds.append(frames * ours.frame_s)
    together = ours.encode(windows, seconds)
    order = [*range(len(windows))][::-1]
    chosen = together.rows(order)
    assert list(chosen.seconds) == seconds[::-1], "Encoded.rows does not reorder seconds"
    if together.states is None:
        return
    for row, index in enumerate(order):
        alone = ours.encode([windows[index]], [seconds[index]])
        found, expected = _states(chosen, row), _states(alone, 0)
        assert found.shape == expected.shape, (
            f"window {index} has {len(found)} states in a batch and {len(expected)} alone; mask "
            "must be False for states of padding"
        )
        worst = float((found - expected).abs().amax())
        assert worst <= TOLERANCE, (
            f"states of window {index} differ by {worst:.3g} between alone and in a batch; encode "
            "only windows of one length together, and pad their states"
        )


def _check_encoder_cache(ours: Recognizer, samples: np.ndarray) -> None:
    """Checks that the cache of a stream changes no states of windows that grow and are cut."""
    cache = ours.encoder_cache()
    if cache is None:
        return
    half = len(samples) // 2
    for begin, end in ((0, half), (0, len(samples)), (0, half), (half, 2 * half)):
        found = []
        for more in ({}, {"of_stream": {"encoder_cache": cache}}):
            given = {"audio": (samples[begin:end], ours.rate), **more}
            recording = ours.open(source_of(given, ours.rate))
            frames = recording.frames
            window = ours.read(recording, 0, frames)
            found.append(_states(ours.encode([window], [frames * ours.frame_s]), 0))
        expected, cached = found
        assert cached.shape == expected.shape and torch.allclose(
            cached, expected, rtol=0, atol=TOLERANCE
        ), (
            f"with encoder_cache a window of samples {begin} to {end} has other states than "
            "without, after other windows; compare the samples of windows, not their lengths"
        )


def _states(encoded: Encoded, row: int) -> torch.Tensor:
    """Returns the encoder states of one window, without padding, ``(S, H)``."""
    assert encoded.states is not None, "rows lost the states"
    states = encoded.states[row]
    return states if encoded.mask is None else states[encoded.mask[row].bool()]


def _decoded(ours: Recognizer, draft: Any, recordings: Sequence[np.ndarray]) -> list[list[int]]:
    """Decodes recordings in one call, and returns the tokens of each."""
    loop = LongForm(ours, Decoder(draft, seed=0))
    sources = [
        source_of((samples, ours.rate), ours.rate, index)
        for index, samples in enumerate(recordings)
    ]
    found: dict[int, list[int]] = {}
    for done in loop.run(sources):
        if isinstance(done, tuple):
            problem = done[1].problem
            assert not isinstance(problem, MMDecodeError), f"recording {done[0]} failed: {problem}"
            raise problem
        found[done.index] = [int(token) for piece in done.pieces for token in piece.tokens]
        for piece in done.pieces:
            inside = -1e-6 <= piece.start <= piece.end <= done.timeline.duration_s + ours.stamp_s
            assert inside or ours.capabilities.fixed_windows, (
                f"a segment from {piece.start:.3f} to {piece.end:.3f} s in a recording of "
                f"{done.timeline.duration_s:.3f} s"
            )
    return [found[index] for index in range(len(recordings))]


def _generate(ours: Recognizer) -> Callable[[np.ndarray], Sequence[int]] | None:
    """Makes a function from a window's samples to the tokens of ``model.generate``."""
    [first] = ours.features([np.zeros(ours.rate, np.float32)])
    if not isinstance(first, Mapping):
        return None

    def plain(samples: np.ndarray) -> list[int]:
        [inputs] = ours.features([samples])
        prompt = torch.tensor([ours.prompt(None, [])], device=ours.model.device)
        most = ours.most_tokens(len(samples) / ours.rate)
        found = GenerationMixin.generate(
            ours.model,
            decoder_input_ids=prompt,
            max_new_tokens=most,
            do_sample=False,
            num_beams=1,
            **inputs,
        )
        new = found[0, prompt.shape[1] :].tolist()
        return new[
            : next((at for at, token in enumerate(new) if token in ours.eos_token_ids), len(new))
        ]

    return plain


def _check_text(ours: Recognizer, tokens: Sequence[int]) -> None:
    text = ours.text(tokens)
    around = [*ours.prompt(None, []), *tokens, *sorted(ours.eos_token_ids), ours.pad]
    assert ours.text(around) == text, (
        f"the text {text!r} becomes {ours.text(around)!r} with prompt and end tokens around it; "
        "expected that text leaves these out"
    )
    assert ours.joined([tokens]) == text, (
        f"joined gives {ours.joined([tokens])!r} for one segment, but text gives {text!r}"
    )


def _same(
    found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], where: str, otherwise: str
) -> None:
    for index, (ours, other) in enumerate(zip(found, expected, strict=True)):
        assert list(ours) == list(other), (
            f"recording {index} gives {list(ours)} {where}, but {list(other)} {otherwise}"
        )

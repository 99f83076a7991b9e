"""Recogniser for causal Whisper, which encodes the audio of a stream once, chunk by chunk.

A window is not padded to 30 seconds: its encoder states end with its audio. A stream encodes only
new samples (`mmdecode.asr.recognizers.encoder_cache`), and its decoder projects only new states
(`mmdecode.engine.growing_source`). Windows of a recording are encoded in one pass; both ways give
the same states up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmdecode.asr.alignment.ctc import FILE as ALIGNER
from mmdecode.asr.audio.recording import Recording
from mmdecode.asr.recognizers.contract import Encoded, Split
from mmdecode.asr.recognizers.encoder_cache import (
    EncoderCache,
    StreamInputs,
    cache_for,
    encode_cached,
)
from mmdecode.asr.recognizers.whisper import WhisperRecognizer
from mmdecode.checkpoints import code_trusted, local_path
from mmdecode.errors import InputError
from mmdecode.models.causal_whisper import (
    CausalWhisperForConditionalGeneration,
    IncrementalWhisperEncoder,
    causal_form,
    merged,
    window_features,
)
from mmdecode.weights import read_json, read_tensors

if TYPE_CHECKING:
    from mmdecode.asr.audio.reading import Source

ADAPTER = "adapter_model.safetensors"
"""File of a LoRA adapter, in the layout of peft."""


class CausalWhisperRecognizer(WhisperRecognizer):
    """Recogniser of a ``CausalWhisperForConditionalGeneration`` with its ``WhisperProcessor``."""

    summary = "Whisper with a causal encoder (CarelessWhisper): streams encode new audio only"
    source = "Krichli et al. 2025, arXiv:2508.12301"
    model_types = ("causal_whisper",)
    capabilities = replace(
        WhisperRecognizer.capabilities, fixed_windows=False, audio_transforms=False
    )

    @classmethod
    def load(cls, path: str, config: Any, dtype: torch.dtype) -> tuple[Any, Any]:
        """Loads model and processor; a LoRA adapter is merged into the weights of its base.

        Raises:
            InputError: The adapter does not fit its base.
        """
        from transformers import WhisperForConditionalGeneration, WhisperProcessor

        trust = code_trusted()
        folder = path if config.base is None else local_path(config.base)
        processor = WhisperProcessor.from_pretrained(folder, trust_remote_code=trust)
        if config.base is None:
            model = CausalWhisperForConditionalGeneration.from_pretrained(path, dtype=dtype)
            return model, processor
        base = WhisperForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=trust
        )
        model = causal_form(base, chunk=config.chunk, extra=config.extra, base=config.base)
        scale = _scale(read_json(path, "adapter_config.json"), path)
        model.load_state_dict(merged(base.state_dict(), _adapter(path), scale))
        model.name_or_path = model.config.name_or_path = path
        return model.to(dtype), processor

    @property
    def word_method(self) -> str | bool:
        """How words are timed: without a name by the aligner of the base, where it has one."""
        method, base = self.options.word_timestamps, self.model.config.base
        if method in (True, "ctc") and base is not None:
            return f"ctc:model={base}" if (Path(local_path(base)) / ALIGNER).exists() else method
        return method

    # ---- windows

    @property
    def window_frames(self) -> int:
        """Most frames of a window, from ``options.window_s`` or else the model."""
        return round((self.options.window_s or self.window_s) / self.frame_s)

    def open(self, source: Source) -> Recording:
        """Opens a recording, and reads it once for its length and hash."""
        return FramedRecording(source, self.rate, self.mel.hop, self.window_frames * self.mel.hop)

    def read(self, recording: Any, seek: int, count: int) -> Mapping[str, Tensor]:
        """Returns the encoder inputs of a window; those of a stream with the stream's cache."""
        samples = torch.from_numpy(recording.window_samples(seek, count))
        if recording.encoder_cache is not None:
            return StreamInputs({}, recording.encoder_cache, samples)
        return self._inputs(samples)

    def _inputs(self, samples: Tensor) -> Mapping[str, Tensor]:
        features = window_features(self.mel, samples)[None]
        return {"input_features": features.to(self.model.device, self.encoder.conv1.weight.dtype)}

    def features(self, waves: Sequence[Any]) -> Sequence[Mapping[str, Tensor]]:
        """Returns the encoder inputs of each waveform by itself."""
        return [self._inputs(torch.as_tensor(wave)) for wave in waves]

    def samples(self, recording: Any, seek: int, count: int) -> Any:
        """Returns the samples of a window."""
        return recording.window_samples(seek, count)

    def split(self, tokens: list[int], whole: int, sequential: bool) -> Split:
        """Splits tokens into segments, which end with the window at the latest."""
        found = super().split(tokens, whole, sequential)
        within = [(min(first, whole), min(last, whole), own) for first, last, own in found.segments]
        return found._replace(segments=within)

    def encode(self, windows: Sequence[Any], seconds: Sequence[float]) -> Encoded:
        """Encodes windows, those of streams by their caches."""
        return encode_cached(self.encoder, windows, seconds)

    def encoder_cache(self) -> EncoderCache:
        """Returns a cache for the windows of one stream, which encodes only new samples."""
        return cache_for(self, lambda: IncrementalWhisperEncoder(self.encoder, self.mel))


class FramedRecording(Recording):
    """A recording whose windows are counted in mel frames.

    Args:
        source: Source of the recording.
        rate: Sampling rate in Hz.
        hop: Samples of a frame.
        window: Most samples of a window.
    """

    def __init__(self, source: Source, rate: int, hop: int, window: int) -> None:
        self._hop, self._window = hop, window
        super().__init__(source, rate)

    @property
    def frames(self) -> int:
        """Number of whole frames, at least 1."""
        return max(1, self.samples // self._hop)

    def window_samples(self, seek: int, count: int) -> Any:
        """Returns the samples of a window; the last one's may end with a part of a frame."""
        last, start = seek + count >= self.frames, seek * self._hop
        stop = self.samples if last else (seek + count) * self._hop
        return self.waveform(start, min(stop, start + self._window))


def _scale(options: Mapping[str, Any], path: str) -> float:
    """Returns the factor of an adapter from its configuration.

    Raises:
        InputError: The adapter is none of plain LoRA, or its factor is not known.
    """
    others = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")
    other = next((name for name in others if options.get(name)), None)
    missing = [name for name in ("r", "lora_alpha") if not options.get(name)]
    if other or missing:
        found = f"{other}={options[other]!r}" if other else f"no {' and no '.join(missing)}"
        raise InputError(
            f"the adapter_config.json of {path} has {found}; expected plain LoRA with r and "
            "lora_alpha: merge the adapter into its base, and give the folder of the whole model"
        )
    return float(options["lora_alpha"]) / float(options["r"])


def _adapter(path: str) -> dict[str, Tensor]:
    """Returns the tensors of the adapter of a checkpoint.

    Raises:
        InputError: The checkpoint has no adapter.
    """
    from transformers.utils import cached_file

    found = cached_file(path, ADAPTER, _raise_exceptions_for_missing_entries=False)
    if found is None:
        raise InputError(
            f"{path} has no {ADAPTER}, though its config.json names a base; expected the adapter "
            "that 'mmdecode train zoo whisper-synth-320ms' writes"
        )
    return read_tensors(Path(found))

"""The engines of the speech benchmarks: transformers' generate, CTranslate2, and our own modes.

Each is made from one `Checkpoint` and goes from features to what its decoder reads, and from there
to token ids. transformers' ``generate`` cannot be entered after its encoder: it is given features,
and the encoder's time is subtracted. CTranslate2 runs its own encoder and decoder on the same
weights, converted; it is timed on the CPU only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from apart import Apart, Kept
from speech import clean, encode, engine
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    WhisperFeatureExtractor,
    WhisperForCausalLM,
    WhisperForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutput

from mmdecode.checkpoints import local_path
from mmdecode.decoder import Decoder
from mmdecode.engine.stats import Stats
from mmdecode.quantization import quantize
from mmdecode.quantization.models import weight_bytes
from mmdecode.train.drafters.transcripts import whisper_prompt

CTRANSLATE2 = {"CTranslate2": "float32", "CTranslate2 int8": "int8"}


@dataclass
class Checkpoint:
    """Weights that all engines share; what an engine does not need is not loaded.

    Attributes:
        name: Name of the model.
        draft: Name of the Medusa heads.
        device: Device of torch.
        dtype: Type of torch's weights.
        threads: Threads of CTranslate2; torch's are set for the process.
        folder: Where the weights converted for CTranslate2 are, or are put when they are needed.
        wide: Whether the model was widened, see `widen.py`.
        apart: Whether CTranslate2 runs in a process of its own, see `apart.py`.
    """

    name: str
    draft: str
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    threads: int = 1
    folder: Path | None = None
    wide: bool = False
    apart: bool = True

    @property
    def path(self) -> str:
        """The folder or Hub id."""
        return local_path(self.name)

    def _loaded(self, dtype: torch.dtype) -> Any:
        model = WhisperForConditionalGeneration.from_pretrained(
            self.path, dtype=dtype, trust_remote_code=False
        )
        return model.to(self.device).eval()

    @cached_property
    def model(self) -> Any:
        """The model as transformers loads it."""
        return self._loaded(self.dtype)

    @cached_property
    def halved(self) -> Any:
        """The model in bfloat16."""
        return self._loaded(torch.bfloat16)

    @cached_property
    def rounded(self) -> Any:
        """The model with int8 weights."""
        return quantize(self._loaded(self.dtype))

    @cached_property
    def torchao(self) -> Any:
        """The model with int8 weights and inputs of torchao, which scales inputs by row."""
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        model = self._loaded(self.dtype)
        quantize_(model, Int8DynamicActivationInt8WeightConfig())
        return model

    def megabytes(self) -> dict[str, float]:
        """Megabytes of the weights of each form that was used, as they lie in memory."""
        used = [name for name in ("model", "halved", "rounded") if name in vars(self)]
        return {name: round(weight_bytes(getattr(self, name)) / 1e6, 1) for name in used}

    @cached_property
    def extractor(self) -> Any:
        """The feature extractor."""
        return WhisperFeatureExtractor.from_pretrained(self.path, trust_remote_code=False)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's."""
        return AutoTokenizer.from_pretrained(self.path, trust_remote_code=False)

    @cached_property
    def settings(self) -> Any:
        """``config`` and ``generation_config``, as the model has them, without its weights."""
        return SimpleNamespace(
            config=AutoConfig.from_pretrained(self.path, trust_remote_code=False),
            generation_config=GenerationConfig.from_pretrained(self.path),
        )

    @cached_property
    def assistant(self) -> Any:
        """A decoder of the first half of the model's layers, after the model's own encoder."""
        config = copy.deepcopy(self.model.config)
        config.decoder_layers //= 2
        assistant = WhisperForCausalLM(config).to(self.device, self.dtype).eval()
        weights = self.model.get_decoder().state_dict()
        assistant.model.decoder.load_state_dict(weights, strict=False)
        assistant.proj_out.load_state_dict(self.model.proj_out.state_dict())
        assistant.generation_config = copy.deepcopy(self.model.generation_config)
        return assistant

    def convert(self) -> Path:
        """The same weights for CTranslate2, converted once."""
        assert self.folder is not None
        if not (self.folder / "model.bin").exists():
            from ctranslate2.converters import TransformersConverter

            TransformersConverter(self.path).convert(str(self.folder), force=True)
        return self.folder

    def ctranslate2(self, kind: str) -> Any:
        """A `CTranslate2` of the converted weights, or one in a process of its own."""
        given = self.convert(), kind, self.threads, self.settings
        return CTranslate2Apart(*given) if self.apart else CTranslate2(*given)


class CTranslate2:
    """A converted Whisper, with our prompt and our limit of tokens.

    Args:
        folder: The converted model.
        kind: Compute type: ``float32`` or ``int8``.
        threads: Cores it may use.
        settings: See `Checkpoint.settings`.
    """

    def __init__(self, folder: Path, kind: str, threads: int, settings: Any) -> None:
        import ctranslate2

        self._view = ctranslate2.StorageView.from_array
        self._model = ctranslate2.models.Whisper(
            str(folder), device="cpu", compute_type=kind, inter_threads=1, intra_threads=threads
        )
        self._settings = settings

    def encode(self, features: torch.Tensor) -> Any:
        """Encoder states, as CTranslate2 keeps them."""
        return self._model.encode(self._view(np.ascontiguousarray(features, np.float32)))

    def states(self, features: torch.Tensor) -> np.ndarray:
        """Encoder states as an array."""
        return np.array(self.encode(features))

    def generate(
        self, states: Any, prompts: list[list[int]], most: int | None = None
    ) -> list[list[int]]:
        """Greedy ids after the prompts.

        Args:
            states: Of its own encoder, or an array ``(B, S, H)``.
            prompts: Of one length.
            most: Largest number of ids; ``None``: all that the model has positions for.
        """
        if isinstance(states, np.ndarray):
            states = self._view(np.ascontiguousarray(states))
        # it writes at most half of max_length; the decoder's positions are our limit as well
        room = self._settings.config.max_target_positions - len(prompts[0])
        first = getattr(self._settings.generation_config, "max_initial_timestamp_index", None)
        found = self._model.generate(
            states,
            prompts,
            beam_size=1,
            max_length=2 * room if most is None else len(prompts[0]) - 1 + most,
            max_initial_timestamp_index=50 if first is None else first,
        )
        return [result.sequences_ids[0] for result in found]


class CTranslate2Apart:
    """The same in a process of its own; what it encodes stays there."""

    def __init__(self, *given: Any) -> None:
        self._peer = Apart(CTranslate2, *given)

    def encode(self, features: torch.Tensor) -> Kept:
        """Encoder states, for `generate`."""
        return self._peer.keep("encode", features.numpy())

    def states(self, features: torch.Tensor) -> np.ndarray:
        """Encoder states as an array."""
        return self._peer.call("states", features.numpy())

    def generate(self, *given: Any) -> list[list[int]]:
        """Greedy ids, see `CTranslate2.generate`."""
        return self._peer.call("generate", *given)


@dataclass(frozen=True)
class Engine:
    """An engine: from features to token ids.

    Attributes:
        decode: Function from the output of ``encode`` to ids after the prompt.
        encode: Function from features ``(B, mel, frames)`` to the input of ``decode``; ``None``:
            decode reads features and runs the encoder itself.
        encoder: Name of the encoder.
        as_of: Name of the engine whose ids it promises; ``None``: it promises none.
        stats: Its counters, where it keeps any.
        first: ``decode`` that stops after one token.
    """

    decode: Callable[[Any], Any]
    encode: Callable[[torch.Tensor], Any] | None = None
    encoder: str = "torch"
    as_of: str | None = "generate"
    stats: Stats | None = None
    first: Callable[[Any], Any] | None = None


def rows_of(found: Any, settings: Any) -> list[list[int]]:
    """Ids of each row, without the end token."""
    return clean(found, settings) if isinstance(found, torch.Tensor) else found


def stock(checkpoint: Checkpoint, timestamps: bool, **options: Any) -> Engine:
    """transformers' generate, encoder included."""
    model = checkpoint.model
    call = {"do_sample": False, "num_beams": 1, "return_timestamps": timestamps}
    if getattr(model.generation_config, "is_multilingual", False):
        call |= {"language": "en", "task": "transcribe"}
    run = partial(model.generate, **call, **options)
    return Engine(run, first=partial(run, max_new_tokens=1))


def ours(
    checkpoint: Checkpoint,
    timestamps: bool,
    draft: Any = None,
    weights: str = "model",
    compiled: bool = False,
) -> Engine:
    """Our loop, with a draft or its name.

    Args:
        checkpoint: The weights.
        timestamps: Whether timestamps are predicted.
        draft: A drafter or its name.
        weights: ``model``, ``halved``, ``rounded`` or ``torchao``, see `Checkpoint`. With int8
            weights a draft promises the ids of the same loop without one; bfloat16 and torchao
            promise nothing.
        compiled: Whether forward passes are compiled.
    """
    model = getattr(checkpoint, weights)
    decoder = Decoder(draft=draft, compile=compiled)
    run = engine(model, decoder, timestamps)
    first = engine(model, Decoder(draft=decoder.draft, compile=compiled), timestamps, most=1)
    as_of = {"model": GENERATE, "rounded": draft and INT8}.get(weights)
    encoder = "torch" if weights == "model" else weights
    return Engine(run, partial(encode, model), encoder, as_of, decoder.stats, first)


def converted(checkpoint: Checkpoint, timestamps: bool, kind: str) -> Engine:
    """CTranslate2's own encoder and decoder."""
    peer = checkpoint.ctranslate2(kind)
    prompt = whisper_prompt(checkpoint.settings, 1, int(timestamps))[0].tolist()

    def decode(states: Any, most: int | None = None) -> list[list[int]]:
        return peer.generate(states, [prompt] * states.shape[0], most)

    name = f"CTranslate2 {kind}"
    return Engine(decode, peer.encode, name, as_of=None, first=partial(decode, most=1))


def medusa(checkpoint: Checkpoint) -> Any:
    """The heads."""
    from mmdecode.draft import Medusa

    return Medusa.from_pretrained(checkpoint.draft)


def tail_first(checkpoint: Checkpoint) -> Any:
    """What the last window left unfinished, then the heads."""
    from mmdecode.draft import FirstOf, Source

    return FirstOf(Source(least=2), medusa(checkpoint))


def half(checkpoint: Checkpoint) -> str:
    """Drafter: the first half of the model's decoder layers."""
    return f"layer_skip:exit_layer={checkpoint.settings.config.decoder_layers // 2}"


GENERATE, UNDRAFTED = "generate", "undrafted"
INT8, BF16 = "undrafted int8", "undrafted bf16"
MAKERS: dict[str, Callable[[Checkpoint, bool], Engine]] = {
    GENERATE: stock,
    "generate again": stock,
    "generate, lookup": partial(stock, prompt_lookup_num_tokens=5),
    "generate, assistant": lambda c, times: stock(c, times, assistant_model=c.assistant),
    UNDRAFTED: ours,
    "medusa": lambda c, times: ours(c, times, medusa(c)),
    "layer_skip": lambda c, times: ours(c, times, half(c)),
    "lookup": partial(ours, draft="lookup"),
    "recycling": partial(ours, draft="recycling"),
    "quantized": partial(ours, draft="quantized"),
    INT8: partial(ours, weights="rounded"),
    "medusa int8": lambda c, times: ours(c, times, medusa(c), "rounded"),
    BF16: partial(ours, weights="halved"),
    "medusa bf16": lambda c, times: ours(c, times, medusa(c), "halved"),
    "first_of": lambda c, times: ours(c, times, tail_first(c)),
    **{name: partial(converted, kind=kind) for name, kind in CTRANSLATE2.items()},
    "compiled": partial(ours, compiled=True),
    "torchao int8": partial(ours, weights="torchao", compiled=True),
}
"""Every engine; each is given the checkpoint and whether times are predicted."""
ASKED_FOR = ("compiled", "torchao int8")
"""Engines that run where they are named: compiling takes up to a minute for each shape."""


def version(package: str) -> str | None:
    """Version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def names(batch: int, device: torch.device) -> list[str]:
    """Engines of the short form that can run here: transformers drafts for one row only."""
    left_out = {"first_of"}  # in one window there is no tail of the last one
    if batch > 1:
        left_out |= {"generate, lookup", "generate, assistant"}
    if device.type != "cpu":
        left_out |= {"quantized", INT8, "medusa int8", BF16, "medusa bf16"}
        left_out.add("torchao int8")
    if find_spec("torchao") is None:
        left_out.add("torchao int8")
    if not has_ctranslate2(device):
        left_out |= set(CTRANSLATE2)
    return [name for name in MAKERS if name not in left_out]


def has_ctranslate2(device: torch.device) -> bool:
    """Whether CTranslate2 is installed and torch runs where it is timed."""
    return find_spec("ctranslate2") is not None and device.type == "cpu"


def word_errors(
    checkpoint: Checkpoint, texts: list[str] | None, rows: list[list[int]]
) -> float | None:
    """Word error rate of ids; ``None``: there are no texts, or what counts is not installed."""
    from mmdecode.errors import MissingExtraError
    from mmdecode.evaluation.speech.wer import wer

    if texts is None:
        return None
    hypotheses = [checkpoint.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    try:
        return round(wer(texts, hypotheses, resamples=1).value, 6)
    except MissingExtraError:
        return None


class _Encoder(torch.nn.Module):
    """CTranslate2's encoder where transformers' is expected."""

    def __init__(self, peer: Any, encoder: Any) -> None:
        super().__init__()
        self.conv1, self.conv2, self.peer = encoder.conv1, encoder.conv2, peer

    def forward(self, features: torch.Tensor) -> BaseModelOutput:
        states = torch.from_numpy(self.peer.states(features))
        return BaseModelOutput(last_hidden_state=states)


class _Decoder(Decoder):
    """CTranslate2's greedy decoder where ours is expected."""

    def __init__(self, peer: Any, eos: int) -> None:
        super().__init__()
        self.peer, self.eos = peer, eos

    def __call__(
        self, model: Any, input_ids: torch.Tensor, *, encoder_outputs: Any, **_: Any
    ) -> torch.Tensor:
        states = encoder_outputs.last_hidden_state.numpy()
        rows = [[*ids, self.eos] for ids in self.peer.generate(states, input_ids.tolist())]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [self.eos] * (longest - len(row)) for row in rows])
        return torch.cat([input_ids, ids], dim=1)


def long_form_parts(checkpoint: Checkpoint, kind: str) -> tuple[Any, Decoder]:
    """Model and decoder for a `Transcriber` whose windows CTranslate2 encodes and decodes.

    Greedy only: what the window loop asks of a decoder beyond ids is not there.
    """
    peer = checkpoint.ctranslate2(kind)
    encoder = _Encoder(peer, checkpoint.model.get_encoder())
    model = copy.copy(checkpoint.model)
    model.get_encoder = lambda: encoder
    return model, _Decoder(peer, checkpoint.model.generation_config.eos_token_id)

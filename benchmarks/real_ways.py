"""Ways from real recordings to token ids: `generate`, our loop, onnxruntime, and the pipeline.

All are made from one `Subject`. Each recording is encoded by itself: a Moonshine's first norm runs
over time, padding included, so that the states of a padded batch are not those of its recordings.
Decoding then begins at the encoder's states for every way that can be entered there; states of
several recordings are padded and masked. The graphs that the publisher of ``moonshine:tiny-en``
ships hold weights and products of 8 bits: onnxruntime runs them as they are, by a greedy loop here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoConfig, GenerationConfig
from transformers.modeling_outputs import ModelOutput

import mmdecode as mm
from mmdecode import registry
from mmdecode.checkpoints import local_path, paired
from mmdecode.engine.stats import Stats
from mmdecode.models.moonshine.wheel import MoonshineWheel, assets

RATE = 16_000
GRAPHS = ("encoder_model.ort", "decoder_model_merged.ort")
Rows = list[list[int]]
"""Ids of each recording, without start and end."""


def version(package: str) -> str | None:
    """Version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@dataclass
class Subject:
    """Model and processor of the benchmark.

    Attributes:
        name: Name of the model.
        threads: Threads of every way.
        quantize: Format of the weights, see `mmdecode.quantize`; ``None``: float32.
        heads: Folders of Medusa or CTC heads for the model, besides those that ship for it.
    """

    name: str
    threads: int = 1
    quantize: str | None = None
    heads: Sequence[Path] = ()

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        """Model and processor."""
        model, processor = mm.load(self.name, "cpu", quantize=self.quantize)
        return model.eval(), processor

    @property
    def model(self) -> Any:
        """The model as transformers loads it, with its weights rounded where that is asked for."""
        return self.loaded[0]

    @cached_property
    def rounded(self) -> Subject:
        """The same model with int8 weights."""
        return Subject(self.name, self.threads, "int8")

    @property
    def processor(self) -> Any:
        """The model's processor."""
        return self.loaded[1]

    @cached_property
    def settings(self) -> Any:
        """``generation_config``, without the weights."""
        path = local_path(self.name)
        return SimpleNamespace(generation_config=GenerationConfig.from_pretrained(path))

    @property
    def layers(self) -> int:
        """Number of decoder layers, without the weights."""
        config = AutoConfig.from_pretrained(local_path(self.name), trust_remote_code=False)
        return getattr(config, "decoder_num_hidden_layers", None) or config.decoder_layers

    def text(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return self.processor.tokenizer.decode(list(ids), skip_special_tokens=True).strip()

    def inputs(self, wave: np.ndarray) -> dict[str, torch.Tensor]:
        """Inputs of the encoder for one recording, batch 1."""
        return dict(self.processor.feature_extractor(wave, sampling_rate=RATE, return_tensors="pt"))

    def rows(self, ids: torch.Tensor) -> Rows:
        """Token ids without start, end and padding, by row."""
        config = self.model.generation_config
        ends = config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends)
        found = []
        for row in ids[:, 1:].tolist():
            stop = next((at for at, token in enumerate(row) if token in ends), len(row))
            found.append(row[:stop])
        return found


@torch.no_grad()
def encode(subject: Subject, waves: Sequence[np.ndarray]) -> ModelOutput:
    """States of recordings, each encoded by itself: ``(B, S, H)``, padded, with their mask."""
    encoder = subject.model.get_encoder()
    outputs = [encoder(**subject.inputs(wave)) for wave in waves]
    if len(outputs) == 1:
        return outputs[0]
    pad, found = torch.nn.utils.rnn.pad_sequence, [one.last_hidden_state[0] for one in outputs]
    mask = pad([torch.ones(len(one), dtype=torch.int) for one in found], batch_first=True)
    states = pad(found, batch_first=True)
    return type(outputs[0])(last_hidden_state=states, attention_mask=mask)


def generate(subject: Subject, states: ModelOutput, **options: Any) -> Rows:
    """transformers' ``generate`` after the encoder."""
    return subject.rows(subject.model.generate(encoder_outputs=_copy(states), **options))


def ours(subject: Subject, states: ModelOutput, decoder: mm.Decoder) -> Rows:
    """Our loop after the encoder, by the same call."""
    return subject.rows(mm.generate(subject.model, encoder_outputs=_copy(states), decoder=decoder))


def _copy(states: ModelOutput) -> ModelOutput:
    return type(states)(**states)  # generate writes into what it is given


def alone(subject: Subject, wave: np.ndarray) -> Rows:
    """Ids that plain ``generate`` gives for one recording alone: the reference of all ways."""
    return subject.rows(subject.model.generate(**subject.inputs(wave)))


def padded(subject: Subject, waves: Sequence[np.ndarray]) -> Rows:
    """``generate`` of a padded batch, as the processor makes it."""
    inputs = subject.processor.feature_extractor(
        list(waves),
        sampling_rate=RATE,
        return_tensors="pt",
        padding="longest",
        return_attention_mask=True,
    )
    return subject.rows(subject.model.generate(**inputs))


Memory = Literal["call", "clip", "kept"]


@dataclass(frozen=True)
class Drafted:
    """Our loop, with a drafter or without one.

    Attributes:
        spec: Drafter as in ``--draft``; ``None``: no draft.
        memory: How long the drafter remembers: for a ``call``; longer, but it begins again with
            each ``clip``; or it is ``kept`` from clip to clip, and begins again with each repeat.
        int8: Whether the model has int8 weights.
        compiled: Whether forward passes are compiled.
    """

    spec: str | None = None
    memory: Memory = "call"
    int8: bool = False
    compiled: bool = False


UNDRAFTED, UNDRAFTED_INT8 = "undrafted", "undrafted int8"
COMPILED = "undrafted, compiled"


def drafts(subject: Subject) -> dict[str, Drafted]:
    """Ways of our loop: every drafter of the registry that needs neither training, an image nor a
    text at hand; heads that were trained for the model, Medusa's by their tree and as a chain; int8
    weights without a draft and with the cheapest one; compiled passes."""
    layers = subject.layers
    few = max(1, layers // 2)
    found = {
        UNDRAFTED: Drafted(),
        "lookup": Drafted("lookup"),
        "recycling, 40 nodes": Drafted("recycling"),
        "recycling, 8 nodes": Drafted("recycling:nodes=8"),
        "recycling, 8 nodes, table kept": Drafted("recycling:nodes=8,keep=true", "kept"),
        "lookahead": Drafted("lookahead"),
        "lookahead, window 2": Drafted("lookahead:window=2,ngram=3,guesses=2"),
        f"layer_skip, first {few} of {layers}": Drafted(f"layer_skip:exit_layer={few}"),
        f"layer_skip, first {layers - 1} of {layers}": Drafted(
            f"layer_skip:exit_layer={layers - 1},length=2"
        ),
        "clasp": Drafted("clasp"),
        "swift": Drafted("swift", "clip"),
        "adaptive over lookup": Drafted("adaptive:draft=lookup", "kept"),
        "quantized": Drafted("quantized"),
        UNDRAFTED_INT8: Drafted(int8=True),
        "lookup int8": Drafted("lookup", int8=True),
        "adaptive over lookup int8": Drafted("adaptive:draft=lookup", "kept", int8=True),
        COMPILED: Drafted(compiled=True),
    }
    medusa, ctc = trained_heads(subject)
    for name, path in medusa.items():
        found[name] = Drafted(f"medusa:path={path}")
        found[f"{name}, chain"] = Drafted(f"medusa:path={path},chain=true")
    found |= {name: Drafted(f"ctc:head={path}") for name, path in ctc.items()}
    known = {entry.name for entry in registry.describe("draft")}
    return {
        name: one
        for name, one in found.items()
        if one.spec is None or one.spec.partition(":")[0] in known
    }


def trained_heads(subject: Subject) -> tuple[dict[str, str], dict[str, str]]:
    """Medusa heads and CTC heads by the name of their way: shipped ones, then given folders."""
    shipped = {kind: paired(subject.name, kind) for kind in ("medusa", "ctc")}
    medusa, ctc = ({k: name} if (name := shipped[k]) else {} for k in ("medusa", "ctc"))
    for folder in subject.heads:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind, found = ("ctc", ctc) if config.get("drafter") == "ctc" else ("medusa", medusa)
        found[f"{kind} {folder.name}"] = str(folder)
    return medusa, ctc


@dataclass
class Decoders:
    """The decoders of one way, each with a drafter that remembers as long as it may.

    Attributes:
        given: The model in float32.
        way: What they are made of.
        made: Those that were made, by clip and repeat as far as these matter.
    """

    given: Subject
    way: Drafted
    made: dict[tuple[int, int], mm.Decoder] = field(default_factory=dict)

    @property
    def subject(self) -> Subject:
        """The model that is decoded, in float32 or with int8 weights."""
        return self.given.rounded if self.way.int8 else self.given

    def new(self) -> mm.Decoder:
        """A new decoder, whose drafter has no state."""
        spec, subject = self.way.spec, self.subject
        if spec is None:
            return mm.Decoder(seed=0, compile=self.way.compiled)
        at_hand = registry.context_of(subject.model, subject.processor, subject.name)
        return mm.Decoder(registry.create("draft", spec, **at_hand), seed=0)

    def prepare(self, clips: int, repeats: int) -> None:
        """Builds all decoders before anything is timed."""
        for clip in range(clips):
            for repeat in range(repeats):
                self.at(clip, repeat)

    def at(self, clip: int, repeat: int) -> mm.Decoder:
        """The decoder for a clip in a repeat."""
        key = {"call": (0, 0), "clip": (clip, repeat), "kept": (0, repeat)}[self.way.memory]
        if key not in self.made:
            self.made[key] = self.new()
        return self.made[key]

    def begin_again(self) -> None:
        """Makes new drafters in place of those that remember, and sets counters to zero."""
        if self.way.memory != "call":
            self.made.clear()
        for decoder in self.made.values():
            decoder.stats.reset()

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per pass over all decoders, without the token from prefill."""
        stats: list[Stats] = [decoder.stats for decoder in self.made.values()]
        passes = sum(one.rounds for one in stats)
        return sum(one.acceptance_length * one.rounds for one in stats) / max(passes, 1)


class Graphs:
    """The publisher's int8 graphs, run by onnxruntime with a greedy loop.

    Args:
        folder: Folder that holds `GRAPHS`.
        threads: Threads of onnxruntime.
        model: Model with the same weights, for its sizes and special ids.
    """

    def __init__(self, folder: Path, threads: int, model: Any) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        self._encoder, self._decoder = (
            onnxruntime.InferenceSession(
                str(folder / name), options, providers=["CPUExecutionProvider"]
            )
            for name in GRAPHS
        )
        self._past = [one for one in self._decoder.get_inputs() if one.name.startswith("past")]
        self._outputs = [one.name for one in self._decoder.get_outputs()]
        config = model.generation_config
        self._start, self._end = config.decoder_start_token_id, config.eos_token_id
        self._longest = config.max_length

    def encode(self, waves: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Padded states ``(B, S, H)`` of recordings that are encoded alone, and which samples are
        theirs: the decoder makes the mask of states of that."""
        found = []
        for wave in waves:
            given = {
                "input_values": wave[None].astype(np.float32),
                "attention_mask": np.ones((1, len(wave)), np.int64),
            }
            found.append(self._encoder.run(None, given)[0][0])
        longest = max(map(len, found))
        states = np.stack([np.pad(one, ((0, longest - len(one)), (0, 0))) for one in found])
        lengths = np.array([len(wave) for wave in waves])
        mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
        return states, mask

    def decode(self, encoded: tuple[np.ndarray, np.ndarray]) -> Rows:
        """Greedy ids of each row."""
        states, mask = encoded
        batch = len(states)
        rows: Rows = [[] for _ in range(batch)]
        going = np.ones(batch, bool)
        tokens = np.full((batch, 1), self._start, np.int64)
        past = {
            one.name: np.zeros((batch, one.shape[1], 0, one.shape[3]), np.float32)
            for one in self._past
        }
        for step in range(self._longest - 1):
            given = {
                "input_ids": tokens,
                "encoder_hidden_states": states,
                "encoder_attention_mask": mask,
                "use_cache_branch": np.array([step > 0]),
            }
            logits, *present = self._decoder.run(None, given | past)
            for name, value in zip(self._outputs[1:], present, strict=True):
                if step == 0 or ".decoder." in name:  # those of the audio are made once
                    past[name.replace("present", "past_key_values")] = value
            tokens = logits[:, -1:].argmax(-1)
            going &= tokens[:, 0] != self._end
            if not going.any():
                break
            for row in np.flatnonzero(going):
                rows[row].append(int(tokens[row, 0]))
        return rows


def has_graphs(name: str) -> bool:
    """Whether the publisher's graphs of a model can be run here."""
    known = name == "moonshine:tiny-en"
    folder = assets()
    whole = folder is not None and MoonshineWheel.holds(folder)
    return known and find_spec("onnxruntime") is not None and whole


class Pipeline:
    """transformers' pipeline, greedy: by itself it searches with five beams.

    Args:
        subject: Model and processor.
    """

    PIECE_S = 30.0

    def __init__(self, subject: Subject) -> None:
        from transformers import pipeline

        processor = subject.processor
        self._pipe = pipeline(
            "automatic-speech-recognition",
            model=subject.model,
            tokenizer=processor.tokenizer,
            feature_extractor=processor.feature_extractor,
            ignore_warning=True,
        )
        self._options = {
            "num_beams": 1,
            "max_new_tokens": subject.model.generation_config.max_length,
        }

    def __call__(self, waves: Sequence[np.ndarray], batch: int, cut: bool = False) -> list[str]:
        """Texts of recordings.

        Args:
            waves: Samples at 16 kHz.
            batch: Recordings, or pieces, at once.
            cut: Whether to cut them into pieces of `PIECE_S`, that follow one another.
        """
        pieces = {"chunk_length_s": self.PIECE_S, "stride_length_s": 0.0} if cut else {}
        given = [{"raw": wave, "sampling_rate": RATE} for wave in waves]
        found = self._pipe(given, batch_size=batch, generate_kwargs=self._options, **pieces)
        return [one["text"].strip() for one in found]


@contextmanager
def clock(module: torch.nn.Module) -> Iterator[list[float]]:
    """Seconds of each call of a module, on the CPU."""
    spent: list[float] = []
    begun = 0.0

    def begin(*_: Any) -> None:
        nonlocal begun
        begun = time.perf_counter()

    def end(*_: Any) -> None:
        spent.append(time.perf_counter() - begun)

    hooks = [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


def clocked(subject: Subject, call: Callable[[], Any]) -> SimpleNamespace:
    """Result of a call, and seconds of the model's encoder in it."""
    with clock(subject.model.get_encoder()) as spent:
        result = call()
    return SimpleNamespace(result=result, encoder_s=sum(spent))

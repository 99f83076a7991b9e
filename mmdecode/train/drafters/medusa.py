"""Training of Medusa heads for a speech recogniser, on the model's own transcripts.

The model stays frozen. The labels are its own greedy transcripts of the training audio, since these
are the tokens that verification accepts. Its decoder states over the transcripts are computed once
and stored, so that an epoch runs little more than the heads. After training, the draft tree is
chosen from the heads' accuracies on held-out samples. Heads may be limited to the tokens that are
most frequent in the training transcripts, see `mmdecode.draft.medusa_heads`.

Source: Cai et al. 2024, arXiv:2401.10774, sections 2.2 and 3.1. The loss is Whisper-Medusa's: the
mean over heads of the cross-entropy of head k at position t with the label at t + k.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from mmdecode import registry
from mmdecode.asr.options import TranscribeOptions
from mmdecode.asr.recognizers import Recognizer, of_type
from mmdecode.draft.medusa import Medusa
from mmdecode.draft.medusa_heads import MedusaHeads
from mmdecode.draft.trees import choose_tree, expected_length
from mmdecode.errors import InputError, OptionError, UnsupportedModelError
from mmdecode.quantization.models import refuse_learning
from mmdecode.runs.files import (
    marked_json,
    refuse_foreign_in,
    write_file,
    write_folder,
)
from mmdecode.train.drafters.recordings import STATE, forget, read_windows, refuse_finished, stored
from mmdecode.train.drafters.transcripts import Sample, open_past, transcribed
from mmdecode.train.loop import Epochs


@dataclass(frozen=True, kw_only=True)
class MedusaOptions:
    """Settings of the training of Medusa heads for a recogniser.

    Attributes:
        kind: ``linear``: heads on the model's last states; ``block``: heads after one more decoder
            layer, which is initialised with the model's last layer.
        num_heads: Number of heads: drafted tokens after the token that the model itself predicts.
        num_layers: Residual blocks per head.
        epochs: Number of epochs; the weights of the epoch with the most tokens per pass on held-out
            samples are kept.
        peak_rate: Highest learning rate (AdamW, cosine schedule).
        batch: Samples per step.
        nodes: Number of tokens in the draft tree; 0: a chain of each head's best token.
        top: Number of most likely tokens of each head that the tree may use.
        vocabulary: Number of tokens that the heads score, the most frequent ones of the training
            transcripts; 0: all.
        seed: Seed of weights, sample order and held-out split.
    """

    kind: str = "block"
    num_heads: int = 5
    num_layers: int = 1
    epochs: int = 12
    peak_rate: float = 2e-3
    batch: int = 32
    nodes: int = 12
    top: int = 4
    vocabulary: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "block"):
            raise OptionError(f"kind={self.kind!r}; expected 'linear' or 'block'")
        if self.vocabulary and self.vocabulary < self.top:
            raise OptionError(
                f"vocabulary={self.vocabulary}; expected 0, for all tokens, or at least {self.top}"
            )


def head_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Computes the mean cross-entropy of each head, ``(heads,)``; NaN for a head without labels.

    Args:
        logits: Logits ``(heads, B, T, V)``; head k at position t predicts ``labels[:, t + k]``.
        labels: Labels ``(B, T)``; -100 for no loss.
    """
    wanted = [moved(labels, shift, logits.shape[2]) for shift in range(len(logits))]
    return _losses(logits.flatten(1, 2), torch.stack(wanted).flatten(1))


def _losses(logits: Tensor, wanted: Tensor) -> Tensor:
    """Computes each head's loss from logits ``(heads, P, V)`` and its own labels ``(heads, P)``."""
    pairs = zip(logits, wanted, strict=True)
    return torch.stack([F.cross_entropy(a.float(), b, ignore_index=-100) for a, b in pairs])


def moved(labels: Tensor, offset: int, length: int, nothing: int = -100) -> Tensor:
    """Shifts labels to the left and pads or crops them to ``(B, length)``.

    Args:
        labels: Labels ``(B, T)``.
        offset: Number of positions to shift by.
        length: Length of the result.
        nothing: Value that fills the end.
    """
    rest = labels[:, offset:]
    return F.pad(rest, (0, length - rest.shape[1]), value=nothing)


def train_heads(
    model: Any, samples: Sequence[Sample], options: MedusaOptions, state_file: Path | None = None
) -> tuple[Medusa, dict[str, Any]]:
    """Trains heads for a model; a tenth of the samples, at least 10, is held out.

    Args:
        model: The recogniser's model that the heads draft for; its weights stay frozen.
        samples: Transcripts and states, as `mmdecode.train.drafters.transcripts` yields them.
        options: Settings.
        state_file: File of the training state, written after each epoch; an interrupted training
            resumes from it. ``None``: no state is written.

    Returns:
        The drafter with its draft tree; and a report with settings, accuracies by head and rank,
        and expected tokens per pass on held-out samples.

    Raises:
        InputError: There are fewer than 20 samples.
        OptionError: ``state_file`` is of a training with other settings or samples.
        UnsupportedModelError: There are no blocks for the model's family.
    """
    if len(samples) < 20:
        raise InputError(f"{len(samples)} training samples; expected at least 20: add recordings")
    torch.manual_seed(options.seed)
    adapter = registry.adapter_for(model)
    width = samples[0].hidden.shape[-1]
    device = next(model.parameters()).device
    block = None
    if options.kind == "block":
        block = adapter.extra_layer(model.config)
        if block is None:
            raise UnsupportedModelError(
                f"{adapter.name} cannot run one more decoder layer; use kind='linear'"
            )
        block.load_state_dict(adapter.layers()[-1].state_dict())
        block.to(device)
    order = torch.randperm(len(samples)).tolist()
    held = max(10, len(samples) // 10)
    valid, rest = [samples[i] for i in order[:held]], [samples[i] for i in order[held:]]
    ids = most_frequent(rest, options.vocabulary) if options.vocabulary else None
    heads = MedusaHeads(options.num_heads, options.num_layers, width, vocabulary=ids).to(device)
    parameters = [*heads.parameters(), *(block.parameters() if block is not None else ())]
    optimizer = torch.optim.AdamW(parameters, lr=options.peak_rate, weight_decay=0.01)
    steps = options.epochs * math.ceil(len(rest) / options.batch)
    modules = nn.ModuleDict({"heads": heads} | ({"block": block} if block is not None else {}))
    settings = [asdict(options), len(samples), int(sum(s.ids.sum() for s in samples))]
    epochs = Epochs(modules, optimizer, settings, state_file)
    for epoch in epochs.left(options.epochs, f"{options.kind} heads"):
        generator = torch.Generator().manual_seed(options.seed * 1000 + epoch)
        shuffled = torch.randperm(len(rest), generator=generator).tolist()
        modules.train()
        for start in range(0, len(rest), options.batch):
            step = epoch * math.ceil(len(rest) / options.batch) + start // options.batch
            set_rate(optimizer, options.peak_rate, step, steps)
            batch = _pad([rest[i] for i in shuffled[start : start + options.batch]], device)
            logits, wanted = _forward(adapter, heads, block, batch)
            _losses(logits, heads.own_ids(wanted)).nanmean().backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        modules.eval()
        hits = ranks(adapter, heads, block, valid, options)
        epochs.end(1 + float((hits[:, :, 0]).cumprod(0).float().sum(0).mean()))
    epochs.load_best()
    modules.eval()
    hits = ranks(adapter, heads, block, valid, options)
    paths = choose_tree(hits, options.nodes) if options.nodes else None
    report = {
        "options": asdict(options),
        "samples": len(samples),
        "accuracy_by_head_and_rank": [
            [round(float(r), 4) for r in h.float().mean(0)] for h in hits
        ],
        "expected_tokens_per_pass_chain": round(max(epochs.scores, default=-1.0), 3),
        "expected_tokens_per_pass_tree": round(expected_length(hits, paths), 3) if paths else None,
    }
    if ids is not None:
        scored = torch.cat([torch.isin(one.ids[one.prompt :], ids) for one in valid])
        report["vocabulary"] = len(ids)
        report["tokens_in_vocabulary"] = round(float(scored.float().mean()), 4)
    return Medusa(heads, block, paths), report


def most_frequent(samples: Sequence[Sample], count: int) -> Tensor:
    """Returns the ids of the most frequent tokens of transcripts, ascending; fewer if fewer occur.

    Args:
        samples: The transcripts; prompts are not counted.
        count: Number of ids.
    """
    occurring = torch.bincount(torch.cat([one.ids[one.prompt :] for one in samples]))
    ranked = occurring.argsort(descending=True, stable=True)
    return ranked[: min(count, int((occurring > 0).sum()))].sort().values


def set_rate(optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int) -> None:
    """Sets the learning rate of a step: warm-up over 50 steps, cosine decay to 2 % of the peak."""
    rate = 0.5 * (1 + math.cos(math.pi * step / steps)) * min(1, (step + 1) / 50)
    for group in optimizer.param_groups:
        group["lr"] = peak * (0.02 + 0.98 * rate)


@torch.no_grad()
def ranks(
    adapter: Any,
    heads: MedusaHeads,
    block: nn.Module | None,
    samples: Sequence[Sample],
    options: MedusaOptions,
) -> Tensor:
    """Returns whether the r-th most likely token of each head is the label.

    Positions near the end of a transcript have no labels for later heads; these count as misses.

    Args:
        adapter: Adapter of the model.
        heads: The heads.
        block: Decoder layer before the heads; ``None``: none.
        samples: Transcripts and states.
        options: Settings.

    Returns:
        Bool tensor ``(heads, positions, top)`` over the labelled positions of all samples.
    """
    found = []
    for start in range(0, len(samples), options.batch):
        device = heads.weight.device
        batch = _pad(samples[start : start + options.batch], device)
        logits, wanted = _forward(adapter, heads, block, batch)
        top = heads.target_ids(logits.topk(options.top, dim=-1).indices)  # (K, P, top)
        found.append((top == wanted[..., None]).cpu())
    return torch.cat(found, 1)


@dataclass
class _Batch:
    ids: Tensor  # (B, L), 0 after the end
    length: Tensor  # (B,)
    prompt: Tensor  # (B,)
    hidden: Tensor  # (B, L, H)
    audio: Tensor | None  # (B, S, H), if there is a block
    audio_mask: Tensor | None  # (B, S), if recordings are of unequal length


def _pad(samples: Sequence[Sample], device: torch.device) -> _Batch:
    ids, hidden = [s.ids for s in samples], [s.hidden for s in samples]
    audio = [s.audio for s in samples if s.audio is not None]
    lengths = torch.tensor([len(states) for states in audio], device=device)
    mask = None
    if len(set(lengths.tolist())) > 1:
        mask = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
    return _Batch(
        ids=pad_sequence(ids, batch_first=True).to(device),
        length=torch.tensor([len(s.ids) for s in samples], device=device),
        prompt=torch.tensor([s.prompt for s in samples], device=device),
        hidden=pad_sequence(hidden, batch_first=True).to(device).float(),
        audio=pad_sequence(audio, batch_first=True).to(device).float() if audio else None,
        audio_mask=mask,
    )


def _targets(batch: _Batch) -> Tensor:
    """Returns the first head's labels, two positions ahead: the model itself predicts the next."""
    after = moved(batch.ids, 2, batch.ids.shape[1])
    position = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    asked = (position >= batch.prompt[:, None] - 1) & (position < batch.length[:, None] - 2)
    return after.masked_fill(~asked, -100)


def _forward(
    adapter: Any, heads: MedusaHeads, block: nn.Module | None, batch: _Batch
) -> tuple[Tensor, Tensor]:
    """Computes logits ``(K, P, V)`` and labels ``(K, P)`` of all heads, where the first has one."""
    hidden = batch.hidden
    if block is not None:
        assert batch.audio is not None, "samples for a block keep the encoder states"
        past, mask = open_past(adapter, 1, batch.ids, batch.audio, batch.audio_mask)
        hidden = adapter.run_extra_layer(block, hidden, mask, past)
    targets = _targets(batch)
    asked, count = targets != -100, heads.weight.shape[1]
    wanted = [moved(targets, shift, targets.shape[1])[asked] for shift in range(count)]
    return heads.logits(hidden[asked], adapter), torch.stack(wanted)


def train_from_manifest(
    model_name: str,
    manifest: Path,
    out: Path,
    options: MedusaOptions,
    *,
    limit: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    language: str = "en",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Trains Medusa heads for a speech recogniser on audio files: ``mmdecode train medusa``.

    Args:
        model_name: The recogniser: folder, Hub id, ``zoo:NAME`` or ``moonshine:tiny-en``.
        manifest: Folder of audio files, or table with a column ``path`` or ``audio`` of paths,
            absolute or relative to the table. Recordings are split into the model's windows.
        out: Folder of the heads; the training state is in ``out/state`` until the training ends.
        options: Settings.
        limit: Maximum number of recordings; ``None``: all.
        device: Device of the training.
        dtype: Dtype in which the model transcribes, see `mmdecode.checkpoints.dtype_of`; heads are
            trained in float32.
        language: Language of the recordings; used only if the checkpoint is multilingual.
        overwrite: Whether to replace heads that are trained.

    Returns:
        The report, also written to ``out/report.json``.

    Raises:
        InputError: No recording can be read.
        OptionError: The folder holds trained heads, and ``overwrite`` is not set.
        UnsupportedModelError: The engine has no adapter for the recogniser.
    """
    from mmdecode.asr.output.inputs import recordings_in
    from mmdecode.asr.output.manifest import opened
    from mmdecode.asr.transcriber import load
    from mmdecode.decoder import Decoder

    refuse_foreign_in(out)
    refuse_finished(out, overwrite)
    entries = recordings_in(manifest, limit)
    model, processor = load(model_name, device, dtype)
    refuse_learning(model)
    model, dtype = model.eval(), str(model.dtype).removeprefix("torch.")
    recognizers = recognizers_of(model, processor, language)
    first = recognizers[0]
    began, state, audio = time.time(), out / STATE, options.kind == "block"
    spoken_in = first.language_of(opened(entries[0], language))
    samples = stored(
        state,
        Sample,
        read_windows(first, entries, language),
        lambda part: transcribed(recognizers, part, Decoder(), spoken_in, audio),
        (model_name, dtype, language, audio),
    )
    transcribed_s = round(time.time() - began, 1)
    draft, report = train_heads(model.float(), samples, options, state / f"{options.kind}.pt")
    write_folder(out, lambda into: draft.save_pretrained(into, target_config(model)))
    report |= {"model": model_name, "dtype": dtype, "seconds": round(time.time() - began, 1)}
    report |= {"seconds_transcribing": transcribed_s}
    write_file(out / "report.json", marked_json(report))
    forget(state)
    return report


def recognizers_of(model: Any, processor: Any, language: str = "en") -> list[Recognizer]:
    """Returns the recognisers of a model that transcribe its training data in turns.

    A model that predicts timestamps transcribes half of the data with them.

    Args:
        model: The recogniser's model.
        processor: Its processor.
        language: Language of the recordings; used only if the checkpoint is multilingual.

    Raises:
        UnsupportedModelError: The engine has no adapter for the model.
    """
    family = of_type(model.config.model_type)
    options = TranscribeOptions()
    if family.capabilities.languages and getattr(model.generation_config, "is_multilingual", False):
        options = replace(options, language=language, task="transcribe")
    if family.capabilities.timestamps:
        most = model.config.max_target_positions - 8
        options = replace(options, max_new_tokens=most, timestamps=False)
        return [
            family(model, processor, options),
            family(model, processor, replace(options, timestamps=True)),
        ]
    recognizer = family(model, processor, options)
    if not recognizer.capabilities.drafts:
        raise UnsupportedModelError(
            f"the engine has no adapter for {recognizer.name}, so no draft works with it; register "
            "one under the entry-point group mmdecode.adapters"
        )
    return [recognizer]


def target_config(model: Any) -> dict[str, Any]:
    """Returns the part of the target's configuration that is saved with the heads.

    It suffices to build the additional decoder layer when the heads are loaded. Settings of
    generation and of special tokens are left out.
    """
    config = model.config.to_dict()
    return {
        name: value
        for name, value in config.items()
        if isinstance(value, bool | int | float | str | dict)
        and not name.startswith(("_", "output_", "return_"))
        and not name.endswith(("_token_id", "dtype", "transformers_version", "2id", "2label"))
    }

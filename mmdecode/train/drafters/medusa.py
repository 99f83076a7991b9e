"""Training of Medusa heads for a Whisper checkpoint, on the model's own transcripts.

The model stays frozen. The labels are its own greedy transcripts of the training audio, since these
are the tokens that verification accepts. Its decoder states over the transcripts are computed once
and stored, so that an epoch runs little more than the heads. After training, the draft tree is
chosen from the heads' accuracies on held-out samples.

Source: Cai et al. 2024, arXiv:2401.10774, sections 2.2 and 3.1. The loss is Whisper-Medusa's: the
mean over heads of the cross-entropy of head k at position t with the label at t + k.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutput

from mmdecode import registry
from mmdecode.asr.options import TranscribeOptions
from mmdecode.asr.recognizers.whisper_prompts import Prompts, processors
from mmdecode.draft.medusa import Medusa, MedusaHeads
from mmdecode.draft.trees import choose_tree, expected_length
from mmdecode.engine.adapter import Prompt
from mmdecode.engine.cache import RaggedCache
from mmdecode.engine.masks import block_mask, chain
from mmdecode.errors import InputError, OptionError
from mmdecode.quantization.models import refuse_learning
from mmdecode.runs.files import (
    LISTING,
    marked_json,
    refuse_foreign_in,
    remove_empty,
    write_file,
    write_folder,
)


@dataclass(frozen=True, kw_only=True)
class MedusaOptions:
    """Settings of the training of Medusa heads for Whisper.

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
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "block"):
            raise OptionError(f"kind={self.kind!r}; expected 'linear' or 'block'")


@dataclass
class Sample:
    """Transcript of a recording with the states that the heads are trained on.

    Attributes:
        ids: Token ids of prompt and transcript, with the end-of-sequence token, ``(L,)``.
        prompt: Number of prompt tokens, which have no loss.
        hidden: Last decoder states of the model, ``(L, H)`` float16.
        audio: Encoder states of the model, ``(S, H)`` float16.
    """

    ids: Tensor
    prompt: int
    hidden: Tensor
    audio: Tensor


def head_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Computes the mean cross-entropy of each head, ``(heads,)``; NaN for a head without labels.

    Args:
        logits: Logits ``(heads, B, T, V)``; head k at position t predicts ``labels[:, t + k]``.
        labels: Labels ``(B, T)``; -100 for no loss.
    """
    losses = []
    for shift, rows in enumerate(logits):
        wanted = moved(labels, shift, rows.shape[1])
        losses.append(
            F.cross_entropy(rows.flatten(0, 1).float(), wanted.flatten(), ignore_index=-100)
        )
    return torch.stack(losses)


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


@torch.no_grad()
def collect(
    model: Any, batches: Iterable[tuple[Tensor, Tensor]], decoder: Any, max_new_tokens: int
) -> Iterator[Sample]:
    """Transcribes audio with a model and yields its transcripts and states.

    Args:
        model: A Whisper.
        batches: Pairs of features ``(B, mel, frames)`` and unpadded decoder prompts ``(B, P)``.
        decoder: Decoder that generates greedily; every exact drafter gives the same samples.
        max_new_tokens: Maximum length of a transcript in tokens.
    """
    eos = model.generation_config.eos_token_id
    eos = eos[0] if isinstance(eos, list) else eos
    device = next(model.parameters()).device
    for features, prompt in batches:
        prompt = prompt.to(device)
        audio = model.get_encoder()(features.to(device, model.dtype)).last_hidden_state
        width = prompt.shape[1]
        ids = greedy(model, audio, prompt, decoder, max_new_tokens)
        hidden = model.get_decoder()(input_ids=ids, encoder_hidden_states=audio, use_cache=False)
        for row, tokens in enumerate(ids):
            ends = (tokens[width:] == eos).nonzero()
            length = width + (int(ends[0]) + 1 if len(ends) else tokens.shape[0] - width)
            yield Sample(
                ids=tokens[:length].cpu().clone(),
                prompt=width,
                hidden=hidden.last_hidden_state[row, :length].half().cpu(),
                audio=audio[row].half().cpu(),
            )


def greedy(model: Any, audio: Tensor, prompt: Tensor, decoder: Any, max_new_tokens: int) -> Tensor:
    """Transcribes encoder states greedily, with Whisper's logits processors.

    Args:
        model: A Whisper.
        audio: Encoder states, ``(B, S, H)``.
        prompt: Decoder prompts, ``(B, P)``.
        decoder: Decoder, with or without a drafter.
        max_new_tokens: Maximum length of a transcript in tokens.

    Returns:
        Token ids of prompts and transcripts, ``(B, L)``.
    """
    config = copy.deepcopy(model.generation_config)
    width = prompt.shape[1]
    config.update(max_length=width + max_new_tokens, max_new_tokens=None, do_sample=False)
    timestamps = int(prompt[0, -1]) != config.no_timestamps_token_id
    rules = processors(config, width, TranscribeOptions(timestamps=timestamps), 0.0)
    return decoder(
        model,
        prompt,
        logits_processor=rules,
        stopping_criteria=StoppingCriteriaList(),
        generation_config=config,
        encoder_outputs=BaseModelOutput(last_hidden_state=audio),
    )


def train_heads(
    model: Any, samples: Sequence[Sample], options: MedusaOptions, state_file: Path | None = None
) -> tuple[Medusa, dict[str, Any]]:
    """Trains heads for a model; a tenth of the samples, at least 10, is held out.

    Args:
        model: The Whisper that the heads draft for; its weights stay frozen.
        samples: Transcripts and states, as `collect` yields them.
        options: Settings.
        state_file: File of the training state, written after each epoch; an interrupted training
            resumes from it. ``None``: no state is written.

    Returns:
        The drafter with its draft tree; and a report with settings, accuracies by head and rank,
        and expected tokens per pass on held-out samples.

    Raises:
        InputError: There are fewer than 20 samples.
        OptionError: ``state_file`` is of a training with other settings or samples.
    """
    from rich.progress import track

    if len(samples) < 20:
        raise InputError(f"{len(samples)} training samples; expected at least 20: add recordings")
    torch.manual_seed(options.seed)
    adapter = registry.adapter_for(model)
    width = samples[0].hidden.shape[-1]
    device = next(model.parameters()).device
    heads = MedusaHeads(options.num_heads, options.num_layers, width).to(device)
    block = None
    if options.kind == "block":
        block = adapter.extra_layer(model.config)
        block.load_state_dict(adapter.layers()[-1].state_dict())
        block.to(device)
    order = torch.randperm(len(samples)).tolist()
    held = max(10, len(samples) // 10)
    valid, rest = [samples[i] for i in order[:held]], [samples[i] for i in order[held:]]
    parameters = [*heads.parameters(), *(block.parameters() if block is not None else ())]
    optimizer = torch.optim.AdamW(parameters, lr=options.peak_rate, weight_decay=0.01)
    steps = options.epochs * math.ceil(len(rest) / options.batch)
    done, best, kept = 0, -1.0, None
    modules = nn.ModuleDict({"heads": heads} | ({"block": block} if block is not None else {}))
    key = json.dumps([asdict(options), len(samples), int(sum(s.ids.sum() for s in samples))])
    if state_file is not None and state_file.exists():
        state = torch.load(state_file, weights_only=True)
        if state["key"] != key:
            raise OptionError(
                f"{state_file} is the state of a training with other settings or data; delete it "
                "to start again, or give the same settings and data to resume"
            )
        modules.load_state_dict(state["modules"])
        optimizer.load_state_dict(state["optimizer"])
        done, best, kept = state["done"], state["best"], state["kept"]
    for epoch in track(range(done, options.epochs), description=f"{options.kind} heads"):
        generator = torch.Generator().manual_seed(options.seed * 1000 + epoch)
        shuffled = torch.randperm(len(rest), generator=generator).tolist()
        modules.train()
        for start in range(0, len(rest), options.batch):
            step = epoch * math.ceil(len(rest) / options.batch) + start // options.batch
            rate = 0.5 * (1 + math.cos(math.pi * step / steps)) * min(1, (step + 1) / 50)
            for group in optimizer.param_groups:
                group["lr"] = options.peak_rate * (0.02 + 0.98 * rate)
            batch = _pad([rest[i] for i in shuffled[start : start + options.batch]], device)
            logits = _forward(adapter, heads, block, batch)
            losses = head_losses(logits, _targets(batch))
            losses.nanmean().backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        modules.eval()
        hits = ranks(adapter, heads, block, valid, options)
        score = 1 + float((hits[:, :, 0]).cumprod(0).float().sum(0).mean())
        if score > best:
            best, kept = score, copy.deepcopy(modules.state_dict())
        if state_file is not None:
            write_state(
                state_file,
                {
                    "key": key,
                    "modules": modules.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "done": epoch + 1,
                    "best": best,
                    "kept": kept,
                },
            )
    if kept is not None:
        modules.load_state_dict(kept)
    modules.eval()
    hits = ranks(adapter, heads, block, valid, options)
    paths = choose_tree(hits, options.nodes) if options.nodes else None
    report = {
        "options": asdict(options),
        "samples": len(samples),
        "accuracy_by_head_and_rank": [
            [round(float(r), 4) for r in h.float().mean(0)] for h in hits
        ],
        "expected_tokens_per_pass_chain": round(best, 3),
        "expected_tokens_per_pass_tree": round(expected_length(hits, paths), 3) if paths else None,
    }
    return Medusa(heads, block, paths), report


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Writes the training state atomically."""
    write_folder(path.parent, lambda into: torch.save(state, into / path.name))


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
        logits = _forward(adapter, heads, block, batch)
        top = logits.topk(options.top, dim=-1).indices  # (K, B, T, top)
        targets = _targets(batch)
        asked = targets != -100
        rows = []
        for shift in range(len(top)):
            wanted = moved(targets, shift, targets.shape[1])
            rows.append((top[shift] == wanted[..., None])[asked])
        found.append(torch.stack(rows).cpu())
    return torch.cat(found, 1)


@dataclass
class _Batch:
    ids: Tensor  # (B, L), 0 after the end
    length: Tensor  # (B,)
    prompt: Tensor  # (B,)
    hidden: Tensor  # (B, L, H)
    audio: Tensor  # (B, S, H)


def _pad(samples: Sequence[Sample], device: torch.device) -> _Batch:
    longest = max(len(s.ids) for s in samples)
    padding = [longest - len(s.ids) for s in samples]
    return _Batch(
        ids=torch.stack([F.pad(s.ids, (0, n)) for s, n in zip(samples, padding, strict=True)]).to(
            device
        ),
        length=torch.tensor([len(s.ids) for s in samples], device=device),
        prompt=torch.tensor([s.prompt for s in samples], device=device),
        hidden=torch.stack(
            [F.pad(s.hidden, (0, 0, 0, n)) for s, n in zip(samples, padding, strict=True)]
        )
        .to(device)
        .float(),
        audio=torch.stack([s.audio for s in samples]).to(device).float(),
    )


def _targets(batch: _Batch) -> Tensor:
    """Returns the first head's labels, two positions ahead: the model itself predicts the next."""
    after = moved(batch.ids, 2, batch.ids.shape[1])
    position = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    asked = (position >= batch.prompt[:, None] - 1) & (position < batch.length[:, None] - 2)
    return after.masked_fill(~asked, -100)


def _forward(adapter: Any, heads: MedusaHeads, block: nn.Module | None, batch: _Batch) -> Tensor:
    """Computes the logits of all heads, ``(K, B, L, V)``."""
    hidden = batch.hidden
    if block is not None:
        rows, length = batch.ids.shape
        cache = RaggedCache(1, rows, hidden.device)
        past = adapter.open(
            cache, Prompt(ids=batch.ids, mask=batch.ids >= 0, inputs={"source": batch.audio})
        )
        zero = torch.zeros(rows, dtype=torch.long, device=hidden.device)
        cache.open(length)
        order = chain(length, hidden.device)
        mask = block_mask(zero, zero, *order, length, hidden.dtype)
        hidden = adapter.run_extra_layer(block, hidden, mask, past)
    flat = heads.logits(hidden.flatten(0, 1), adapter)
    return flat.view(flat.shape[0], *hidden.shape[:2], -1)


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
) -> dict[str, Any]:
    """Trains Medusa heads for a Whisper on audio files: ``mmdecode train medusa``.

    Args:
        model_name: The Whisper: folder, Hub id or ``zoo:NAME``.
        manifest: Folder of audio files, or table with a column ``path`` or ``audio`` of paths,
            absolute or relative to the table. Recordings are split into the model's windows.
        out: Folder of the heads; the training state is in ``out/state`` until the training ends.
        options: Settings.
        limit: Maximum number of recordings; ``None``: all.
        device: Device of the training.
        dtype: Dtype in which the model transcribes, see `mmdecode.checkpoints.dtype_of`; heads are
            trained in float32.
        language: Language of the recordings; used only if the checkpoint is multilingual.

    Returns:
        The report, also written to ``out/report.json``.
    """
    from mmdecode.asr.audio.reading import blocks
    from mmdecode.asr.output.inputs import recordings_in
    from mmdecode.asr.output.manifest import opened
    from mmdecode.asr.transcriber import load
    from mmdecode.decoder import Decoder

    refuse_foreign_in(out)
    entries = recordings_in(manifest, limit)
    model, processor = load(model_name, device, dtype)
    refuse_learning(model)
    model, dtype = model.eval(), str(model.dtype).removeprefix("torch.")
    extractor = processor.feature_extractor

    def windows() -> Iterator[tuple[Tensor, Tensor]]:
        waves: list[Any] = []
        for entry in entries:
            wave = np.concatenate(list(blocks(opened(entry), extractor.sampling_rate)))
            size = extractor.n_samples
            waves += [wave[i : i + size] for i in range(0, len(wave), size) if len(wave) - i > 1600]
        for index, start in enumerate(range(0, len(waves), 8)):
            batch = extractor(
                waves[start : start + 8], sampling_rate=extractor.sampling_rate, return_tensors="pt"
            )
            count = len(batch.input_features)
            yield batch.input_features, whisper_prompt(model, count, index % 2, language)

    began = time.time()
    samples = list(collect(model, windows(), Decoder(), model.config.max_target_positions - 8))
    state = out / "state"
    draft, report = train_heads(model.float(), samples, options, state / f"{options.kind}.pt")
    write_folder(out, lambda into: draft.save_pretrained(into, target_config(model)))
    report |= {"model": model_name, "dtype": dtype, "seconds": round(time.time() - began, 1)}
    write_file(out / "report.json", marked_json(report))
    for file in (*state.glob("*.pt"), state / LISTING):
        file.unlink(missing_ok=True)
    remove_empty([state])
    return report


def whisper_prompt(model: Any, rows: int, timestamps: int, language: str = "en") -> Tensor:
    """Returns equal decoder prompts for a batch, ``(rows, P)``.

    Args:
        model: A Whisper.
        rows: Batch size.
        timestamps: 1 for transcripts with timestamps, 0 without.
        language: Language of the audio; used only if the checkpoint is multilingual.
    """
    config = model.generation_config
    multilingual = getattr(config, "is_multilingual", False)
    options = TranscribeOptions(
        timestamps=bool(timestamps),
        language=language if multilingual else None,
        task="transcribe" if multilingual else None,
    )
    prompts = Prompts.of(config, options)
    return torch.tensor([prompts.initial(prompts.language)]).expand(rows, -1).clone()


def target_config(model: Any) -> dict[str, Any]:
    """Returns the part of the target's configuration that is saved with the heads.

    It suffices to build the additional decoder layer when the heads are loaded.
    """
    config = model.config
    return {"model_type": "whisper"} | {
        name: getattr(config, name)
        for name in (
            "d_model",
            "decoder_attention_heads",
            "decoder_ffn_dim",
            "decoder_layers",
            "encoder_attention_heads",
            "encoder_ffn_dim",
            "encoder_layers",
            "max_source_positions",
            "max_target_positions",
            "activation_function",
            "vocab_size",
            "num_mel_bins",
        )
    }

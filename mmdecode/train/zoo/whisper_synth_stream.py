"""Recipe of ``whisper-synth-320ms`` and ``-960ms``: LoRA adapters that make a Whisper causal.

Low-rank matrices on the projections of encoder self-attention, decoder self-attention and
cross-attention are trained on prefixes of windows, with the block mask that decoding uses: the
target is the text of the words that have ended in the prefix, then the end token. All other weights
stay as they are.

Word ends come from forced alignment of the synthesised sentences by the base's own aligner.

Source: Krichli et al. 2025, arXiv:2508.12301 (CarelessWhisper). Differs from it: prefixes end at
any state, not only at the end of a chunk, as the windows of a stream do; timestamps are learned
too, and a sentence that is not complete ends with the timestamp of its last word.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from transformers.modeling_outputs import BaseModelOutput

from mmdecode.asr.recognizers.whisper_features import Mel
from mmdecode.checkpoints import code_trusted, local_path
from mmdecode.models.causal_whisper import (
    CausalWhisperForConditionalGeneration,
    causal_form,
    window_features,
)
from mmdecode.runs.files import append_line, open_append, write_file, write_folder
from mmdecode.train.loop import boxed, say_float32, write_state
from mmdecode.train.speech_windows import WINDOW_S, synthesise_corpus
from mmdecode.train.zoo.aligned_windows import AlignedWindows, align_corpus
from mmdecode.train.zoo.whisper_synth import rate_at
from mmdecode.zoo.synthesis import SAMPLING_RATE

TARGETS = r".*\.layers\.\d+\.(self_attn|encoder_attn)\.(q|k|v|out)_proj"
"""Projections that the adapter changes, as a pattern of names."""


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Settings of the recipe.

    Attributes:
        base: The Whisper to adapt.
        chunk: Encoder states of a block, 0.04 s each.
        minutes: Duration of the training; the learning rate depends on the elapsed time.
        utterances: Number of synthesised sentences.
        rank: Rank of the low-rank matrices.
        peak_rate: Highest learning rate (AdamW).
        states: Encoder states per step; a batch has as many prefixes as fit.
        seed: Seed of the corpus and of the first weights; the windows differ in each run.
    """

    base: str = "zoo:whisper-synth"
    chunk: int = 8
    minutes: float = 60.0
    utterances: int = 12_000
    rank: int = 8
    peak_rate: float = 2e-3
    states: int = 3200
    seed: int = 0


class Sentence(NamedTuple):
    """A sentence in a window.

    Attributes:
        start_s: Its start in seconds.
        end_s: Its end in seconds.
        words: Its words, each with its end in seconds.
    """

    start_s: float
    end_s: float
    words: list[tuple[str, float]]


class PrefixWindows(AlignedWindows):
    """Sampler of windows with the ends of their words, and of their prefixes."""

    def window(self) -> tuple[Tensor, list[Sentence]]:
        """Samples the audio of a whole window, and its sentences; the last may be cut off."""
        rng, limit = self.rng, WINDOW_S * SAMPLING_RATE
        if rng.random() < 0.05:
            level = rng.choice([0.0, 1e-3, 1e-2, 1e-1, 1.0])
            return level * self.noise(limit), []
        lead = 0 if rng.random() < 0.3 else rng.randint(0, SAMPLING_RATE)
        wave, found = torch.zeros(lead), list[Sentence]()
        one = rng.random() < 0.25
        while len(wave) < limit and not (one and found):
            spoken, words = self.sentence()
            start_s = len(wave) / SAMPLING_RATE
            wave = torch.cat([wave, spoken])
            ends = [(word, start_s + end_s) for word, end_s in words]
            found.append(Sentence(start_s, len(wave) / SAMPLING_RATE, ends))
            wave = torch.cat([wave, torch.zeros(rng.randint(1600, 12000))])
        wave = F.pad(wave, (0, max(0, limit - len(wave))))[:limit]
        return self.damage(wave), found

    def target(self, sentences: list[Sentence], end_s: float) -> tuple[list[int], list[int]]:
        """Returns decoder input and targets for a prefix; -100: no loss.

        Args:
            sentences: Sentences of the window.
            end_s: End of the prefix, in seconds.
        """
        ids, rng = self.ids, self.rng
        if not sentences:
            return [ids.sot], [ids.no_speech]
        with_times = rng.random() < 0.7
        tokens = [ids.sot, ids.en, ids.transcribe]
        asked = [ids.en, -100]
        if not with_times:
            tokens.append(ids.no_timestamps)
            asked.append(-100)
        text = list[int]()
        for sentence in sentences:
            words = [word for word, word_end_s in sentence.words if word_end_s <= end_s]
            if not words:
                break
            whole = len(words) == len(sentence.words)
            own = self.text(" ".join(words))
            if with_times:
                stop_s = sentence.end_s if whole else sentence.words[len(words) - 1][1]
                own = [self.stamp(sentence.start_s), *own, self.stamp(min(stop_s, end_s))]
            text += own
        if with_times and not text:
            text = [ids.first_timestamp]
        tokens += text
        asked += [*text, ids.eot]
        if rng.random() < 0.1:
            before = [ids.prev, *self.text(" ".join(word for word, _ in self.sentence()[1]))]
            tokens, asked = before + tokens, [-100] * len(before) + asked
        return tokens, asked


class PrefixBatch(NamedTuple):
    """A step's prefixes, all of one length.

    Attributes:
        features: Log-mel features, ``(B, mels, 2 S + 1)``.
        ids: Decoder input, ``(B, L)``.
        targets: Targets, ``(B, L)``; -100: no loss.
    """

    features: Tensor
    ids: Tensor
    targets: Tensor


class PrefixStream(torch.utils.data.IterableDataset[PrefixBatch]):
    """Endless data set of batches.

    Args:
        folder: Folder of the corpus.
        processor: Processor of the model.
        options: Settings.
    """

    def __init__(self, folder: Path, processor: WhisperProcessor, options: StreamOptions) -> None:
        self.folder, self.processor, self.options = folder, processor, options

    def __iter__(self) -> Iterator[PrefixBatch]:
        torch.set_num_threads(1)
        windows = PrefixWindows(self.folder, self.processor, seed=time.time_ns() % 2**31)
        windows.refresh()
        per_window = 25 * WINDOW_S
        mel = Mel(self.processor.feature_extractor, 2 * per_window)
        while True:
            size = windows.rng.choice([per_window, windows.rng.randint(8, per_window)])
            yield self.batch(windows, mel, size)

    def batch(self, windows: PrefixWindows, mel: Mel, size: int) -> PrefixBatch:
        """Samples prefixes of ``size`` encoder states."""
        samples = size * 2 * mel.hop
        rows = []
        for _ in range(max(4, self.options.states // size)):
            wave, sentences = windows.window()
            rows.append((wave[:samples], *windows.target(sentences, samples / mel.rate)))
        width, eot = max(len(ids) for _, ids, _ in rows), windows.ids.eot
        return PrefixBatch(
            torch.stack([window_features(mel, wave) for wave, _, _ in rows]),
            torch.tensor([ids + [eot] * (width - len(ids)) for _, ids, _ in rows]),
            torch.tensor([asked + [-100] * (width - len(asked)) for _, _, asked in rows]),
        )


def causal(base: str, chunk: int) -> CausalWhisperForConditionalGeneration:
    """Returns a causal Whisper with the weights of a Whisper, before any training.

    Args:
        base: The Whisper: folder, Hub id or ``zoo:NAME``.
        chunk: Encoder states of a block.
    """
    model = WhisperForConditionalGeneration.from_pretrained(
        local_path(base), dtype=torch.float32, trust_remote_code=code_trusted()
    )
    return causal_form(model, chunk=chunk, base=base)


def train(options: StreamOptions, work: Path, out: Path) -> None:
    """Trains the adapter, or resumes its training.

    Args:
        options: Settings.
        work: Folder of the corpus, the training state and the log.
        out: Folder to write the adapter to.
    """
    import peft

    processor = WhisperProcessor.from_pretrained(
        local_path(options.base), trust_remote_code=code_trusted()
    )
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    lora = peft.LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules=TARGETS)
    model = peft.get_peft_model(causal(options.base, options.chunk), lora)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=options.peak_rate, weight_decay=0.0)
    state_file, step, spent, average = work / f"state-{options.chunk}.pt", 0, 0.0, 0.0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        peft.set_peft_model_state_dict(model, state["adapter"])
        optimizer.load_state_dict(state["optimizer"])
        step, spent, average = state["step"], state["spent"], state.get("loss", 0.0)

    def save() -> None:
        parts = {
            "adapter": peft.get_peft_model_state_dict(model),
            "optimizer": optimizer.state_dict(),
        }
        write_state(state_file, parts | {"step": step, "spent": spent, "loss": average})
        export(model, parts["adapter"], options, out)

    def note() -> None:
        row = {"step": step, "minutes": round(spent / 60, 2), "loss": round(average, 4)}
        with open_append(work / f"log-{options.chunk}.jsonl") as log:
            append_line(log, json.dumps(row).encode() + b"\n")

    loader = torch.utils.data.DataLoader(
        PrefixStream(work / "corpus", processor, options),
        batch_size=None,
        num_workers=1,
        prefetch_factor=4,
    )
    box, saved = options.minutes * 60, time.time()
    model.train()
    for batch, elapsed in boxed(loader, spent):
        spent = elapsed
        if spent >= box:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate_at(spent / box, step, options.peak_rate)
        loss = prefix_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        average = (
            float(loss.detach()) if step == 1 else 0.98 * average + 0.02 * float(loss.detach())
        )
        if step % 50 == 0:
            note()
        if time.time() - saved > 240:
            save()
            saved = time.time()
    note()
    save()


def prefix_loss(model: Any, batch: PrefixBatch) -> Tensor:
    """Computes the decoder's cross-entropy per token on prefixes."""
    states = model.get_encoder()(batch.features).last_hidden_state
    output = model(
        encoder_outputs=BaseModelOutput(last_hidden_state=states),
        decoder_input_ids=batch.ids,
        use_cache=False,
    )
    return F.cross_entropy(
        output.logits.float().flatten(0, 1), batch.targets.flatten(), ignore_index=-100
    )


def export(model: Any, adapter: dict[str, Tensor], options: StreamOptions, out: Path) -> None:
    """Writes the adapter in half precision, in peft's layout, with the causal configuration."""
    from safetensors.torch import save_file

    weights = {name: value.detach().half().contiguous() for name, value in adapter.items()}

    def fill(into: Path) -> None:
        model.get_base_model().config.save_pretrained(into)
        say_float32(into)
        adapter_config = model.peft_config["default"]
        adapter_config.base_model_name_or_path = options.base  # not a path of this machine
        adapter_config.save_pretrained(into)
        save_file(weights, into / "adapter_model.safetensors")
        write_file(into / "recipe.json", json.dumps(asdict(options), indent=2) + "\n")

    write_folder(out, fill)


def run(options: StreamOptions, work: Path, out: Path) -> dict[str, Any]:
    """Synthesises and aligns the corpus, and trains the adapter; resumable; needs espeak-ng."""
    synthesise_corpus(work / "corpus", options.utterances, options.seed)
    align_corpus(work / "corpus", options.base)
    train(options, work, out)
    last = (work / f"log-{options.chunk}.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return {"folder": str(out)} | json.loads(last)

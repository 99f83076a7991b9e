"""Training data of ``zoo:whisper-synth``: 8-second windows of synthetic speech, augmented.

A window has one or more sentences with pauses; the last may be cut off at the window's end.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor
from transformers import WhisperFeatureExtractor, WhisperProcessor, WhisperTokenizer

from mmdecode.runs.files import write_arrays
from mmdecode.zoo import grammar, synthesis
from mmdecode.zoo.synthesis import SAMPLING_RATE

WINDOW_S = 8
HOP = 320  # samples between mel frames
STEP_S = 2 * HOP / SAMPLING_RATE  # seconds of one encoder frame and of one timestamp token
CTC_SYMBOLS = "_ 'abcdefghijklmnopqrstuvwxyz"  # index 0 is the blank


@dataclass(frozen=True)
class SpecialIds:
    """Ids of Whisper's special tokens."""

    eot: int
    sot: int
    en: int
    transcribe: int
    prev: int
    no_speech: int
    no_timestamps: int
    first_timestamp: int

    @classmethod
    def of(cls, tokenizer: WhisperTokenizer) -> SpecialIds:
        """Looks up the ids in a tokenizer."""
        names = (
            "endoftext startoftranscript en transcribe startofprev nospeech notimestamps".split()
        )
        ids = tokenizer.convert_tokens_to_ids([f"<|{n}|>" for n in names])
        eot, sot, en, transcribe, prev, no_speech, no_timestamps = ids
        return cls(eot, sot, en, transcribe, prev, no_speech, no_timestamps, no_timestamps + 1)


def ctc_ids(text: str) -> list[int]:
    """Converts a text to CTC labels, indices into `CTC_SYMBOLS`; other characters are dropped."""
    kept = re.sub(r"[^a-z' ]", "", text.lower())
    return [CTC_SYMBOLS.index(c) for c in " ".join(kept.split())]


def synthesise_corpus(folder: Path, count: int, seed: int, shard: int = 1000) -> None:
    """Synthesises training sentences and writes them in files of int16 samples; resumable.

    Args:
        folder: Folder of the files.
        count: Number of sentences.
        seed: Seed of sentences and voices.
        shard: Sentences per file.
    """
    engine = synthesis.Espeak()
    for start in track(range(0, count, shard), description="speaking"):
        path = folder / f"{start:07d}.npz"
        if path.exists():
            continue
        rng = random.Random(f"{seed}/{start}")
        texts = grammar.sentences(shard, seed * 1_000_003 + start, "train")
        waves = [engine.speak(t, synthesis.Voice.draw(rng)) for t in texts]
        samples = np.concatenate([(w * 32767).astype(np.int16) for w in waves])
        ends = np.cumsum([len(w) for w in waves])
        write_arrays(path, {"samples": samples, "ends": ends, "texts": np.array(texts)})


@dataclass
class Window:
    """Training example of one window, before batching.

    Attributes:
        wave: Samples at 16 kHz, ``(T,)``.
        ids: Decoder input: ids of the prompt and the transcript.
        targets: Target of each position of ``ids``; -100 for no loss.
        ctc_targets: CTC labels of the transcript; ``None`` if the last sentence is cut off or
            there is no speech.
    """

    wave: Tensor  # (T,)
    ids: list[int]
    targets: list[int]  # same length, -100 where there is no loss
    ctc_targets: list[int] | None  # None: a cut utterance, or no speech


class Windows:
    """Sampler of training windows from a corpus of synthesised sentences.

    A window has one sentence, several sentences (the last may be cut off) or no speech; noise and
    reverberation are added.

    Args:
        folder: Folder of the corpus, see `synthesise_corpus`.
        processor: Processor of the model.
        seed: Seed of the sampling.
    """

    def __init__(self, folder: Path, processor: WhisperProcessor, seed: int) -> None:
        self.folder, self.tokenizer = folder, processor.tokenizer
        self.ids = SpecialIds.of(processor.tokenizer)
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.shards: list[tuple[np.ndarray, np.ndarray, list[str]]] = []
        self.known: set[Path] = set()
        burst = torch.zeros(2 * WINDOW_S * SAMPLING_RATE)
        burst[:1600] = 0.1  # unit power reference: the pool is noise of root mean square 0.1
        self.noises = [
            synthesis.add_noise(burst, 0.0, self.generator, tilt=i / 40) - burst for i in range(64)
        ]

    def refresh(self) -> None:
        """Loads the files of the corpus that have been written since the last call."""
        for path in sorted(self.folder.glob("*[0-9].npz")):
            if path not in self.known:
                self.known.add(path)
                with np.load(path) as data:
                    self.shards.append((data["samples"], data["ends"], data["texts"].tolist()))

    def utterance(self) -> tuple[Tensor, str]:
        """Samples the waveform of a sentence of the corpus, and its text."""
        samples, ends, texts = self.rng.choice(self.shards)
        i = self.rng.randrange(len(texts))
        wave = samples[ends[i - 1] if i else 0 : ends[i]].astype(np.float32) / 32767
        return torch.from_numpy(wave), texts[i]

    def noise(self, length: int) -> Tensor:
        """Returns random coloured noise of ``length`` samples with a root mean square of 0.1."""
        track = self.rng.choice(self.noises)
        start = self.rng.randrange(len(track) - length)
        return track[start : start + length]

    def damage(self, wave: Tensor) -> Tensor:
        """Adds reverberation (20 % of calls) and noise (60 %), and lowers the volume at random."""
        rng = self.rng
        if rng.random() < 0.2:
            wave = synthesis.add_reverberation(wave, rng.uniform(0.1, 0.5), self.generator)
        if rng.random() < 0.6:
            loud = wave[wave.abs() > 0.02]
            level = float(loud.square().mean().sqrt()) if len(loud) else 0.1
            wave = wave + self.noise(len(wave)) * (10 * level * 10 ** (-rng.uniform(3, 30) / 20))
        return wave * 10 ** rng.uniform(-1, 0)

    def silence(self) -> Window:
        """Samples a window without speech; after the start token its target is no-speech."""
        level = self.rng.choice([0.0, 1e-3, 1e-2, 1e-1, 1.0])
        wave = level * self.noise(WINDOW_S * SAMPLING_RATE)
        return Window(wave, [self.ids.sot], [self.ids.no_speech], None)

    def draw(self, full: bool, prompted: bool = False) -> Window:
        """Samples a window.

        Args:
            full: Whether the window may have several sentences, up to 8 seconds, or no speech;
                otherwise it has one sentence.
            prompted: Whether another sentence is put before the transcript as its prompt.
        """
        rng, ids = self.rng, self.ids
        if full and rng.random() < 0.06:
            return self.silence()
        limit = WINDOW_S * SAMPLING_RATE
        joined = full and rng.random() < 0.75
        with_times = rng.random() < 0.55
        late = full and not joined and not with_times  # a first timestamp has to be early
        lead = rng.randint(0, 5 * SAMPLING_RATE if late else SAMPLING_RATE // 2)
        wave = torch.zeros(0 if rng.random() < 0.3 else lead)
        segments: list[tuple[float, float, str]] = []
        cut = None
        while True:
            spoken, text = self.utterance()
            start = len(wave)
            if start + len(spoken) > limit:
                if segments and with_times and start < limit - SAMPLING_RATE // 4:
                    cut = start / SAMPLING_RATE
                    wave = torch.cat([wave, spoken])[:limit]
                break
            wave = torch.cat([wave, spoken])
            segments.append((start / SAMPLING_RATE, len(wave) / SAMPLING_RATE, text))
            if not joined or rng.random() < 0.15:
                break
            wave = torch.cat([wave, torch.zeros(rng.randint(1600, 12000))])
            if len(wave) > limit - SAMPLING_RATE:
                break
        if cut is None:
            wave = torch.cat([wave, torch.zeros(rng.randint(0, SAMPLING_RATE // 2))])[:limit]
        if not segments:  # a single utterance longer than the window; never with this grammar
            return self.draw(full, prompted)
        wave = self.damage(wave)

        tokens = [ids.sot, ids.en, ids.transcribe]
        asked = [ids.en, -100]
        if with_times:
            for start_s, end_s, text in segments:
                tokens += [self.stamp(start_s), *self.text(text), self.stamp(end_s)]
            if cut is not None:
                tokens += [self.stamp(cut)]
            asked = asked + tokens[3:] + [ids.eot]
        else:
            tokens += [ids.no_timestamps] + [t for s in segments for t in self.text(s[2])]
            asked = [*asked, -100, *tokens[4:], ids.eot]
        if prompted:
            before = [ids.prev, *self.text(self.utterance()[1])]
            tokens, asked = before + tokens, [-100] * len(before) + asked
        ctc_targets = None if cut is not None else ctc_ids(" ".join(s[2] for s in segments))
        return Window(wave, tokens, asked, ctc_targets)

    def shift(self, batch: Batch) -> Batch:
        """Moves short windows to a random position in the 8-second window, all by the same offset.

        Encoder positions and timestamps are shifted. Without this, the encoder learns to recognise
        speech at the beginning of a window only: the same sentence two seconds later was not
        recognised.
        """
        room = round(WINDOW_S / STEP_S) - batch.features.shape[-1] // 2
        batch.offset = self.rng.randint(0, max(room, 0))
        first, last = self.ids.first_timestamp, self.ids.first_timestamp + round(WINDOW_S / STEP_S)
        for ids in (batch.ids, batch.targets):
            ids += torch.where(ids >= first, batch.offset, 0)
            ids.clamp_(max=last)
        return batch

    def stamp(self, seconds: float) -> int:
        """Returns the id of the timestamp token nearest to a time in seconds."""
        return self.ids.first_timestamp + min(round(seconds / STEP_S), round(WINDOW_S / STEP_S))

    def text(self, text: str) -> list[int]:
        """Encodes a text as part of a transcript: with a leading space, without special tokens."""
        return self.tokenizer.encode(" " + text, add_special_tokens=False)


@dataclass
class Batch:
    """Padded tensors of a training step; shapes are in the comments."""

    features: Tensor  # (B, 80, frames)
    ids: Tensor  # (B, L)
    targets: Tensor  # (B, L)
    ctc_targets: Tensor  # concatenated
    ctc_lengths: Tensor  # (B,)
    ctc_rows: Tensor  # (B,) bool
    offset: int = 0  # encoder position of the first frame


def collate(
    windows: list[Window], extractor: WhisperFeatureExtractor, full: bool, pad: int
) -> Batch:
    """Batches windows and computes their features.

    Args:
        windows: The windows.
        extractor: Feature extractor of the model.
        full: Whether to pad to the model's 8-second window instead of the longest window.
        pad: Padding id of the decoder input.
    """
    unit = 16 * 2 * HOP
    longest, size = max(len(w.wave) for w in windows), WINDOW_S * SAMPLING_RATE
    if not full:
        size = min(-(-longest // unit) * unit, size)
    features = extractor(
        [w.wave.numpy() for w in windows],
        sampling_rate=SAMPLING_RATE,
        max_length=size,
        return_tensors="pt",
    ).input_features
    length = max(len(w.ids) for w in windows)
    ids = torch.tensor([w.ids + [pad] * (length - len(w.ids)) for w in windows])
    targets = torch.tensor([w.targets + [-100] * (length - len(w.targets)) for w in windows])
    ctc_targets = [w.ctc_targets or [] for w in windows]
    return Batch(
        features=features,
        ids=ids,
        targets=targets,
        ctc_targets=torch.tensor([c for row in ctc_targets for c in row]),
        ctc_lengths=torch.tensor([len(row) for row in ctc_targets]),
        ctc_rows=torch.tensor([bool(row) for row in ctc_targets]),
    )


class Stream(torch.utils.data.IterableDataset):
    """Endless data set of batches, with more 8-second windows the longer training has run.

    Args:
        folder: Folder of the corpus, see `synthesise_corpus`.
        processor: Processor of the model.
        batch: Number of short windows in a batch; batches of 8-second windows have half as many.
        clock: Elapsed share of the training time, 0 to 1, in shared memory.
    """

    def __init__(
        self, folder: Path, processor: WhisperProcessor, batch: int, clock: Tensor
    ) -> None:
        self.folder, self.processor, self.batch, self.clock = folder, processor, batch, clock

    def __iter__(self) -> Iterator[Batch]:
        torch.set_num_threads(1)
        windows = Windows(self.folder, self.processor, seed=time.time_ns() % 2**31)
        extractor = self.processor.feature_extractor
        pad = windows.ids.eot
        for step in range(10**9):
            if step % 200 == 0:
                windows.refresh()
            progress = float(self.clock)
            share = 0.1 if progress < 0.3 else 0.3 if progress < 0.75 else 0.7
            full = windows.rng.random() < share
            count = self.batch // (2 if full else 1)
            prompted = windows.rng.random() < 0.1
            sampled = [windows.draw(full, prompted) for _ in range(count)]
            batch = collate(sampled, extractor, full, pad)
            yield batch if full else windows.shift(batch)

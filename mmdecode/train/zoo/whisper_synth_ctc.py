"""Recipe of ``zoo:whisper-synth-ctc``: a CTC head on the decoder's subwords, with case and marks.

The head reads the encoder's states, which stay as they are. Its labels are the sentences of
synthetic speech; every epoch has other windows, since a few thousand are learned by heart. Windows
of silence, noise and music have no label, so that blanks mean that nobody speaks.

A head that learns where it likes has its labels half a second late. So it learns some epochs more
with the times of the words, where a label outside its word costs, on windows that have pauses with
noise and music between sentences.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmdecode.asr.transcriber import Transcriber
from mmdecode.errors import MMDecodeError
from mmdecode.runs.files import marked_json, write_file, write_folder
from mmdecode.train.drafters.ctc import CTCOptions, Sample, train_head
from mmdecode.train.drafters.recordings import forget
from mmdecode.train.speech_windows import STEP_S, WINDOW_S, synthesise_corpus
from mmdecode.train.zoo.aligned_windows import AlignedWindows, align_corpus
from mmdecode.zoo import synthesis
from mmdecode.zoo.synthesis import SAMPLING_RATE


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """Settings of the recipe.

    Attributes:
        base: The Whisper that the head is for.
        utterances: Number of synthesised sentences.
        windows: Number of windows of an epoch.
        quiet: Share of them without speech.
        head: Settings of the head.
        timed_epochs: Number of epochs with times of words, after those of ``head``.
        timed_rate: Their highest learning rate.
        seed: Seed of the windows.
    """

    base: str = "zoo:whisper-synth"
    utterances: int = 12_000
    windows: int = 8000
    quiet: float = 0.1
    head: CTCOptions = field(
        default_factory=lambda: CTCOptions(
            vocabulary=2000,
            strides=(1, 2, 1, 1, 1),
            kernel=15,
            feed_forward=256,
            epochs=25,
            peak_rate=4e-3,
        )
    )
    timed_epochs: int = 14
    timed_rate: float = 2e-3
    seed: int = 17

    @property
    def rounds(self) -> list[CTCOptions]:
        """Settings of both rounds of training, of which the second has labels with times."""
        first = replace(self.head, seed=self.seed)
        return [first, replace(first, epochs=self.timed_epochs, peak_rate=self.timed_rate)]


Labels = tuple[list[int], "list[tuple[int, int]] | None"]
"""Text tokens of a window, and the encoder states of each where they are known."""

EARLY_S, LATE_S = 0.08, 0.12
"""Seconds before and after a word in which it may be labelled."""


TUNES = 64
"""Number of pieces of music, of which windows have parts."""


@cache
def _tune(number: int) -> np.ndarray:
    return synthesis.music(2 * WINDOW_S, random.Random(number))


class LabelledWindows(AlignedWindows):
    """Sampler of windows with the labels of a CTC head."""

    def music(self, size: int) -> Tensor:
        """Returns music of ``size`` samples, at most ``2 * WINDOW_S`` seconds, loud or soft."""
        tune = _tune(self.rng.randrange(TUNES))
        start = self.rng.randint(0, len(tune) - size)
        return torch.from_numpy(tune[start : start + size]) * 10 ** self.rng.uniform(-1, 0)

    def quiet(self) -> Tensor:
        """Samples a window without speech: silence, noise, or music, sometimes with noise."""
        rng = self.rng
        if rng.random() < 0.5:
            return self.silence().wave
        wave = self.music(WINDOW_S * SAMPLING_RATE)
        noise = self.noise(len(wave)) * 10 ** rng.uniform(-2, 0)
        return wave + (noise if rng.random() < 0.3 else 0.0)

    def spoken(self) -> tuple[Tensor, Labels]:
        """Samples a window with speech, whose labels have no times."""
        while True:
            window = self.draw(self.rng.random() < 2 / 3)
            text = [token for token in window.targets if 0 <= token < self.ids.eot]
            if not text or window.ctc_targets is not None:  # else its last sentence is cut off
                return window.wave, (text, None)

    def pause(self, seconds: float) -> Tensor:
        """Samples a pause: silence, noise or music."""
        size, kind = round(seconds * SAMPLING_RATE), self.rng.random()
        if kind < 0.4:
            return torch.zeros(size)
        if kind < 0.6:
            return self.noise(size) * 10 ** self.rng.uniform(-2, 0)
        return self.music(size)

    def timed(self) -> tuple[Tensor, Labels]:
        """Samples a window with speech and pauses, whose first and last word may be cut off."""
        rng = self.rng
        skipped_s = rng.uniform(0, 3) if rng.random() < 0.25 else 0.0
        whole_s, alone = skipped_s + WINDOW_S, rng.random() < 0.3
        wave = self.pause(rng.choice((0.0, rng.uniform(0, 0.5), rng.uniform(0, 5))))
        text, spans = list[int](), list[tuple[int, int]]()
        while len(wave) < whole_s * SAMPLING_RATE:
            spoken, words = self.sentence()
            start_s = len(wave) / SAMPLING_RATE - skipped_s
            ends = [start_s + end_s for _, end_s in words]
            for (word, _), begin_s, end_s in zip(words, [start_s, *ends], ends, strict=False):
                if begin_s >= 0 and end_s <= WINDOW_S:
                    tokens = self.text(word)
                    first, last = ((begin_s - EARLY_S) / STEP_S, (end_s + LATE_S) / STEP_S)
                    text += tokens
                    spans += [(max(0, int(first)), int(last))] * len(tokens)
            usual = rng.random() < 0.8 and not alone
            pause = self.pause(rng.uniform(0.5, WINDOW_S if alone else 4.0))
            wave = torch.cat(
                [wave, spoken, torch.zeros(rng.randint(1600, 12000)) if usual else pause]
            )
        first = round(skipped_s * SAMPLING_RATE)
        return self.damage(wave[first : first + WINDOW_S * SAMPLING_RATE]), (text, spans)


class EncodedWindows(torch.utils.data.IterableDataset[tuple[list[Labels], np.ndarray]]):
    """Data set of encoded windows of one epoch after another, in batches.

    The windows of an epoch depend on the seed and the epoch alone. A batch is a list of labels and
    an array of states, ``(B, S, H)``: arrays pass between processes without files.

    Args:
        corpus: Folder of the corpus.
        options: Settings of the recipe.
        number: Number of the round, from 0.
        first: First epoch.
    """

    def __init__(self, corpus: Path, options: HeadOptions, number: int, first: int) -> None:
        self.corpus, self.options, self.number, self.first = corpus, options, number, first
        self.head = options.rounds[number]

    def __iter__(self) -> Iterator[tuple[list[Labels], np.ndarray]]:
        torch.set_num_threads(1)
        recognizer = Transcriber.from_pretrained(self.options.base, device="cpu").recognizer
        windows = LabelledWindows(self.corpus, recognizer.processor, self.options.seed)
        windows.refresh()
        if not windows.shards:
            raise MMDecodeError(f"no corpus in {self.corpus}")
        before = sum(one.epochs for one in self.options.rounds[: self.number])
        for epoch in range(before + self.first, before + self.head.epochs):
            windows.rng.seed(f"{self.options.seed}/{epoch}")
            windows.generator.manual_seed(self.options.seed * 1000 + epoch)
            yield from self.epoch(windows, recognizer)

    @torch.no_grad()
    def epoch(
        self, windows: LabelledWindows, recognizer: Any
    ) -> Iterator[tuple[list[Labels], np.ndarray]]:
        """Yields the batches of an epoch."""
        for start in range(0, self.options.windows, self.head.batch):
            size = min(self.head.batch, self.options.windows - start)
            sampled = [self.draw(windows) for _ in range(size)]
            waves = [wave.numpy() for wave, _ in sampled]
            encoded = recognizer.encode(recognizer.features(waves), [WINDOW_S] * size)
            yield [labels for _, labels in sampled], encoded.states.half().numpy()

    def draw(self, windows: LabelledWindows) -> tuple[Tensor, Labels]:
        """Samples a window with its labels."""
        if windows.rng.random() < self.options.quiet:
            return windows.quiet(), ([], [] if self.number else None)
        return windows.timed() if self.number else windows.spoken()


class EpochSamples:
    """Samples of each epoch; another process draws and encodes those of the next one.

    Args:
        corpus: Folder of the corpus.
        options: Settings of the recipe.
        number: Number of the round, from 0.
    """

    def __init__(self, corpus: Path, options: HeadOptions, number: int = 0) -> None:
        self.corpus, self.options, self.number = corpus, options, number
        self._next = -1
        self._batches: Iterator[tuple[list[Labels], np.ndarray]] = iter(())

    def __call__(self, epoch: int) -> list[Sample]:
        """Returns the samples of an epoch."""
        data = EncodedWindows(self.corpus, self.options, self.number, epoch)
        count = -(-self.options.windows // data.head.batch)
        if epoch != self._next:
            loader: Any = torch.utils.data.DataLoader(
                data,
                batch_size=None,
                collate_fn=tuple,
                num_workers=1,
                prefetch_factor=count,
            )
            self._batches = iter(loader)
        self._next = epoch + 1
        return [
            Sample(text, torch.from_numpy(states[row]), spans)
            for labels, states in islice(self._batches, count)
            for row, (text, spans) in enumerate(labels)
        ]


def run(options: HeadOptions, work: Path, out: Path) -> dict[str, Any]:
    """Synthesises and aligns speech, and trains the head; needs espeak-ng; resumable.

    Args:
        options: Settings.
        work: Folder of the corpus, see `mmdecode.train.zoo.whisper_synth`, and of the states of the
            training, in ``ctc``, until it ends.
        out: Folder of the head.
    """
    synthesise_corpus(work / "corpus", options.utterances, options.seed)
    align_corpus(work / "corpus", options.base)
    recognizer = Transcriber.from_pretrained(options.base, device="cpu").recognizer
    state, head, reports = work / "ctc", None, list[dict[str, Any]]()
    for number, settings in enumerate(options.rounds):
        samples = EpochSamples(work / "corpus", options, number)
        head, report = train_head(
            recognizer.model,
            recognizer.tokenizer,
            samples(0),
            settings,
            state / f"head-{number}.pt",
            samples,
            head,
        )
        reports.append(report)
    assert head is not None, "there is a first round"
    write_folder(out, head.save_pretrained)
    write_file(out / "report.json", marked_json({"rounds": reports}))
    forget(state)
    return {"folder": str(out)} | reports[-1]

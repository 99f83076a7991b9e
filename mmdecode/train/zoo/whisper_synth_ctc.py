"""Recipe of ``zoo:whisper-synth-ctc``: a CTC head on the decoder's subwords, with case and marks.

The head reads the encoder's states, which stay as they are. Its labels are the sentences of
synthetic speech; every epoch has other windows, since a few thousand are learned by heart. Windows
of silence, noise and music have no label, so that blanks mean that nobody speaks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
from mmdecode.train.speech_windows import WINDOW_S, Windows, synthesise_corpus
from mmdecode.zoo import synthesis


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """Settings of the recipe.

    Attributes:
        base: The Whisper that the head is for.
        utterances: Number of synthesised sentences.
        windows: Number of windows of an epoch.
        quiet: Share of them without speech.
        head: Settings of the head.
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
    seed: int = 17


def quiet_window(windows: Windows) -> Tensor:
    """Samples a window without speech: silence, noise, or music, sometimes with noise."""
    rng = windows.rng
    if rng.random() < 0.5:
        return windows.silence().wave
    wave = torch.from_numpy(synthesis.music(WINDOW_S, rng)) * 10 ** rng.uniform(-1, 0)
    noise = windows.noise(len(wave)) * 10 ** rng.uniform(-2, 0)
    return wave + (noise if rng.random() < 0.3 else 0.0)


class EncodedWindows(torch.utils.data.IterableDataset[tuple[list[list[int]], np.ndarray]]):
    """Data set of encoded windows of one epoch after another, in batches.

    The windows of an epoch depend on the seed and the epoch alone. A batch is a list of labels and
    an array of states, ``(B, S, H)``: arrays pass between processes without files.

    Args:
        corpus: Folder of the corpus.
        options: Settings of the recipe.
        first: First epoch.
    """

    def __init__(self, corpus: Path, options: HeadOptions, first: int) -> None:
        self.corpus, self.options, self.first = corpus, options, first

    def __iter__(self) -> Iterator[tuple[list[list[int]], np.ndarray]]:
        torch.set_num_threads(1)
        recognizer = Transcriber.from_pretrained(self.options.base, device="cpu").recognizer
        windows = Windows(self.corpus, recognizer.processor, self.options.seed)
        windows.refresh()
        if not windows.shards:
            raise MMDecodeError(f"no corpus in {self.corpus}")
        for epoch in range(self.first, self.options.head.epochs):
            windows.rng.seed(f"{self.options.seed}/{epoch}")
            windows.generator.manual_seed(self.options.seed * 1000 + epoch)
            yield from self.epoch(windows, recognizer)

    @torch.no_grad()
    def epoch(self, windows: Windows, recognizer: Any) -> Iterator[tuple[list[Any], np.ndarray]]:
        """Yields the batches of an epoch."""
        for start in range(0, self.options.windows, self.options.head.batch):
            size = min(self.options.head.batch, self.options.windows - start)
            sampled = [self.draw(windows) for _ in range(size)]
            waves = [wave.numpy() for wave, _ in sampled]
            encoded = recognizer.encode(recognizer.features(waves), [WINDOW_S] * size)
            yield [text for _, text in sampled], encoded.states.half().numpy()

    def draw(self, windows: Windows) -> tuple[Tensor, list[int]]:
        """Samples a window, and the text tokens of its label."""
        if windows.rng.random() < self.options.quiet:
            return quiet_window(windows), []
        while True:
            window = windows.draw(windows.rng.random() < 2 / 3)
            text = [token for token in window.targets if 0 <= token < windows.ids.eot]
            if not text or window.ctc_targets is not None:  # else its last sentence is cut off
                return window.wave, text


class EpochSamples:
    """Samples of each epoch; another process draws and encodes those of the next one.

    Args:
        corpus: Folder of the corpus.
        options: Settings of the recipe.
    """

    def __init__(self, corpus: Path, options: HeadOptions) -> None:
        self.corpus, self.options = corpus, options
        self._next = -1
        self._batches: Iterator[tuple[list[list[int]], np.ndarray]] = iter(())

    def __call__(self, epoch: int) -> list[Sample]:
        """Returns the samples of an epoch."""
        count = -(-self.options.windows // self.options.head.batch)
        if epoch != self._next:
            loader: Any = torch.utils.data.DataLoader(
                EncodedWindows(self.corpus, self.options, epoch),
                batch_size=None,
                collate_fn=tuple,
                num_workers=1,
                prefetch_factor=count,
            )
            self._batches = iter(loader)
        self._next = epoch + 1
        return [
            Sample(text, torch.from_numpy(states[row]))
            for texts, states in islice(self._batches, count)
            for row, text in enumerate(texts)
        ]


def run(options: HeadOptions, work: Path, out: Path) -> dict[str, Any]:
    """Synthesises speech and trains the head; needs espeak-ng; resumable.

    Args:
        options: Settings.
        work: Folder of the corpus, see `mmdecode.train.zoo.whisper_synth`, and of the state of the
            training, in ``ctc``, until it ends.
        out: Folder of the head.
    """
    synthesise_corpus(work / "corpus", options.utterances, options.seed)
    options = replace(options, head=replace(options.head, seed=options.seed))
    recognizer = Transcriber.from_pretrained(options.base, device="cpu").recognizer
    samples, state = EpochSamples(work / "corpus", options), work / "ctc"
    head, report = train_head(
        recognizer.model,
        recognizer.tokenizer,
        samples(0),
        options.head,
        state / "head.pt",
        samples,
    )
    write_folder(out, head.save_pretrained)
    write_file(out / "report.json", marked_json(report))
    forget(state)
    return {"folder": str(out)} | report

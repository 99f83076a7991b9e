"""Two decoders that ship no weights: monotonic segmental attention, and Mask-CTC.

    python benchmarks/alternatives.py --work DIR --page docs/alternatives.md   # CPU, two hours

Both are trained on the frozen encoder of the zoo's Whisper, each for some minutes, on windows of
one or two sentences of the corpus of its recipe (made in DIR if it is not there; needs espeak-ng),
and transcribe the shipped clips that fit into one window, beside the model's own decoder and its
CTC head.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ctc import HEAD, head_texts, score, with_interval
from pages import publish, table, warn_if_busy, write_result
from streaming import MODEL, RATE, Speech
from torch import Tensor, nn

from mmdecode.asr import Transcriber
from mmdecode.errors import run_script
from mmdecode.evaluation.speed.stopwatch import load, machine
from mmdecode.models.ctc_head import CTCHead
from mmdecode.models.mask_ctc import MaskedDecoder, aligned_cross_entropy, confidences, filled
from mmdecode.models.segmental import Recorded, SegmentalDecoder, search
from mmdecode.train.loop import progress
from mmdecode.train.speech_windows import STEP_S, WINDOW_S, synthesise_corpus
from mmdecode.train.zoo.aligned_windows import AlignedWindows, align_corpus
from mmdecode.zoo.speech import speech_test


@dataclass
class Example:
    """A sentence.

    Attributes:
        states: Encoder states of its audio, ``(S, H)``.
        labels: Indices of the head's subwords, ``(L,)``.
        stops: Frame after each label, ``(L,)``, increasing.
    """

    states: Tensor
    labels: Tensor
    stops: Tensor


def indices(head: CTCHead) -> dict[int, int]:
    """Index of each token id among the head's subwords."""
    return {token: index for index, token in enumerate(head.ids.tolist())}


def window(windows: AlignedWindows) -> tuple[Tensor, list[tuple[str, float, float]]]:
    """One or two sentences with pauses, and their words with begin and end in seconds."""
    rng = windows.rng
    parts, words = [torch.zeros(int(rng.uniform(0, 0.5) * RATE))], []
    for _ in range(rng.choice((1, 2))):
        wave, own = windows.sentence()
        begin_s = at_s = sum(map(len, parts)) / RATE
        for word, end_s in own:
            words.append((word, begin_s, at_s + end_s))
            begin_s = at_s + end_s
        parts += [wave, torch.zeros(int(rng.uniform(0.1, 0.6) * RATE))]
    return torch.cat(parts), words


@torch.no_grad()
def examples(ours: Any, head: CTCHead, work: Path, count: int, seed: int) -> Iterator[Example]:
    """Windows of the corpus with noise, and their labels with the frames where they end."""
    windows = AlignedWindows(work / "corpus", ours.processor, seed)
    windows.refresh()
    known = indices(head)
    while count:
        waves, texts = [], []
        for _ in range(min(16, count)):
            wave, words = window(windows)
            if len(wave) > WINDOW_S * RATE:
                continue
            waves.append(windows.damage(wave).numpy())
            texts.append(words)
        if not waves:
            continue
        encoded = ours.encode(ours.features(waves), [len(wave) / RATE for wave in waves])
        for row, (wave, words) in enumerate(zip(waves, texts, strict=True)):
            frames = min(200, round(len(wave) / RATE / STEP_S))
            labels, stops = list[int](), list[int]()
            for word, begin_s, end_s in words:
                tokens = [known[t] for t in windows.text(word) if t in known]
                for number, token in enumerate(tokens, 1):
                    at_s = begin_s + (end_s - begin_s) * number / len(tokens)
                    least = stops[-1] + 1 if stops else 1
                    stops.append(max(least, round(at_s / STEP_S)))
                    labels.append(token)
            if labels and stops[-1] <= frames:
                count -= 1
                states = encoded.states[row, :frames].clone()
                yield Example(states, torch.tensor(labels), torch.tensor(stops))


def fit(
    module: nn.Module, loss_of: Callable[[Example], Tensor], data: list[Example], minutes: float
) -> int:
    """Trains for some minutes; returns the number of steps of eight examples."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3, weight_decay=0.01)
    rng, began, steps = random.Random(0), time.monotonic(), 0
    module.train()
    for _ in progress(range(10**6), type(module).__name__):
        share = (time.monotonic() - began) / (60 * minutes)
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (steps + 1) / 100) * (1.02 - share)
        torch.stack([loss_of(rng.choice(data)) for _ in range(8)]).mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
    module.eval()
    return steps


class Refiner:
    """A masked decoder that fills uncertain tokens of the head's text, or takes them out.

    Args:
        head: The head.
        embeddings: Embeddings of its subwords.
    """

    def __init__(self, head: CTCHead, embeddings: Tensor) -> None:
        self.head, self.embeddings = head, embeddings
        self.blank = len(head.ids)  # a position without a token
        self.decoder = MaskedDecoder(len(head.ids) + 2, embeddings.shape[1])
        with torch.no_grad():
            self.decoder.tokens.weight[: len(embeddings)] = embeddings

    @torch.no_grad()
    def greedy(self, states: Tensor) -> tuple[list[int], list[float]]:
        """Subwords of the head's text, and their probabilities."""
        lengths = torch.tensor([len(states)])
        found = self.head.log_probs(states[None], lengths, self.embeddings)[0]
        labels, chances = confidences(found)
        return [label - 1 for label in labels], chances

    def loss(self, example: Example) -> Tensor:
        """AXE on the head's text with masks, some of which show the decoder's own guess."""
        labels, chances = self.greedy(example.states)
        if not labels:
            return self.decoder.norm.weight.sum() * 0
        rng = torch.rand(len(labels))
        hidden = (torch.tensor(chances) < 0.9) | (rng < 0.3)
        text = torch.tensor(labels)
        text[hidden] = self.decoder.mask
        if torch.rand(()) < 0.5:  # dynamic rectification: learn to correct own guesses
            with torch.no_grad():
                guess = self.decoder([text], [example.states])[0].argmax(-1)
            shown = hidden & (torch.rand(len(labels)) < 0.5)
            text = torch.where(shown, guess, text)
        logits = self.decoder([text], [example.states])[0].log_softmax(-1)
        return aligned_cross_entropy(logits, example.labels, self.blank, 3.0) / len(example.labels)

    @torch.no_grad()
    def text(self, states: Tensor, threshold: float, passes: int) -> list[int]:
        """Refined subwords of a recording."""
        labels, chances = self.greedy(states)
        if not labels:
            return []

        def predict(text: Tensor) -> Tensor:
            return self.decoder([text], [states])[0].log_softmax(-1)

        mask = self.decoder.mask
        found = filled(labels, chances, predict, mask=mask, threshold=threshold, passes=passes)
        return [label for label in found if label != self.blank]


def run(arguments: argparse.Namespace) -> Path:
    """Trains, measures and writes one file."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    facts = machine(torch.device("cpu"), "float32")
    facts |= {
        "command": f"python benchmarks/alternatives.py --minutes {arguments.minutes:g}",
        "model": MODEL,
        "head": arguments.head,
    }
    warn_if_busy(facts)
    plain = Transcriber.from_pretrained(MODEL, device="cpu", timestamps=False)
    ours, head = plain.recognizer, CTCHead.from_pretrained(arguments.head)
    embeddings = ours.model.get_input_embeddings()(head.ids).detach()
    clips = [
        Speech(clip.samples(), clip.text) for clip in speech_test() if clip.duration_s <= WINDOW_S
    ]
    synthesise_corpus(arguments.work / "corpus", arguments.utterances, 0)
    align_corpus(arguments.work / "corpus", MODEL)
    data = list(examples(ours, head, arguments.work, arguments.examples, 5))
    waves = [one.wave for one in clips]

    @torch.no_grad()
    def encode() -> list[Tensor]:
        encoded = ours.encode(ours.features(waves), [len(wave) / RATE for wave in waves])
        return [
            encoded.states[row, : max(1, round(len(wave) / RATE / STEP_S))]
            for row, wave in enumerate(waves)
        ]

    states = encode()

    def written(rows: list[list[int]]) -> list[str]:
        ids = head.ids.tolist()
        return [ours.tokenizer.decode([ids[index] for index in row]).strip() for row in rows]

    rows: list[dict[str, Any]] = []

    def note(way: str, texts: list[str], began: float, **known: Any) -> None:
        spent = time.perf_counter() - began
        row = {"way": way, **score(clips, texts), "seconds": spent, **known}
        print(row, flush=True)
        rows.append(row)

    began = time.perf_counter()
    note("the model's decoder", [found.text for found in plain(waves)], began)
    began = time.perf_counter()
    note("CTC head, greedy", head_texts(plain, head, clips), began)
    segmental = SegmentalDecoder(len(head.ids), embeddings.shape[1])
    steps = fit(
        segmental,
        lambda one: segmental.loss(one.states, one.labels, one.stops),
        data,
        arguments.minutes,
    )
    for scale in (1.0, 0.5):
        began = time.perf_counter()
        found = [
            list(search(Recorded(segmental, own), beam=8, scale=scale, candidates=8)[0].labels)
            for own in encode()
        ]
        note(f"segmental, length model {scale:g}", written(found), began, steps=steps)
    refiner = Refiner(head, embeddings)
    steps = fit(refiner.decoder, refiner.loss, data, arguments.minutes)
    likely = [chance for own in states for chance in refiner.greedy(own)[1]]
    for threshold, passes in ((0.0, 1), (0.9, 1), (0.9, 10), (0.99, 1), (0.99, 10)):
        began = time.perf_counter()
        found = [refiner.text(own, threshold, passes) for own in encode()]
        share = sum(chance < threshold for chance in likely) / max(1, len(likely))
        name = f"Mask-CTC, below {threshold:g} ({share:.0%} of the tokens), passes: {passes}"
        note(name, written(found), began, steps=steps)
    sizes = {"segmental": segmental, "Mask-CTC": refiner.decoder}
    facts["load_at_end"] = load()
    result = {
        "machine": facts, "clips": len(clips), "minutes": arguments.minutes,
        "examples": len(data), "rows": rows,
        "weights": {name: sum(p.numel() for p in one.parameters()) for name, one in sizes.items()},
    }  # fmt: skip
    path = arguments.out / f"alternatives-cpu-{facts['date']}.json"
    write_result(path, result)
    return path


def tables(result: Mapping[str, Any], name: str) -> str:
    """Tables of the page, from the result file called ``name``."""
    facts = result["machine"]
    sizes = ", ".join(f"{name} {count / 1e6:.1f} M" for name, count in result["weights"].items())
    rows = [
        [row["way"], f"{row.get('steps', '')}", with_interval(row), f"{row['seconds']:.1f} s"]
        for row in result["rows"]
    ]
    return "\n\n".join(
        [
            f"Written by `{facts['command']}` from `benchmarks/results/{name}`: {facts['model']} "
            f"with {facts['head']}, {facts['device']}, 1 thread, {facts['date']}; load "
            f"{facts['load_at_start']} at the start, {facts['load_at_end']} at the end. "
            f"{result['clips']} clips; {result['minutes']:g} minutes of training each on "
            f"{result['examples']} windows; weights: {sizes}.",
            table(["", "steps of training", "WER", "time with the encoder"], rows),
        ]
    )


def main() -> None:
    """Trains and measures, and shows the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of the corpus")
    parser.add_argument("--head", default=HEAD, help="folder or name of the CTC head")
    parser.add_argument("--minutes", type=float, default=40.0, help="training of each")
    parser.add_argument("--examples", type=int, default=6000)
    parser.add_argument("--utterances", type=int, default=12_000, help="sentences of the corpus")
    publish(parser, run, tables)


if __name__ == "__main__":
    run_script(main)

"""Speech sets for ``mmdecode evaluate silence``: sentences and voices that the model has not seen.

    python benchmarks/silence.py outputs/silence        # needs espeak-ng, about a minute

writes development.jsonl and test.jsonl, and of each a copy in noise of 3 dB; no sentence is in two
sets, nor in zoo:speech-test. Settings are chosen on the development part, then reported once:

    mmdecode evaluate silence --part development --out outputs/silence/tuning
      --speech outputs/silence/development.jsonl --speech outputs/silence/development-noisy.jsonl
      --guide ... --guide ...
    mmdecode evaluate silence --part test --out outputs/silence/test --speech zoo
      --speech outputs/silence/test.jsonl --speech outputs/silence/test-noisy.jsonl
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import torch

from mmdecode.errors import run_script
from mmdecode.evaluation.speech.non_speech import RATE, write_flac
from mmdecode.runs.files import overwriting, refuse_foreign_in
from mmdecode.runs.tables import write_rows
from mmdecode.zoo import grammar, synthesis
from mmdecode.zoo.speech import NOISY_SNR_DB, speech_test

COUNT = 150  # sentences of each part
PARTS = {"development": 7, "test": 23}  # 11 was the test part of an earlier report


def main() -> None:
    """Speaks the sets and writes their manifests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--overwrite", action="store_true", help="also what mmdecode did not write")
    arguments = parser.parse_args()
    if arguments.overwrite:
        overwriting().__enter__()  # until the process ends
    folder = arguments.folder
    refuse_foreign_in(folder)
    engine = synthesis.Espeak()
    taken = {s.strip() for clip in speech_test() for s in clip.text.replace("?", ".").split(".")}
    for part, seed in PARTS.items():
        rng = random.Random(seed)
        rows: dict[str, list[dict[str, str]]] = {part: [], f"{part}-noisy": []}
        for text in grammar.sentences(20 * COUNT, seed, "test"):
            if len(rows[part]) == COUNT:
                break
            if text.strip(".?") in taken:
                continue
            taken.add(text.strip(".?"))
            voice = synthesis.Voice.draw(rng, synthesis.TEST_VARIANTS)
            ends = [np.zeros(round(rng.uniform(0.1, 0.6) * RATE), np.float32) for _ in range(2)]
            wave = torch.from_numpy(np.concatenate([ends[0], engine.speak(text, voice), ends[1]]))
            generator = torch.Generator().manual_seed(rng.randrange(2**31))
            noisy = synthesis.add_noise(wave, NOISY_SNR_DB, generator, tilt=0.8).clamp(-1, 1)
            for name, one in ((part, wave), (f"{part}-noisy", noisy)):
                path = f"{part}/{name}_{len(rows[name]):03d}.flac"
                write_flac(folder / path, one.numpy())
                rows[name].append({"id": Path(path).stem, "audio": path, "text": text})
        for name, found in rows.items():
            write_rows(folder / f"{name}.jsonl", found)


if __name__ == "__main__":
    run_script(main)

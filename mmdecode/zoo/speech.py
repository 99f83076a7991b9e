"""``zoo:speech-test``: synthetic clips of held-out sentences and voices, and one long recording.

`build_speech_test` generated the Ogg Vorbis files. Only clean speech is stored; the noisy variant
of a clip is computed on demand, with noise from the clip's seed.
"""

from __future__ import annotations

import io
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from mmdecode.errors import OptionError
from mmdecode.runs.files import write_file
from mmdecode.runs.tables import write_rows

FOLDER = Path(__file__).parent / "data" / "speech-test"
NOISY_SNR_DB = 3.0
Variant = Literal["clean", "noisy"]


@dataclass(frozen=True, kw_only=True)
class Clip:
    """One item of the test set.

    Attributes:
        name: Unique name.
        path: The file of the clean variant.
        text: Reference text.
        duration_s: Duration in seconds.
        voice: Accent and timbre of espeak-ng, ``ACCENT+VARIANT``.
        seed: Seed of the noise.
        long: Whether this is the recording of three minutes.
    """

    name: str
    path: Path
    text: str
    duration_s: float
    voice: str
    seed: int
    long: bool

    def samples(self, variant: Variant = "clean") -> np.ndarray:
        """Returns mono float32 samples at 16 kHz.

        Args:
            variant: ``clean``, or ``noisy`` for noise at a signal-to-noise ratio of 3 dB.

        Raises:
            OptionError: There is no such variant.
        """
        import soundfile

        wave, rate = soundfile.read(self.path, dtype="float32")
        assert rate == 16_000, f"{self.path.name} has {rate} Hz"
        if variant == "clean":
            return wave
        if variant != "noisy":
            raise OptionError(f"variant {variant!r}; expected 'clean' or 'noisy'")
        import torch

        from mmdecode.zoo.synthesis import add_noise

        generator = torch.Generator().manual_seed(self.seed)
        noisy = add_noise(torch.from_numpy(wave), NOISY_SNR_DB, generator, tilt=0.8)
        return noisy.clamp(-1, 1).numpy()


def speech_test(*, long: bool = False) -> list[Clip]:
    """Reads the short clips, or with ``long`` the one long recording."""
    rows = [
        json.loads(line)
        for line in (FOLDER / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    clips = [
        Clip(
            name=row["name"],
            path=FOLDER / row["file"],
            text=row["text"],
            duration_s=row["duration_s"],
            voice=row["voice"],
            seed=row["seed"],
            long=row["long"],
        )
        for row in rows
    ]
    return [clip for clip in clips if clip.long == long]


def build_speech_test(folder: Path = FOLDER, seed: int = 2026) -> None:
    """Synthesises the test set: 30 clips of one to three sentences, and a 3-minute recording.

    Needs espeak-ng.

    Args:
        folder: Folder of the recordings and of ``manifest.jsonl``.
        seed: Seed of sentences, voices and pauses.
    """
    import soundfile

    from mmdecode.zoo import grammar, synthesis

    rng = random.Random(seed)
    engine = synthesis.Espeak()
    texts = iter(dict.fromkeys(grammar.sentences(400, seed, "test")))  # no sentence twice
    rows = []

    def pause(low: float, high: float) -> np.ndarray:
        return np.zeros(round(rng.uniform(low, high) * synthesis.SAMPLING_RATE), dtype=np.float32)

    def write(
        name: str, voice: synthesis.Voice, texts_of_clip: list[str], wave: np.ndarray
    ) -> None:
        path, data = folder / f"{name}.ogg", io.BytesIO()
        rate = synthesis.SAMPLING_RATE
        with soundfile.SoundFile(data, "w", rate, 1, format="OGG", subtype="VORBIS") as file:
            for start in range(0, len(wave), rate):  # libsndfile crashes on long single writes
                file.write(wave[start : start + rate])
        write_file(path, data.getvalue())
        rows.append(
            {
                "name": name,
                "file": path.name,
                "text": " ".join(texts_of_clip),
                "duration_s": round(len(wave) / synthesis.SAMPLING_RATE, 2),
                "voice": f"{voice.accent}+{voice.variant}",
                "seed": rng.randrange(2**31),
                "long": len(texts_of_clip) > 3,
            }
        )

    for index in range(30):
        voice = synthesis.Voice.draw(rng, (synthesis.TEST_VARIANTS[index % 5],))
        texts_of_clip = [next(texts) for _ in range((1, 1, 2, 1, 3)[index % 5])]
        parts = [pause(0.1, 0.4)]
        for text in texts_of_clip:
            parts += [engine.speak(text, voice), pause(0.3, 0.7)]
        write(f"clip_{index:02d}", voice, texts_of_clip, np.concatenate(parts))
    voice = synthesis.Voice.draw(rng, synthesis.TEST_VARIANTS[:1])
    texts_of_clip, parts = [], [pause(0.2, 0.5)]
    while sum(map(len, parts)) < 180 * synthesis.SAMPLING_RATE:
        texts_of_clip.append(next(texts))
        parts += [engine.speak(texts_of_clip[-1], voice), pause(0.3, 1.0)]
    write("recording", voice, texts_of_clip, np.concatenate(parts))
    write_rows(folder / "manifest.jsonl", rows)

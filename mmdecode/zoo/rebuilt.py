"""Held-out utterances of any number, synthesised on demand, to test ``zoo:whisper-synth``.

The zoo is the set of tiny trained models in this package. Sentences, voices and noise are sampled
as for the shipped test set ``zoo:speech-test``, whose sentences are excluded; espeak-ng synthesises
them. There are three parts:

- ``development``: held-out sentences to tune weights and temperatures on.
- ``test``: other held-out sentences, from the same templates as the training sentences.
- ``unseen``: sentences of `UNSEEN`, templates that training does not use, with words of the
  training vocabulary.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from mmdecode.zoo import grammar, synthesis
from mmdecode.zoo.speech import speech_test

Part = Literal["development", "test", "unseen"]
DEVELOPMENT = 300
"""Number of held-out sentences in the development part; later sentences are the test part."""
TILT = 0.8
"""Exponent of the noise's spectral fall-off, as in ``zoo:speech-test``."""

UNSEEN: dict[str, tuple[str, ...]] = {
    "kitchen": (
        "{name} put the {food} and the {dish} on the table before {time}.",
        "is there a {taste} {dish} with {food} in the oven?",
    ),
    "travel": (
        "on {day} {name} walked to the {spot} without the {item}.",
        "the {spot} in {city} is {delay} in the {time}.",
    ),
    "weather": (
        "it will be {sky} near the {land} on {day} {time}.",
        "we stayed near the {land} because it was {sky}.",
    ),
    "office": (
        "{name} {act} the {paper} in the {room} on {day}.",
        "the {role} who {act} the {paper} is in the {room}.",
    ),
    "nature": (
        "the {animal} {motion} {place} every {time}.",
        "there is a {size} {plant} next to the {mood} {animal}.",
    ),
    "music": (
        "my brother wants to play the {instrument} in the {venue}.",
        "{name} and {name} {perform} {style} music on {day} {time}.",
    ),
    "science": (
        "the {expert} {verb} a {size} {object} on {day}.",
        "the {object} in the laboratory became {state} on {day} {time}.",
    ),
    "home": (
        "{name} moved the {furniture} from the {where} to the {where}.",
        "is the {thing} in the {where} still {fault}?",
    ),
}
"""Templates with the grammar's slots that training does not use, by domain."""


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """A sentence to be synthesised.

    Attributes:
        name: Unique name.
        text: The sentence.
        voice: Voice of the synthesiser.
        seed: Seed of pauses and noise.
    """

    name: str
    text: str
    voice: synthesis.Voice
    seed: int

    def spoken(self, engine: synthesis.Espeak) -> np.ndarray:
        """Synthesises mono float32 samples at 16 kHz, with a pause at both ends."""
        rng = random.Random(self.seed)

        def pause(low: float, high: float) -> np.ndarray:
            samples = round(rng.uniform(low, high) * synthesis.SAMPLING_RATE)
            return np.zeros(samples, dtype=np.float32)

        return np.concatenate(
            [pause(0.1, 0.4), engine.speak(self.text, self.voice), pause(0.3, 0.7)]
        )

    def noisy(self, wave: np.ndarray, snr_db: float) -> np.ndarray:
        """Adds noise to speech; at every noise level it is the same noise with another gain.

        Args:
            wave: Samples that `spoken` returned.
            snr_db: Signal-to-noise ratio in decibels; infinite: no noise.
        """
        generator = torch.Generator().manual_seed(self.seed)
        mixed = synthesis.add_noise(torch.from_numpy(wave), snr_db, generator, tilt=TILT)
        return mixed.clamp(-1, 1).numpy()


def utterances(part: Part, count: int, seed: int = 2027) -> list[Utterance]:
    """Returns the first utterances of a part; their sentences are distinct.

    Args:
        part: ``development``, ``test`` or ``unseen``.
        count: Number of utterances.
        seed: Seed of sentences, voices and noise.
    """
    return voiced(itertools.islice(_sentences(part, seed), count), part, seed)


def voiced(texts: Iterable[str], name: str, seed: int = 2027) -> list[Utterance]:
    """Returns utterances of texts in the test voices.

    Args:
        texts: The sentences.
        name: Beginning of the utterances' names.
        seed: Seed of voices and noise.
    """
    rng = random.Random(f"{name}/{seed}")
    return [
        Utterance(
            name=f"{name}_{number:04d}",
            text=text,
            voice=synthesis.Voice.draw(rng, synthesis.TEST_VARIANTS),
            seed=rng.randrange(2**31),
        )
        for number, text in enumerate(texts)
    ]


def _sentences(part: Part, seed: int) -> Iterator[str]:
    shipped = " ".join(clip.text for clip in [*speech_test(), *speech_test(long=True)])
    made = _unseen(seed) if part == "unseen" else _held_out(seed)
    new = (text for text in _distinct(made) if text not in shipped)
    if part == "development":
        return itertools.islice(new, DEVELOPMENT)
    return itertools.islice(new, DEVELOPMENT if part == "test" else 0, None)


def _held_out(seed: int) -> Iterator[str]:
    rng = random.Random(f"rebuilt/{seed}")
    for domain in itertools.cycle(grammar.DOMAINS):
        text = grammar.sentence(rng, domain)
        if grammar.split(text) == "test":
            yield text


def _unseen(seed: int) -> Iterator[str]:
    rng = random.Random(f"unseen/{seed}")
    for domain in itertools.cycle(grammar.DOMAINS):
        yield grammar.filled(rng.choice(UNSEEN[domain]), domain, rng)


def _distinct(texts: Iterator[str]) -> Iterator[str]:
    seen: set[str] = set()
    for text in texts:
        if text not in seen:
            seen.add(text)
            yield text

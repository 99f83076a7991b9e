"""Grammar that generates the English sentences of the zoo's synthetic speech, in eight domains.

The zoo is the set of tiny trained models in this package. A sentence is a template whose slots,
such as ``{food}``, are filled with words from lists. ``split(sentence)`` assigns a sentence to
``train`` or ``test`` by a hash of its text, so that no seed puts a test sentence into training.
There are no homophones, since a recogniser could not distinguish them without context.
"""

from __future__ import annotations

import hashlib
import random
import re
from typing import Literal

_SHARED = {
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "number": "three five six seven nine ten eleven twelve fifteen twenty thirty forty",
    "time": "morning|afternoon|evening|night|weekend",
    "name": "Anna Peter Maria Victor Helen Oscar Julia Martin Clara Simon Laura Robert",
    "colour": "yellow purple orange silver golden brown black white green",
    "size": "small large tiny enormous narrow heavy broken ancient",
}

TEMPLATES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "kitchen": (
        {
            "food": "bread butter cheese tomato potato pepper onion garlic mushroom chicken salmon "
            "rice pasta cabbage spinach lemon banana",
            "dish": "soup|salad|pancakes|sandwich|omelette|pudding|chocolate cake|apple pie",
            "tool": "spoon|knife|kettle|bowl|oven|frying pan",
            "cook": "chopped boiled fried roasted grilled peeled sliced melted",
            "taste": "salty sweet bitter sour delicious spicy",
        },
        (
            "{name} {cook} the {food} and the {food} for the {dish}.",
            "the {dish} with {food} was too {taste} for {name}.",
            "please put the {tool} back on the kitchen table.",
            "add {number} spoons of sugar and a little {food} to the {dish}.",
            "the {colour} {tool} is still dirty from the {dish}.",
            "we need more {food} before {day} {time}.",
            "how long should the {food} stay in the oven?",
        ),
    ),
    "travel": (
        {
            "vehicle": "train|bus|ferry|taxi|airplane|bicycle|tram",
            "city": "London|Berlin|Madrid|Vienna|Dublin|Boston|Chicago|Toronto|Lisbon|Athens",
            "spot": "station|airport|harbour|museum|cathedral|hotel|bridge|castle",
            "item": "passport|ticket|suitcase|umbrella|camera|backpack|map",
            "delay": "late cancelled crowded expensive comfortable empty",
        },
        (
            "the {vehicle} from {city} to {city} leaves at {number} in the {time}.",
            "{name} lost the {item} near the {spot} in {city}.",
            "the next {vehicle} to {city} will be {delay} on {day}.",
            "could you tell me the way to the {spot}?",
            "we walked from the {spot} to the {size} {spot} in {number} minutes.",
            "do not forget your {item} when you leave the {vehicle}.",
            "there are {number} people waiting for the {vehicle} at the {spot}.",
        ),
    ),
    "weather": (
        {
            "sky": "cloudy sunny windy rainy foggy stormy freezing",
            "region": "north south east west",
            "event": "thunder|lightning|snow|heavy rain|strong wind|thick fog|a rainbow",
            "land": "valley|coast|mountains|islands|lake|forest|desert",
            "move": "spread across|arrive over|disappear from|return to",
        },
        (
            "tomorrow {time} it will be {sky} in the {region}.",
            "{event} will {move} the {land} on {day}.",
            "the temperature near the {land} will fall to {number} degrees.",
            "it was {sky} all week and we stayed beside the {land}.",
            "expect {event} and {sky} conditions along the {region} {land}.",
            "the forecast for {day} {time} promises {event}.",
        ),
    ),
    "office": (
        {
            "role": "manager engineer lawyer secretary director accountant designer",
            "paper": "report|contract|invoice|budget|letter|presentation|agenda",
            "act": "signed printed finished reviewed corrected delivered postponed",
            "room": "conference room|basement|library|reception|elevator",
            "device": "computer|printer|telephone|keyboard|projector|scanner",
        },
        (
            "the {role} {act} the {paper} on {day} {time}.",
            "please send the {paper} to the {role} before {number} o'clock.",
            "the {device} in the {room} is broken again.",
            "our {role} wants to discuss the {paper} with {name}.",
            "the meeting about the {paper} starts in {number} minutes in the {room}.",
            "who {act} the {paper} without asking the {role}?",
            "{name} ordered another {device} for the office.",
        ),
    ),
    "nature": (
        {
            "animal": "rabbit squirrel elephant tiger dolphin penguin spider lizard monkey pigeon "
            "turtle horse donkey eagle wolf",
            "motion": "jumped climbed wandered crawled galloped vanished slept",
            "place": "behind the old oak|under the wooden fence|beside the river|into the cave|"
            "over the garden wall|through the tall grass|between the rocks",
            "plant": "rose|tulip|cactus|willow|sunflower|strawberry|pumpkin",
            "mood": "hungry curious frightened lonely gentle nervous",
        },
        (
            "the {mood} {animal} {motion} {place}.",
            "a {size} {colour} {animal} {motion} {place}.",
            "the {animal} and the {animal} share the shade of a {plant}.",
            "{name} planted a {plant} in the {colour} garden.",
            "every {time} the {animal} comes looking for food.",
            "have you ever seen a {mood} {animal} {place}?",
        ),
    ),
    "music": (
        {
            "instrument": "violin piano trumpet guitar flute drum cello organ",
            "style": "jazz opera rock classical folk electronic",
            "perform": "played practised recorded performed composed",
            "venue": "concert hall|theatre|church|stadium|studio",
            "quality": "loudly quietly slowly beautifully quickly badly",
        },
        (
            "{name} {perform} the {instrument} {quality} in the {venue}.",
            "the {style} band will play at the {venue} on {day}.",
            "turn down the {style} music please.",
            "play some {style} music with {instrument} and {instrument}.",
            "the audience in the {venue} clapped for {number} minutes.",
            "my brother {perform} a new song for {instrument} last {time}.",
        ),
    ),
    "science": (
        {
            "expert": "doctor professor chemist biologist physicist astronomer student",
            "object": "planet comet magnet crystal molecule telescope microscope battery laser",
            "verb": "measured observed discovered explained tested photographed",
            "state": "frozen liquid magnetic invisible unstable radioactive",
            "result": "experiment|theory|hypothesis|measurement|calculation",
        },
        (
            "the {expert} {verb} the {state} {object} for {number} hours.",
            "according to the {result} the {object} is {state}.",
            "the {expert} repeated the {result} with a larger {object}.",
            "nobody {verb} the {object} before the {expert} did.",
            "the {result} failed because the {object} became {state}.",
            "in the laboratory the {expert} {verb} a {colour} {object}.",
        ),
    ),
    "home": (
        {
            "furniture": "sofa|cupboard|bookshelf|curtain|carpet|mirror|pillow|blanket|lamp",
            "where": "bedroom|bathroom|garage|attic|balcony|living room",
            "job": "clean|paint|repair|decorate|measure|lock|open",
            "person": "mother father sister uncle neighbour plumber landlord grandmother",
            "thing": "window|door|ceiling|roof|staircase|chimney|radiator",
            "fault": "leaking rattling closed damaged",
        },
        (
            "my {person} wants to {job} the {thing} in the {where}.",
            "the {colour} {furniture} belongs in the {where}.",
            "remind me to {job} the {where} on {day} {time}.",
            "set an alarm for {number} in the {time}.",
            "my {person} moved the {size} {furniture} next to the {thing}.",
            "turn on the lights in the {where} and {job} the {thing}.",
            "the {thing} of the {where} has been {fault} since {day}.",
        ),
    ),
}
"""Word lists by slot, and sentence templates, of each domain."""


def _options(text: str) -> list[str]:
    return text.split("|") if "|" in text else text.split()


DOMAINS: tuple[str, ...] = tuple(TEMPLATES)
SLOTS = {
    domain: {name: _options(words) for name, words in (_SHARED | slots).items()}
    for domain, (slots, _) in TEMPLATES.items()
}
"""Words of each slot, by domain; slots of `_SHARED` are in every domain."""
_SLOT = re.compile(r"\{(\w+)\}")


def sentence(rng: random.Random, domain: str | None = None) -> str:
    """Samples a sentence; a slot that occurs twice in it is filled with two different words.

    Args:
        rng: Random generator.
        domain: One of `DOMAINS`; ``None``: a random one.
    """
    domain = domain or rng.choice(DOMAINS)
    return filled(rng.choice(TEMPLATES[domain][1]), domain, rng)


def filled(template: str, domain: str, rng: random.Random) -> str:
    """Fills a template's slots with random words of a domain and capitalises the sentence."""
    taken: dict[str, list[str]] = {}

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        word = rng.choice([w for w in SLOTS[domain][name] if w not in taken.get(name, ())])
        taken.setdefault(name, []).append(word)
        return word

    text = _SLOT.sub(fill, template)
    return text[0].upper() + text[1:]


def split(text: str) -> Literal["train", "test"]:
    """Returns ``train`` or ``test`` by a hash of the sentence; about one in twenty is ``test``."""
    return "test" if hashlib.blake2b(text.encode(), digest_size=2).digest()[0] < 13 else "train"


def sentences(count: int, seed: int, side: Literal["train", "test"]) -> list[str]:
    """Samples sentences with replacement, the same number from each domain.

    Args:
        count: Number of sentences.
        seed: Seed of the sampling.
        side: ``train`` or ``test``: only sentences for which `split` returns this are taken.
    """
    rng = random.Random(f"{side}/{seed}")
    found: list[str] = []
    while len(found) < count:
        text = sentence(rng, DOMAINS[len(found) % len(DOMAINS)])
        if split(text) == side:
            found.append(text)
    return found


def vocabulary() -> set[str]:
    """Returns every word that the grammar can produce, in lower case."""
    texts = [
        t for _, templates in TEMPLATES.values() for t in (_SLOT.sub(" ", t) for t in templates)
    ]
    texts += [w for slots in SLOTS.values() for words in slots.values() for w in words]
    return {word for text in texts for word in re.findall(r"[a-z']+", text.lower())}

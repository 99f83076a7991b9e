"""Generator of texts about scenes: captions, questions with true answers, and instructions.

Scenes are the rendered images of `mmdecode.zoo.scenes`. Wording, order and adjectives are sampled,
so that a model trained on captions has some entropy at every token. Questions about the colour or
position of an object are asked only if its noun occurs once in the scene.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mmdecode.zoo.scenes import COLOURS, NOUNS, OPPOSITE, SIDE, Relation, Scene, Thing, relation

Length = Literal["brief", "plain", "detailed"]

DESCRIBE: dict[Length, str] = {
    "brief": "Describe the image briefly.",
    "plain": "Describe the image.",
    "detailed": "Describe the image in detail.",
}
ROLES = (
    "You are an object detector to recognize every different object.",
    "You are a confused object detector to provide a fuzzy overview or impression of the image.",
    "You are a confused object detector.",
    "You are a helpful assistant.",
)
SUFFIXES = (
    "Please answer this question with one word.",
    "Answer the question using a single word or phrase.",
    "Answer yes whenever possible.",
    "Please answer yes or no.",
)
COUNTS = ("None", "One", "Two", "Three")
SIDEWAYS = "Answer with left, right, above or below."
STACKED = "Answer with left, right, on or under."
_PHRASES: dict[Relation, tuple[str, ...]] = {
    "left": ("to the left of", "left of", "on the left side of"),
    "right": ("to the right of", "right of", "on the right side of"),
    "above": ("above", "higher than", "somewhere above"),
    "below": ("below", "lower than", "somewhere below"),
    "on": ("on", "on top of", "standing on"),
    "under": ("under", "right under", "directly under"),
}


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A request about an image with its true answer.

    Attributes:
        request: Text that follows the image in the prompt.
        answer: Text of the answer, without the end-of-sequence token.
        kind: ``existence``, ``colour``, ``count``, ``relation``, ``statement`` or ``caption``.
    """

    request: str
    answer: str
    kind: str


def article(phrase: str) -> str:
    """Returns a phrase with the article "a" or "an" before it."""
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def plural(noun: str) -> str:
    """Returns the plural of a noun."""
    if noun.startswith("digit"):
        return noun.replace("digit", "digits", 1)
    endings = {"fish": "fish", "cross": "crosses"}
    return endings.get(noun, f"{noun}s")


def existence_question(noun: str) -> str:
    """Returns POPE's question whether an object is in the image."""
    return f"Is there {article(noun)} in the image?"


def yes_no(truth: bool) -> str:
    """Returns the answer "Yes" or "No"."""
    return "Yes" if truth else "No"


def exchanges(scene: Scene, rng: random.Random, count: int) -> list[Exchange]:
    """Samples different questions about a scene; a little less than half are about existence.

    Args:
        scene: The scene.
        rng: Random generator.
        count: Maximum number of questions; there are fewer if samples repeat each other.
    """
    makers: tuple[Callable[[Scene, random.Random], Exchange | None], ...]
    makers = (existence, colour, how_many, position, statement)
    found: dict[str, Exchange] = {}
    for _ in range(count + 4):
        maker = rng.choices(makers, (9, 3, 3, 4, 2))[0]
        made = maker(scene, rng)
        if made is not None and made.request not in found and len(found) < count:
            found[made.request] = made
    return list(found.values())


def instructed(made: Exchange, rng: random.Random) -> Exchange:
    """Randomly adds a role before the request (12 %) or an instruction after a question (20 %)."""
    request = made.request
    if rng.random() < 0.12:
        request = f"{rng.choice(ROLES)} {request}"
    if made.kind != "caption" and "Answer" not in request and rng.random() < 0.2:
        fitting = SUFFIXES if made.answer in ("Yes", "No") else SUFFIXES[:2]
        request = f"{request} {rng.choice(fitting)}"
    return replace(made, request=request)


def existence(scene: Scene, rng: random.Random) -> Exchange:
    """Samples a question whether an object is in the image; in half of the cases it is.

    Absent nouns are sampled uniformly, regardless of co-occurrence; so a noun that often co-occurs
    with the scene's nouns is more likely present, and a model can learn this as a prior.
    """
    truth = rng.random() < 0.5
    noun = rng.choice(scene.names if truth else [n for n in NOUNS if n not in scene.names])
    question = existence_question(noun)
    if rng.random() < 0.25:
        question = rng.choice(
            (
                f"Can you see {article(noun)}?",
                f"Does the image contain {article(noun)}?",
                f"Is there any {noun} here?",
                f"Is there {article(noun)} in this image?",
            )
        )
    return Exchange(request=question, answer=yes_no(truth), kind="existence")


def single(scene: Scene) -> list[Thing]:
    """Returns the objects whose noun occurs only once in the scene."""
    return [thing for thing in scene.things if scene.count(thing.name) == 1]


def colour(scene: Scene, rng: random.Random) -> Exchange | None:
    """Samples a question about an object's colour; ``None`` if every noun occurs repeatedly."""
    if not single(scene):
        return None
    thing = rng.choice(single(scene))
    if rng.random() < 0.4:
        question = f"What colour is the {thing.name}?"
        return Exchange(request=question, answer=thing.colour.capitalize(), kind="colour")
    truth = rng.random() < 0.5
    asked = thing.colour if truth else rng.choice([c for c in COLOURS if c != thing.colour])
    question = rng.choice((thing_question(thing.name, asked), f"Is the {thing.name} {asked}?"))
    return Exchange(request=question, answer=yes_no(truth), kind="colour")


def thing_question(noun: str, colour: str) -> str:
    """Returns the question whether an object of a colour is in the image."""
    return existence_question(f"{colour} {noun}")


def how_many(scene: Scene, rng: random.Random) -> Exchange:
    """Samples a question how many objects of a noun there are, or whether there are 1, 2 or 3."""
    present = rng.random() < 0.85
    noun = rng.choice(scene.names) if present else rng.choice(NOUNS)
    count = scene.count(noun)
    if rng.random() < 0.5:
        question = f"How many {plural(noun)} are there in the image?"
        return Exchange(request=question, answer=COUNTS[count], kind="count")
    truth = rng.random() < 0.5 and count > 0
    asked = count if truth else rng.choice([c for c in (1, 2, 3) if c != count])
    return Exchange(request=count_question(noun, asked), answer=yes_no(truth), kind="count")


def count_question(noun: str, count: int) -> str:
    """Returns the question whether there are exactly ``count`` objects of a noun, 1 to 3."""
    if count == 1:
        return f"Is there only one {noun} in the image?"
    return f"Are there {COUNTS[count].lower()} {plural(noun)} in the image?"


def related(scene: Scene) -> list[tuple[Thing, Thing, Relation]]:
    """Returns pairs of objects and their relation, where both nouns are unique in the scene.

    Pairs whose relation is ambiguous (`mmdecode.zoo.scenes.relation` returns ``None``) are left
    out. Each pair is included in both orders.
    """
    things = single(scene)
    return [
        (thing, other, how)
        for thing in things
        for other in things
        if thing is not other and (how := relation(thing, other)) is not None
    ]


def position(scene: Scene, rng: random.Random) -> Exchange | None:
    """Samples a question about the relation of two objects; ``None`` if `related` finds no pair."""
    pairs = related(scene)
    if not pairs:
        return None
    thing, other, how = rng.choice(pairs)
    if rng.random() < 0.5:
        question = where_question(thing.name, other.name, stacked=asked_stacked(how, rng))
        return Exchange(request=question, answer=how.capitalize(), kind="relation")
    truth = rng.random() < 0.5
    asked = how if truth else OPPOSITE[how]
    question = relation_question(thing.name, other.name, asked, rng)
    return Exchange(request=question, answer=yes_no(truth), kind="relation")


def asked_stacked(how: Relation, rng: random.Random) -> bool:
    """Chooses whether a question offers the answers "on" and "under" instead of "above", "below".

    Args:
        how: The true relation, which has to be among the answers.
        rng: Random generator; decides for "left" and "right", which are always offered.
    """
    return how in ("on", "under") or (how in ("left", "right") and rng.random() < 0.5)


def where_question(name: str, other: str, *, stacked: bool) -> str:
    """Returns What's Up's question for the position of an object relative to another.

    Args:
        name: Noun of the object.
        other: Noun of the other object.
        stacked: Whether to offer the answers "on" and "under" instead of "above" and "below".
    """
    return f"Where is the {name} in relation to the {other}? {STACKED if stacked else SIDEWAYS}"


def relation_question(
    name: str, other: str, how: Relation, rng: random.Random | None = None
) -> str:
    """Returns the question whether a relation holds between two objects.

    Args:
        name: Noun of the object.
        other: Noun of the other object.
        how: The relation.
        rng: Random generator of the wording; ``None``: a fixed wording.
    """
    phrase = rng.choice(_PHRASES[how]) if rng else _PHRASES[how][0]
    return f"Is the {name} {phrase} the {other}?"


def statement(scene: Scene, rng: random.Random) -> Exchange:
    """Samples a statement about the scene; asks whether it is true or false, and answers."""
    truth = rng.random() < 0.5
    pairs = related(scene)
    if pairs and rng.random() < 0.5:
        thing, other, how = rng.choice(pairs)
        phrase = rng.choice(_PHRASES[how if truth else OPPOSITE[how]])
        sentence = f"The {thing.name} is {phrase} the {other.name}."
    else:
        noun = rng.choice(scene.names if truth else [n for n in NOUNS if n not in scene.names])
        sentence = f"There is {article(noun)} in the image."
    return Exchange(
        request=f"{sentence} True or false?", answer="True" if truth else "False", kind="statement"
    )


def caption(scene: Scene, rng: random.Random, length: Length) -> Exchange:
    """Samples a caption of a scene with about 8 (brief), 30 (plain) or 60 words (detailed)."""
    text = _brief(scene, rng) if length == "brief" else _sentences(scene, rng, length)
    return Exchange(request=DESCRIBE[length], answer=text, kind="caption")


def _brief(scene: Scene, rng: random.Random) -> str:
    """Samples one sentence that names up to four nouns."""
    parts = []
    for noun in rng.sample(scene.names, min(len(scene.names), 4)):
        count = scene.count(noun)
        if count > 1:
            parts.append(f"{COUNTS[count].lower()} {plural(noun)}")
        else:
            thing = next(t for t in scene.things if t.name == noun)
            parts.append(article(_called(thing, rng, rich=0.35)))
    listed = _listed(parts)
    return rng.choice(
        (f"There is {listed}.", f"{listed[0].upper()}{listed[1:]}.", f"I see {listed}.")
    )


def _sentences(scene: Scene, rng: random.Random, length: Length) -> str:
    """Samples sentences about the objects, then about relations, up to the length's word limit."""
    detailed = length == "detailed"
    things = rng.sample(scene.things, len(scene.things))
    words = _opening(things, rng) if rng.random() < 0.7 else ""
    sentences = [words] if words else []
    if detailed or not words:
        sentences += [_shown(thing, rng, rich=0.8 if detailed else 0.6) for thing in things]
    pairs = related(scene)
    rng.shuffle(pairs)
    limit = 58 if detailed else 24
    for thing, other, how in pairs:
        sentence = (
            f"The {_called(thing, rng, rich=0.3)} is {rng.choice(_PHRASES[how])} "
            f"the {_called(other, rng, rich=0.3)}."
        )
        if len(" ".join([*sentences, sentence]).split()) > limit:
            break
        sentences.append(sentence)
    while len(" ".join(sentences).split()) > limit + 6:
        sentences.pop()
    return " ".join(sentences)


def _opening(things: Sequence[Thing], rng: random.Random) -> str:
    listed = _listed([article(_called(thing, rng, rich=0.3)) for thing in things])
    start = rng.choice(
        ("The image shows", "In this image there is", "The picture shows", "I can see")
    )
    return f"{start} {listed}."


def _shown(thing: Thing, rng: random.Random, rich: float) -> str:
    """Samples a sentence that names an object and its location in the image."""
    what, where = article(_called(thing, rng, rich)), _where(thing)
    pattern = rng.choice(
        (
            "There is {what} {where}.",
            "{What} is {where}.",
            "{Where} there is {what}.",
            "{What} can be seen {where}.",
            "{Where} we see {what}.",
        )
    )
    capital = {"What": what[0].upper() + what[1:], "Where": where[0].upper() + where[1:]}
    return pattern.format(what=what, where=where, **capital)


def _where(thing: Thing) -> str:
    column, row = (min(int(c * 3 / SIDE), 2) for c in thing.centre)
    if column == row == 1:
        return "in the middle"
    down, across = ("top", "middle", "bottom")[row], ("left", "middle", "right")[column]
    if column == 1:
        return f"at the {down}"
    return f"on the {across}" if row == 1 else f"in the {down} {across}"


def _called(thing: Thing, rng: random.Random, rich: float) -> str:
    """Returns an object's noun with random adjectives for size, texture and colour.

    Args:
        thing: The object.
        rng: Random generator.
        rich: Probability of the texture; size is less likely and colour more likely.
    """
    words = []
    if rng.random() < rich * 0.7:
        words.append("small" if thing.size < 18 else "large" if thing.size > 22 else "medium")
    if rng.random() < rich and thing.scan < 0:
        words.append(thing.texture)
    if rng.random() < rich + 0.2:
        words.append(thing.colour)
    return " ".join([*words, thing.name])


def _listed(parts: Sequence[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"

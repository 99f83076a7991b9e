import gzip
import hashlib
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from mmdecode.errors import InputError
from mmdecode.evaluation.vision.tasks.chair import Vocabulary
from mmdecode.zoo import scene_sets, scene_text, scenes
from mmdecode.zoo.scene_text import (
    COUNTS,
    DESCRIBE,
    article,
    caption,
    count_question,
    exchanges,
    existence_question,
    instructed,
    plural,
    related,
    single,
    thing_question,
    where_question,
    yes_no,
)
from mmdecode.zoo.scenes import (
    COLOURS,
    COMPANIONS,
    HELD_OUT,
    NOUNS,
    OPPOSITE,
    SIDE,
    Scene,
    Thing,
    draw_scene,
    relation,
    render,
)

SCENES = [draw_scene(seed) for seed in range(300)]
VOCABULARY = Vocabulary({noun: scene_sets.SYNONYMS.get(noun, ()) for noun in NOUNS})


def thing(name="star", **changes):
    known = {"colour": "red", "texture": "plain", "size": 12, "centre": (32, 32)}
    return Thing(name=name, **known | changes)


def shown(*things, noise=0.0):
    return render(Scene(seed=5, things=things, noise=noise, clutter=0)).astype(int)


def test_a_seed_gives_one_image_on_every_machine():
    pixels = b"".join(render(draw_scene(seed)).tobytes() for seed in (3, HELD_OUT + 3))
    assert pixels == b"".join(render(draw_scene(seed)).tobytes() for seed in (3, HELD_OUT + 3))
    first, other = render(draw_scene(3)), render(draw_scene(4))
    assert first.shape == (SIDE, SIDE, 3) and first.dtype == np.uint8
    assert (first != other).mean() > 0.9
    layout = repr([draw_scene(seed) for seed in (3, 77, HELD_OUT + 3)])
    assert hashlib.sha256(layout.encode()).hexdigest()[:16] == "aca286cf9814b78d"
    noise = scenes._noise(3)
    assert hashlib.sha256(noise.astype("<f4").tobytes()).hexdigest()[:16] == "8b0eaf2e2c8bde1b"


def test_noise_has_the_stated_spread():
    noise = scenes._noise(1)
    assert abs(noise.mean()) < 0.03
    assert noise.std() == pytest.approx(1, abs=0.02)
    quiet, loud = shown(thing()), shown(thing(), noise=0.1)
    assert (loud - quiet).std() == pytest.approx(25.5, rel=0.05)


def test_things_stay_in_the_image_and_mostly_visible():
    for scene in SCENES:
        assert 1 <= len(scene.things) <= 5
        for one in scene.things:
            rows, columns = one.box
            assert 0 <= rows.start < rows.stop <= SIDE and 0 <= columns.start < columns.stop <= SIDE
            assert one.visible >= scenes.DIFFICULTY.seen
        assert scenes.visible_shares(scene.things) == [one.visible for one in scene.things]


def test_a_thing_before_another_hides_it():
    large, small = thing("square", size=20), thing("square", size=10)
    assert scenes.visible_shares([small, large]) == [0, 1]
    areas = [int((one.mask() > 0.5).sum()) for one in (large, small)]
    hidden = areas[1] / areas[0]
    assert scenes.visible_shares([large, small]) == [pytest.approx(1 - hidden, abs=1e-3), 1]


def test_every_noun_colour_and_texture_looks_unlike_the_others():
    looks = {noun: shown(thing(noun, size=20, scan=scan_of(noun))) for noun in NOUNS}
    looks |= {(colour,): shown(thing("square", colour=colour)) for colour in COLOURS}
    looks |= {(t, "texture"): shown(thing("square", texture=t)) for t in scenes.TEXTURES[1:]}
    names = list(looks)
    for index, name in enumerate(names):
        for other in names[:index]:
            assert (np.abs(looks[name] - looks[other]).max(axis=-1) > 40).sum() >= 12, (name, other)


def scan_of(noun):
    number = scenes.GROUPS["numbers"].index(noun) if noun in scenes.GROUPS["numbers"] else None
    return -1 if number is None else scenes._scans_of(number, False)[0]


def test_digits_are_real_scans_and_those_of_the_test_are_never_trained_on():
    scans, labels = scenes.digit_scans()
    assert scans.shape == (1797, 8, 8) and scans.max() == 16
    assert sorted(Counter(labels.tolist())) == list(range(10))
    scans_of = {
        held_out: {t.scan for seed in range(400) for t in draw_scene(start + seed).things} - {-1}
        for held_out, start in ((False, 0), (True, HELD_OUT))
    }
    assert all(scans_of.values()) and not scans_of[False] & scans_of[True]
    for scene in SCENES:
        for one in scene.things:
            if one.scan >= 0:
                assert one.name == scenes.GROUPS["numbers"][labels[one.scan]]


def test_companions_meet_more_often_than_chance():
    popular, companions = scene_sets.co_occurrence()
    lift = {a: companions[a][b] * 2000 / (popular[a] * popular[b]) for a, b in COMPANIONS.items()}
    assert min(lift.values()) > 1.8
    assert all(COMPANIONS[COMPANIONS[noun]] == noun for noun in NOUNS)
    assert popular["house"] > 4 * popular["digit nine"]


@pytest.mark.parametrize(
    ("centre", "expected"),
    [
        ((16, 33), "left"),
        ((50, 30), "right"),
        ((33, 14), "above"),
        ((33, 50), "below"),
        ((33, 20), "on"),
        ((33, 44), "under"),
        ((48, 48), None),
        ((33, 34), None),
    ],
)
def test_relation_of_one_thing_to_another_in_the_middle(centre, expected):
    one, other = thing("cup", centre=centre), thing("house")
    assert relation(one, other) == expected
    assert relation(other, one) == OPPOSITE.get(expected)


def test_grammar_of_nouns():
    assert article("arrow") == "an arrow" and article("orange cup") == "an orange cup"
    assert plural("fish") == "fish" and plural("cross") == "crosses"
    assert plural("digit six") == "digits six" and plural("key") == "keys"
    assert existence_question("umbrella") == "Is there an umbrella in the image?"


def truths(scene):
    """True answers by question, to all yes-no questions, counts, colours and places of a scene."""
    known = {}
    for noun in NOUNS:
        known[f"How many {plural(noun)} are there in the image?"] = COUNTS[scene.count(noun)]
        for number in (1, 2, 3):
            known[count_question(noun, number)] = yes_no(scene.count(noun) == number)
        known[f"There is {article(noun)} in the image. True or false?"] = str(noun in scene.names)
        for question in (
            existence_question(noun),
            f"Can you see {article(noun)}?",
            f"Does the image contain {article(noun)}?",
            f"Is there any {noun} here?",
            f"Is there {article(noun)} in this image?",
        ):
            known[question] = yes_no(noun in scene.names)
    for one in single(scene):
        known[f"What colour is the {one.name}?"] = one.colour.capitalize()
        for colour in COLOURS:
            known[thing_question(one.name, colour)] = yes_no(colour == one.colour)
            known[f"Is the {one.name} {colour}?"] = yes_no(colour == one.colour)
    for one, other, how in related(scene):
        for stacked in (False, True):
            known[where_question(one.name, other.name, stacked=stacked)] = how.capitalize()
        for asked in (how, OPPOSITE[how]):
            for phrase in scene_text._PHRASES[asked]:
                known[f"Is the {one.name} {phrase} the {other.name}?"] = yes_no(asked == how)
                sentence = f"The {one.name} is {phrase} the {other.name}."
                known[f"{sentence} True or false?"] = str(asked == how)
    return known


def test_answers_are_true_and_balanced():
    rng = random.Random(1)
    answers = {}
    for scene in SCENES:
        known = truths(scene)
        for made in exchanges(scene, rng, 10):
            assert made.answer == known[made.request], (scene.names, made)
            answers.setdefault(made.kind, Counter())[made.answer] += 1
    assert set(answers) == {"existence", "colour", "count", "relation", "statement"}
    balanced = set()
    for kind, counted in answers.items():
        for yes, no in (("Yes", "No"), ("True", "False")):
            both = counted[yes] + counted[no]
            if both:
                assert 0.4 < counted[yes] / both < 0.6, counted
                balanced.add((kind, yes))
    assert balanced >= {("existence", "Yes"), ("relation", "Yes"), ("statement", "True")}


def test_captions_mention_nothing_that_is_not_there_and_keep_their_length():
    rng = random.Random(2)
    lengths = {length: [] for length in DESCRIBE}
    for scene in SCENES:
        for length in DESCRIBE:
            text = caption(scene, rng, length).answer
            mentioned = VOCABULARY.objects(text)
            assert mentioned and set(mentioned) <= set(scene.names), (scene.names, text)
            for one in scene.things:
                if scene.count(one.name) == 1:
                    wrong = [c for c in COLOURS if c != one.colour and f" {c} {one.name}" in text]
                    assert not wrong, (one, text)
            lengths[length].append(len(text.split()))
    assert np.mean(lengths["brief"]) < 14 < np.mean(lengths["plain"]) < np.mean(lengths["detailed"])
    assert np.mean(lengths["detailed"]) > 40 and max(lengths["detailed"]) <= 70


def test_a_caption_is_worded_in_many_ways():
    scene = next(s for s in SCENES if len(s.things) == 5)
    texts = {caption(scene, random.Random(i), "detailed").answer for i in range(50)}
    assert len(texts) == 50


def test_instructions_leave_the_answer_alone():
    rng = random.Random(3)
    for scene in SCENES[:100]:
        for made in exchanges(scene, rng, 8):
            instructions = instructed(made, rng)
            assert instructions.answer == made.answer and made.request in instructions.request


@pytest.mark.parametrize("part", ["development", "test"])
def test_pope_has_three_yes_and_three_no_per_image_and_shares_the_yes(part):
    popular, companions = scene_sets.co_occurrence()
    sets = {split: scene_sets.scene_rows(part, f"pope_{split}") for split in scene_sets.SPLITS}
    yes = {}
    for split, rows in sets.items():
        assert len(rows) == 1800
        assert [row["question_id"] for row in rows] == list(range(1, 1801))
        assert [row["label"] for row in rows] == ["yes", "no"] * 900
        yes[split] = [(row["image"], row["text"]) for row in rows[::2]]
        assert len({(row["image"], row["text"]) for row in rows}) == 1800
    assert yes["random"] == yes["popular"] == yes["adversarial"]
    nouns = {existence_question(noun): noun for noun in NOUNS}
    for start in range(0, 1800, 6):
        image = sets["random"][start]["image"]
        scene = scene_sets.scene_of(image)
        assert scene.seed >= scene_sets.FIRST_SEED[part]
        absent = [noun for noun in NOUNS if noun not in scene.names]
        for split, rows in sets.items():
            six = rows[start : start + 6]
            assert {row["image"] for row in six} == {image}
            asked = [nouns[row["text"]] for row in six]
            assert asked[::2] == list(scene.names[:3])
            free = list(absent)
            for present, other in zip(asked[::2], asked[1::2], strict=True):
                counts = {"popular": popular, "adversarial": companions[present]}.get(split)
                if counts is not None:
                    assert counts[other] == max(counts[noun] for noun in free)
                free.remove(other)


def test_shipped_sets_are_those_that_the_code_builds(tmp_path):
    scene_sets.build_scene_sets(tmp_path)
    built = sorted(file.relative_to(tmp_path) for file in tmp_path.rglob("[!.]*.*"))
    assert len(built) == 13
    for file in built:
        contents = [(folder / file).read_bytes() for folder in (tmp_path, scene_sets.FOLDER)]
        if file.suffix == ".gz":
            contents = [gzip.decompress(content) for content in contents]
        assert contents[0] == contents[1], file


def test_mme_asks_two_questions_per_image_of_which_one_is_for_yes():
    rows = scene_sets.scene_rows("test", "mme")
    assert Counter(row["category"] for row in rows) == dict.fromkeys(
        ("existence", "count", "position", "color"), 120
    )
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert first["image"] == second["image"] and first["text"] != second["text"]
        assert (first["label"], second["label"]) == ("yes", "no")


def test_spatial_sets_show_the_same_two_things_in_four_relations():
    rows = scene_sets.scene_rows("test", "spatial")
    assert len(rows) == 400
    for start in range(0, 400, 4):
        four = rows[start : start + 4]
        assert [row["target"] for row in four] == four[0]["options"]
        assert len({row["group"] for row in four}) == len({row["text"] for row in four}) == 1
        four_scenes = [scene_sets.scene_of(row["image"]) for row in four]
        for row, scene in zip(four, four_scenes, strict=True):
            one, other = scene.things
            assert relation(one, other) == row["target"]
            assert row["text"].startswith(
                f"Where is the {one.name} in relation to the {other.name}?"
            )
        alike = {
            tuple(replace(t, centre=(0, 0), visible=1.0) for t in scene.things)
            for scene in four_scenes
        }
        assert len(alike) == 1
        assert len({scene.seed for scene in four_scenes}) == 4


def test_images_are_written_as_they_are_rendered(tmp_path):
    image = pytest.importorskip("PIL.Image")
    names = ["scene_7.png", "spatial_test_3_on.png"]
    scene_sets.write_images(tmp_path, names)
    for name in names:
        with image.open(tmp_path / name) as file:
            assert np.array_equal(np.asarray(file), render(scene_sets.scene_of(name)))


@pytest.mark.parametrize(
    "name", ["photo.png", "scene_x.png", "spatial_test_3_beside.png", "spatial_train_3_on.png"]
)
def test_other_names_are_refused(name):
    with pytest.raises(InputError, match="is not the file name of a scene"):
        scene_sets.scene_of(name)


def test_an_unknown_set_is_refused():
    with pytest.raises(InputError, match="pope_adversarial, chair, mme, spatial"):
        scene_sets.scene_rows("test", "amber")

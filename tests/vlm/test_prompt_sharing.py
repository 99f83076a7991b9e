"""Questions about one image share its prompt, and are answered as alone."""

import inspect
import random

import pytest

from mmdecode.decoder import Decoder
from mmdecode.engine.prompt_cache import PromptCache
from mmdecode.errors import OptionError
from mmdecode.vlm import Answerer

TEXTS = [
    "Is there a red circle in the image?",
    "Is there a blue square in the image?",
    "What?",
    "Describe the image.",
    "How many rings?",
    "What is beside the star?",
]


@pytest.fixture
def images(kit, tmp_path):
    """Paths of three images."""
    paths = [tmp_path / f"{seed}.png" for seed in range(3)]
    for seed, path in enumerate(paths):
        kit.image(seed).save(path)
    return paths


def asked(images):
    """Every question about every image, in an order of no use."""
    pairs = [(image, text) for text in TEXTS for image in images]
    random.Random(0).shuffle(pairs)
    return [*map(list, zip(*pairs, strict=True))]


def answers(model, processor, pairs, decoder=None, **options):
    answerer = Answerer(model, processor, decoder)
    found = answerer(*pairs, max_new_tokens=8, **options)
    assert [(answer.index, answer.question) for answer in found] == [*enumerate(pairs[1])]
    return found, answerer.stats.prompt_tokens


def alike(one, other):
    assert [a.token_ids for a in one] == [a.token_ids for a in other]
    for mine, theirs in zip(one, other, strict=True):
        assert mine.margin == pytest.approx(theirs.margin, abs=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("draft", [None, "lookup", "recycling"])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_answers_and_their_order_are_what_they_were(model, processor, images, batch_size, draft):
    made = [
        answers(
            model, processor, asked(images), Decoder(draft, seed=0), batch_size=batch_size, **how
        )
        for how in ({}, {"prompt_cache": 0})
    ]
    alike(made[0][0], made[1][0])
    shared, whole = made[0][1], made[1][1]
    assert not whole["reused"] and sum(shared.values()) == whole["read"]
    # 5 of 6 prefixes of each image
    assert shared["reused"] >= 3 * 5 * 16


@pytest.mark.parametrize("guide", ["vcd", "icd", "m3id", "pai"])
def test_guides_answer_what_they_did(model, processor, images, guide):
    from mmdecode import registry

    made = [
        answers(
            model,
            processor,
            asked(images),
            Decoder(guide=registry.create("guide", guide, target=model), seed=0),
            do_sample=True,
            **how,
        )[0]
        for how in ({}, {"prompt_cache": 0})
    ]
    alike(*made)


def test_noise_of_the_image_is_shared_by_its_questions(model, processor, images):
    counts = {}
    for by in ("request", "image"):
        made = [
            answers(
                model, processor, asked(images), Decoder(guide="vcd", seed=0), noise_by=by, **how
            )
            for how in ({}, {"prompt_cache": 0})
        ]
        alike(made[0][0], made[1][0])
        counts[by] = made[0][1]
    assert sum(counts["image"].values()) == sum(counts["request"].values())
    assert counts["image"]["reused"] > 2 * counts["request"]["reused"]
    with pytest.raises(OptionError, match="noise_by"):
        answers(model, processor, asked(images), noise_by="picture")


def test_a_changed_file_of_the_same_name_is_read_again(model, processor, images, kit):
    answerer = Answerer(model, processor)
    pairs = [[images[0]] * 2, TEXTS[:2]]
    first = answerer(*pairs, max_new_tokens=8)
    kit.image(7).save(images[0])
    again = answerer(*pairs, max_new_tokens=8)
    fresh = Answerer(model, processor)(*pairs, max_new_tokens=8, prompt_cache=0)
    alike(again, fresh)
    assert [a.token_ids for a in first] != [a.token_ids for a in again]


def test_images_of_any_kind_are_grouped(model, processor, images, kit, monkeypatch):
    batches, build = [], type(Answerer(model, processor).prompts).build

    def spying(self, questions):
        batches.append(len({id(question.images) for question in questions}) and questions)
        return build(self, questions)

    monkeypatch.setattr(type(Answerer(model, processor).prompts), "build", spying)
    objects = [kit.image(seed) for seed in range(2)]
    Answerer(model, processor)(objects * 2, TEXTS[:4], max_new_tokens=1, batch_size=2)
    texts = [{question.text for question in batch} for batch in batches]
    assert texts == [{TEXTS[2], TEXTS[0]}, {TEXTS[3], TEXTS[1]}]


def test_one_image_of_a_batch_that_cannot_be_read_fails_alone(model, processor, images):
    images[1].write_bytes(b"nothing")
    found = Answerer(model, processor)(*asked(images), max_new_tokens=4)
    failed = [answer.images[0] for answer in found if answer.error]
    assert failed == [str(images[1])] * 6


def test_streams_share_too(model, processor, images):
    answerer = Answerer(model, processor)
    pieces = ["".join(answerer.stream(images[0], text, max_new_tokens=8)).strip() for text in TEXTS]
    found = answerer([images[0]] * 6, TEXTS, max_new_tokens=8, prompt_cache=0)
    assert pieces == [answer.text for answer in found]
    assert answerer.stats.prompt_tokens["reused"] >= 5 * 16


def test_two_threads_share_one_cache(model, processor, images):
    from concurrent.futures import ThreadPoolExecutor

    from mmdecode import generate

    cache, answerer = PromptCache(), Answerer(model, processor)
    prompts = answerer.prompts
    inputs = [
        prompts.build([prompts.question(text, [kit_image(images[n % 3])])])
        for n, text in enumerate(TEXTS * 4)
    ]

    def ids(one, kept=cache):
        made = generate(
            model, **one, decoder=Decoder(), prompt_cache=kept, max_new_tokens=6, do_sample=False
        )
        return made.tolist()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(ids, inputs))
    assert found == [ids(one, None) for one in inputs]


def kit_image(path):
    from mmdecode.vlm import read_image

    return read_image(path)


def test_the_bound_of_a_cache_is_its_own(model, processor, images):
    cache = PromptCache(1000)
    answerer = Answerer(model, processor, prompt_cache=cache)
    answerer(images[0], "What?", max_new_tokens=2)
    answerer(images[0], "What?", max_new_tokens=2, prompt_cache=0)
    assert cache.max_bytes == 1000
    answerer(images[0], "What?", max_new_tokens=2, prompt_cache=2000)
    assert cache.max_bytes == 2000


def test_every_option_has_its_default_everywhere():
    from mmdecode.cli import ask
    from mmdecode.evaluation.task import task_of

    default = PromptCache().max_bytes
    assert inspect.signature(ask.command).parameters["prompt_cache"].default == default
    for task in ("pope", "chair"):
        assert task_of(task).options["prompt_cache"] == default

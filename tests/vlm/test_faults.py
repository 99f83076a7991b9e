"""Whatever one question raises, wherever, it fails alone, and the others have their answers."""

import pytest

from mmdecode.decoder import Decoder
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.evaluation.vision.items import YesNoItem
from mmdecode.evaluation.vision.modes import modes_of
from mmdecode.evaluation.vision.runs import Recorder
from mmdecode.vlm import Answerer
from mmdecode.vlm.images import ImageSource
from mmdecode.vlm.requests import AnswerRequest
from tests.support.faults import ERRORS, FEW, Faulty, failure_of

TEXTS = ["Is there a red circle in the image?", "What?", "the bad one", "How many rings?", "Is it?"]
BAD = 2
DECODING = ("begin", "propose", "observe")
STAGES = ("read", "prepare", "template", "score", *DECODING)


def is_bad(call):
    return any(question.text == TEXTS[BAD] for question in call.request.inputs["questions"])


def requests(kit, error=None):
    """Questions about images, of which one may raise when it is read."""

    def source(index):
        def read():
            if index == BAD and error is not None:
                raise error()
            return kit.image(index)

        return ImageSource(f"image {index}", read)

    return [
        AnswerRequest(str(n), n, text, (source(n),), named=True) for n, text in enumerate(TEXTS)
    ]


class Refusing:
    """A processor that raises at the bad question; all else is the processor's own."""

    def __init__(self, processor, error, stage):
        self._own, self._error, self._stage = processor, error, stage

    def __getattr__(self, name):
        return getattr(self._own, name)

    def __call__(self, text, **options):
        if self._stage == "prepare" and any(TEXTS[BAD] in one for one in text):
            raise self._error()
        return self._own(text=text, **options)

    def apply_chat_template(self, messages, **options):
        if self._stage == "template" and TEXTS[BAD] in str(messages):
            raise self._error()
        return self._own.apply_chat_template(messages, **options)

    @property
    def tokenizer(self):
        return Writing(self._own.tokenizer, self._error, self._stage)


class Writing:
    """A tokenizer that raises at the answer of the bad question."""

    answer: list[int] | None = None

    def __init__(self, tokenizer, error, stage):
        self.__dict__.update(_own=tokenizer, _error=error, _stage=stage)

    def __getattr__(self, name):
        return getattr(self._own, name)

    def __call__(self, *given, **options):
        return self._own(*given, **options)

    def __len__(self):
        return len(self._own)

    def decode(self, tokens, **options):
        if self._stage == "score" and tokens == self.answer:
            raise self._error()
        return self._own.decode(tokens, **options)


@pytest.fixture(scope="module")
def expected(model, processor, kit):
    asked = [one for one in requests(kit) if one.index != BAD]
    return dict(by_id(Answerer(model, processor), asked))


def by_id(answerer, asked, **options):
    found = answerer.answers(asked, max_new_tokens=3, batch_size=4, **options)
    return [(answer.id, answer.token_ids) for answer in found]


def check(name, stage, model, processor, kit, expected, monkeypatch):
    error = ERRORS[name]
    decoder = Decoder(Faulty(is_bad, error, stage)) if stage in DECODING else None
    if stage in ("prepare", "template", "score"):
        [answer] = Answerer(model, processor).answers([requests(kit)[BAD]], max_new_tokens=3)
        monkeypatch.setattr(Writing, "answer", answer.token_ids)
        processor = Refusing(processor, error, stage)
    answerer = Answerer(model, processor, decoder)
    asked = requests(kit, error if stage == "read" else None)
    found = {a.id: a for a in answerer.answers(asked, max_new_tokens=3, batch_size=4)}
    failed = found.pop(str(BAD))
    assert {name: answer.token_ids for name, answer in found.items()} == expected
    text, kind = failure_of(name)
    if stage in ("prepare", "template") and kind != "OutOfMemoryError":
        text, kind = {"prepare": "refuses", "template": "cannot be filled in"}[stage], "InputError"
    assert text in failed.error and not failed.token_ids
    assert failed.kind == kind
    assert answerer.stats.tokens == sum(map(len, expected.values()))


@pytest.mark.parametrize("stage", STAGES)
def test_a_question_that_raises_fails_alone(stage, model, processor, kit, expected, monkeypatch):
    name = FEW[STAGES.index(stage) % len(FEW)]
    check(name, stage, model, processor, kit, expected, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_every_error_at_every_stage_fails_its_question_alone(
    model, processor, kit, expected, monkeypatch
):
    count = 0
    for stage in STAGES:
        for name in ERRORS:
            check(name, stage, model, processor, kit, expected, monkeypatch)
            count += 1
    print(f"{count} errors of questions: {len(ERRORS)} kinds at {len(STAGES)} stages")


def test_what_fits_no_question_is_the_jobs_error(model, processor, kit):
    def error():
        return IncompatibleError("this guide does not fit that model; choose another")

    answerer = Answerer(model, processor, Decoder(Faulty(lambda call: True, error)))
    with pytest.raises(IncompatibleError, match="choose another"):
        by_id(answerer, requests(kit))
    one = Answerer(model, processor, Decoder(Faulty(is_bad, lambda: OptionError("a=1"))))
    assert len(by_id(one, requests(kit))) == len(TEXTS)


def test_a_question_that_no_prompt_holds_fails_alone_and_quickly(model, processor, kit, expected):
    long = AnswerRequest("long", 9, "What is beside the star? " * 6_000, (), named=True)
    answerer = Answerer(model, processor)
    asked = [*(one for one in requests(kit) if one.index != BAD), long]
    found = {a.id: a for a in answerer.answers(asked, max_new_tokens=3, text_only=True)}
    failed = found.pop("long")
    assert "shorten the question" in failed.error
    assert {name: answer.token_ids for name, answer in found.items()} == expected


# Evaluated


def evaluated(name, stage, model, processor, kit, expected, monkeypatch):
    error = ERRORS[name]
    if stage == "score":
        [answer] = Answerer(model, processor).answers([requests(kit)[BAD]], max_new_tokens=3)
        monkeypatch.setattr(Writing, "answer", answer.token_ids)
        processor = Refusing(processor, error, stage)
    images = [one.images[0] for one in requests(kit, error if stage == "read" else None)]
    items = [
        YesNoItem(id=str(n), image=str(n), question=text, target="yes")
        for n, text in enumerate(TEXTS)
    ]
    recorder = Recorder(
        model,
        processor,
        items,
        modes_of(["none"], controls=False),
        lambda image: images[int(image)],
        max_new_tokens=3,
        batch_size=4,
        warmup=0,
    )
    if stage in DECODING:
        faulty = Decoder(Faulty(is_bad, error, stage))
        monkeypatch.setattr("mmdecode.evaluation.vision.runs.Decoder", lambda **_: faulty)
    rows = {row.id: row for row in recorder.run()}
    assert failure_of(name)[0] in rows.pop(str(BAD)).error
    assert {name: row.tokens for name, row in rows.items()} == {
        name: len(tokens) for name, tokens in expected.items()
    }
    assert not any(row.error for row in rows.values())


@pytest.mark.parametrize(
    ("stage", "name"), [("read", "RuntimeError"), ("begin", "OptionError"), ("score", "allocator")]
)
def test_a_question_that_raises_is_scored_as_wrong(
    stage, name, model, processor, kit, expected, monkeypatch
):
    evaluated(name, stage, model, processor, kit, expected, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_every_error_at_every_stage_of_an_evaluation_is_its_questions(
    model, processor, kit, expected
):
    stages = ("read", "score", *DECODING)
    for stage in stages:
        for name in ERRORS:
            with pytest.MonkeyPatch.context() as patch:
                evaluated(name, stage, model, processor, kit, expected, patch)
    count = len(ERRORS) * len(stages)
    print(f"{count} errors of evaluated questions: {len(ERRORS)} kinds at {len(stages)} stages")

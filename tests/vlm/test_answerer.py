"""Images and questions in, answers out: as alone, as `generate` has them, and whatever fails."""

import inspect
import re
import threading

import numpy as np
import pytest
import torch
from transformers import pipeline

import mmdecode
from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.engine.prompt_cache import PromptCache
from mmdecode.errors import InputError, MissingExtraError, OptionError, UnsupportedModelError
from mmdecode.guide.answers import word_ids, yes_no_margin
from mmdecode.guide.linear import Linear
from mmdecode.vlm import Answerer
from mmdecode.vlm.questions import noise_name
from mmdecode.vlm.requests import read_requests, requests_of
from tests.support.files import write_json_lines

TEXTS = ["Is there a red circle in the image?", "What?", "Describe the image.", "How many rings?"]
GUIDE = "contrast:alpha=1,prompt=last_token"


@pytest.fixture(scope="module")
def answerer(model, processor):
    return Answerer(model, processor)


@pytest.fixture
def images(kit):
    return [kit.image(seed) for seed in range(4)]


def ids_of(answers):
    return [answer.token_ids for answer in answers]


def plain(model, answerer, image, text, **options):
    """What transformers generates of one question without us."""
    inputs = answerer.prompts.build([answerer.prompts.question(text, [image])])
    output = model.generate(**inputs, do_sample=False, max_new_tokens=12, **options)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


# What is said


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_answers_are_those_of_generate_in_the_order_of_the_input(
    answerer, model, images, batch_size
):
    found = answerer(images, TEXTS, max_new_tokens=12, batch_size=batch_size)
    expected = [plain(model, answerer, *pair) for pair in zip(images, TEXTS, strict=True)]
    assert ids_of(found) == expected
    assert len({tuple(ids) for ids in expected}) == 4
    assert [(a.index, a.id, a.question, a.images) for a in found] == [
        (i, str(i), TEXTS[i], (f"image {i}",)) for i in range(4)
    ]


def test_questions_of_a_length_are_decoded_together(answerer, images, monkeypatch):
    batches = []
    build = type(answerer.prompts).build

    def spying(self, questions):
        batches.append([question.text for question in questions])
        return build(self, questions)

    monkeypatch.setattr(type(answerer.prompts), "build", spying)
    answerer(images, TEXTS, max_new_tokens=1, batch_size=2)
    assert batches == [["What?", "Describe the image."], ["How many rings?", TEXTS[0]]]


def test_one_image_or_one_question_goes_with_all_others(answerer, images):
    several = answerer(images[0], TEXTS[:2], max_new_tokens=4)
    assert [a.question for a in several] == TEXTS[:2]
    several = answerer(images, "What?", max_new_tokens=4)
    assert [a.images for a in several] == [(f"image {i}",) for i in range(4)]
    assert len({tuple(a.token_ids) for a in several}) > 1
    stack = np.stack([np.asarray(image) for image in images])
    assert ids_of(answerer(stack, "What?", max_new_tokens=4)) == ids_of(several)
    assert answerer([], [], max_new_tokens=4) == answerer([], "What?") == []


def test_several_images_of_one_question(answerer, images):
    both, turned = answerer(
        [images[:2], images[1::-1]], "Is <image> like <image>?", max_new_tokens=8
    )
    assert both.token_ids != turned.token_ids
    assert both.images == ("image 0.0", "image 0.1")


def test_text_alone_is_answered_where_it_is_meant(answerer, images):
    refused = answerer([None, images[0]], "What?", max_new_tokens=4)
    assert "text_only=True" in refused[0].error
    assert refused[1].error is None
    meant = answerer([None, images[0]], "What?", max_new_tokens=4, text_only=True)
    assert meant[0].error is None
    assert meant[1].token_ids == refused[1].token_ids
    assert meant[0].images == ()


def test_an_answer_ends_where_the_model_ends_it(kit, processor, images):
    model = kit.build_model(processor)
    long = Answerer(model, processor)(images[0], "What?", max_new_tokens=10)
    model.generation_config.eos_token_id = [long.token_ids[3], 2]
    short = Answerer(model, processor)([images[0], images[1]], "What?", max_new_tokens=10)
    first = long.token_ids.index(long.token_ids[3])
    assert short[0].token_ids == long.token_ids[: first + 1]


def test_the_settings_of_a_checkpoint_do_not_sample(kit, processor, images, answerer):
    model = kit.build_model(processor)
    model.generation_config.do_sample = True
    model.generation_config.temperature = 5.0
    model.generation_config.top_k = 3
    found = Answerer(model, processor)(images[0], "What?", max_new_tokens=6)
    assert found.token_ids == answerer(images[0], "What?", max_new_tokens=6).token_ids


def test_no_setting_of_a_checkpoint_warps_the_sampling_distribution(
    kit, processor, images, answerer
):
    """Settings that transformers may add are found by the warpers it builds of them."""
    model = kit.build_model(processor)
    config = model.generation_config
    settings = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "top_h": 0.4,
                "typical_p": 0.5, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1}  # fmt: skip
    config.update(**settings)
    config.repetition_penalty = 1.5
    built = []
    prepare = model._get_logits_processor

    def noted(*given, **named):
        found = prepare(*given, **named)
        built.append({type(one).__name__ for one in found})
        return found

    inputs = answerer.prompts.build([answerer.prompts.question("What?", images[:1])])
    model._get_logits_processor = noted
    model.generate(**inputs, do_sample=True, max_new_tokens=1)
    source = inspect.getsource(type(model)._get_logits_processor)
    warpers = set(re.findall(r"\b\w+LogitsWarper\b", source))
    assert warpers == built[-1] - {"RepetitionPenaltyLogitsProcessor"}
    options = {"max_new_tokens": 6, "do_sample": True}
    found = Answerer(model, processor)(images[0], "What?", **options)
    assert built[-1] == {"RepetitionPenaltyLogitsProcessor"}
    config.repetition_penalty = 1.0
    found = Answerer(model, processor)(images[0], "What?", **options)
    assert built[-1] == set()
    assert found.token_ids == answerer(images[0], "What?", **options).token_ids


def test_a_draft_and_a_guide_go_together(model, processor, images, folder):
    guided = Answerer.from_pretrained(folder, guide=GUIDE, device="cpu")
    found = guided(images, TEXTS, max_new_tokens=12)
    assert guided.stats is guided.decoder.stats
    assert guided.stats.tokens == sum(len(a.token_ids) for a in found)
    drafted = Answerer.from_pretrained(folder, draft="lookup", guide=GUIDE, device="cpu")
    assert ids_of(drafted(images, TEXTS, max_new_tokens=12)) == ids_of(found)
    assert drafted.stats.drafted > 0
    assert ids_of(Answerer(model, processor)(images, TEXTS, max_new_tokens=12)) != ids_of(found)


def test_a_call_is_counted(answerer, images):
    one = answerer(images[0], "What?", max_new_tokens=7, trace=True)
    assert one.passes == len(one.token_ids) - 1
    assert one.seconds > 0
    assert sum(r.kept for r in one.trace) == len(one.token_ids)
    assert answerer(images[0], "What?", max_new_tokens=7).trace is None


# What a guide is shown


class Spy(Linear):
    """A guide that keeps the questions of its calls, and asks them anew without an image."""

    def __init__(self):
        super().__init__([], [1.0], beta=0.5)
        self.neutral, self.seen = False, []

    def begin(self, call, prefill):
        self.seen.append(call.request.inputs)


def test_a_guide_is_given_the_questions_and_the_raw_pixels_of_its_rows(model, processor, images):
    spy = Spy()
    answerer = Answerer(model, processor, mmdecode.Decoder(guide=spy))
    answerer(images[:2], ["What is beside the star?", "What?"], max_new_tokens=2)
    [seen] = spy.seen
    assert [question.text for question in seen["questions"]] == [
        "What?",
        "What is beside the star?",
    ]
    assert seen["questions"][0].images[0].tobytes() == images[1].tobytes()
    built = seen["questions"][0].build(seen["questions"])
    assert torch.equal(built["pixel_values"], seen["pixel_values"])


# Margins


def test_the_margin_is_that_of_the_models_own_first_logits(model, answerer, images):
    one = answerer(images[0], "Is there a ring?", max_new_tokens=3)
    inputs = answerer.prompts.build([answerer.prompts.question("Is there a ring?", images[:1])])
    with torch.no_grad():
        logits = model(**inputs).logits[0, -1]
    names = answerer.processor.tokenizer.convert_tokens_to_ids(["Yes", "ĠYes", "No", "ĠNo"])
    p = logits.double().softmax(-1)[names]
    assert one.margin == pytest.approx(float(torch.log((p[0] + p[1]) / (p[2] + p[3]))), abs=1e-4)


def test_the_margin_does_not_depend_on_the_guide_or_the_draft(answerer, images, folder):
    kept = [a.margin for a in answerer(images, TEXTS, max_new_tokens=3)]
    other = Answerer.from_pretrained(folder, draft="lookup", guide=GUIDE, device="cpu")
    found = [a.margin for a in other(images, TEXTS, max_new_tokens=3)]
    assert found == pytest.approx(kept, abs=1e-4)
    assert answerer(images[0], "What?", max_new_tokens=3, margins=False).margin is None


def test_the_margin_is_that_of_the_edited_branch_where_a_guide_edits_it(model, processor, images):
    def first(guide):
        decoder = Decoder(guide=registry.create("guide", guide, target=model), seed=0)
        answerer = Answerer(model, processor, decoder)
        answer = answerer(images[0], "Is there a ring?", max_new_tokens=1, trace=True)
        return answer

    for guide in ("scalingvis:weight=9", "adaptvis:unsure=9,sure=9", "prompt_bias"):
        edited = first(guide)
        assert edited.margin == pytest.approx(edited.margins["guided"], abs=1e-4)
        assert edited.margin == pytest.approx(edited.margins["main"], abs=1e-4)
        assert edited.trace[0].steps[0].changed is None


def test_words_are_found_in_every_spelling(answerer):
    class Tokens:
        known = ("▁yes", "Yes", "ĠYES", "yesterday", "no", "▁No", "not", None, "<no>")

        def __len__(self):
            return len(self.known)

        def convert_ids_to_tokens(self, ids):
            return [self.known[i] for i in ids]

    assert word_ids(Tokens(), "yes") == [0, 1, 2]
    assert word_ids(Tokens(), "no") == [4, 5]
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0, 1.0, 1.0]])
    expected = np.log(np.exp([0, 1, 2]).sum()) - np.log(2 * np.e)
    assert yes_no_margin(logits, [0, 1, 2], [4, 5]).item() == pytest.approx(expected)


# Sampling: an answer is a matter of the request, not of its neighbours


def test_a_sampled_answer_depends_on_the_request_alone(answerer, images):
    options = {"do_sample": True, "max_new_tokens": 8, "temperature": 1.5}
    together = answerer(images, "What?", **options)
    turned = answerer(images[::-1], "What?", batch_size=3, **options)
    assert ids_of(turned)[::-1] == ids_of(together)
    assert len({tuple(ids) for ids in ids_of(together)}) == 4


def test_requests_with_ids_draw_by_their_ids(answerer, images):
    options = {"do_sample": True, "max_new_tokens": 8, "temperature": 5.0}
    first, again, other = (
        answerer([images[0]] * 2, "What?", ids=ids, **options)
        for ids in (["a", "b"], ["b", "a"], ["a", "c"])
    )
    assert ids_of(first) == ids_of(again)[::-1]
    assert first[0].token_ids != first[1].token_ids
    assert first[0].token_ids == other[0].token_ids != other[1].token_ids
    same = answerer([images[0]] * 2, "What?", **options)
    assert same[0].token_ids == same[1].token_ids


def test_sampling_draws_from_what_is_asked_for(answerer, images):
    greedy = answerer(images[0], "What?", max_new_tokens=8)
    for narrow in ({"top_p": 1e-6}, {"top_k": 1}, {"temperature": 1e-4}):
        found = answerer(images[0], "What?", max_new_tokens=8, do_sample=True, **narrow)
        assert found.token_ids == greedy.token_ids
    free = answerer(images[0], "What?", max_new_tokens=8, do_sample=True, temperature=9.0)
    assert free.token_ids != greedy.token_ids


# Streams


def test_a_stream_yields_the_answer_in_pieces(answerer, images):
    answer = answerer(images[0], TEXTS[0], max_new_tokens=40)
    pieces = list(answerer.stream(images[0], TEXTS[0], max_new_tokens=40))
    assert "".join(pieces).strip() == answer.text
    assert len(pieces) > 1


def test_a_stream_that_is_left_ends_its_work(answerer, images):
    before = threading.active_count()
    answerer.stats.reset()
    stream = answerer.stream(images[0], TEXTS[0], max_new_tokens=80)
    next(stream)
    stream.close()
    assert threading.active_count() == before
    assert answerer.stats.tokens < 80


def test_what_goes_wrong_in_a_stream_is_raised_where_it_is_read(answerer, images, monkeypatch):
    with pytest.raises(InputError, match="does not exist"):
        list(answerer.stream("gone.png", "What?"))
    with pytest.raises(InputError, match="text_only"):
        list(answerer.stream(None, "What?"))

    def broken(*args, **kwargs):
        raise RuntimeError("of the model")

    monkeypatch.setattr(answerer.model, "generate", broken)
    with pytest.raises(RuntimeError, match="of the model"):
        list(answerer.stream(images[0], "What?"))


# What fails


def test_a_bad_image_fails_alone(answerer, images, tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    found = answerer([images[0], bad, "gone.png", images[1]], TEXTS, max_new_tokens=6)
    assert [a.kind for a in found] == [None, "InputError", "InputError", None]
    assert found[1].error.startswith(f"{bad}: is no image")
    assert found[1].images == (str(bad),)
    assert found[1].text == ""
    alone = answerer([images[0], images[1]], [TEXTS[0], TEXTS[3]], max_new_tokens=6)
    assert ids_of(alone) == [found[0].token_ids, found[3].token_ids]
    with pytest.raises(InputError, match=r"bad\.png: is no image"):
        answerer([images[0], bad], "What?", on_error="raise")


def test_what_is_no_question_is_refused(answerer, images):
    with pytest.raises(InputError, match="questions are of type NoneType; expected a text"):
        answerer(images[0], None)


def test_one_question_gives_one_answer_and_several_a_list_with_failures_in_it(
    answerer, images, tmp_path
):
    alone = answerer(images[0], "What?", max_new_tokens=6)
    for given, questions in (([images[0]], "What?"), (images[0], ["What?"])):
        [listed] = answerer(given, questions, max_new_tokens=6)
        assert listed.token_ids == alone.token_ids
    with pytest.raises(InputError, match=r"gone\.png: does not exist"):
        answerer("gone.png", "What?")
    failed = answerer("gone.png", "What?", on_error="return")
    assert (failed.text, failed.kind) == ("", "InputError")
    with pytest.raises(OptionError, match="expected 'raise' or 'return'"):
        answerer(images[0], "What?", on_error="skip")
    path = tmp_path / "a.png"
    images[0].save(path)
    with path.open("rb") as file:
        assert answerer(file, "What?", max_new_tokens=6).token_ids == alone.token_ids
    with path.open(errors="replace") as file, pytest.raises(InputError, match="mode 'rb'"):
        answerer(file, "What?")
    with pytest.raises(InputError, match=r"image 0: cannot be read .*closed"):
        answerer(file, "What?")


def test_what_a_processor_refuses_fails_alone(answerer, images, monkeypatch):
    kind = type(answerer.processor)
    stock = kind.__call__

    def picky(self, text, **options):
        if any("rings" in one for one in text):
            raise ValueError("no rings, please")
        return stock(self, text=text, **options)

    monkeypatch.setattr(kind, "__call__", picky)
    found = answerer(images, TEXTS, max_new_tokens=3)
    assert [a.error is None for a in found] == [True, True, True, False]
    assert "no rings, please" in found[3].error
    assert all(a.token_ids for a in found[:3])


def test_a_prompt_that_leaves_no_room_fails_alone(answerer, images, monkeypatch):
    monkeypatch.setattr(answerer, "max_positions", 60)
    long = "What is beside the star? " * 40
    found = answerer(images[:2], ["What?", long], max_new_tokens=20)
    assert found[0].error is None
    assert "may have 20, and LlavaForConditionalGeneration has 60 positions" in found[1].error
    with pytest.raises(InputError, match="lower max_new_tokens"):
        answerer(images[0], "What?", max_new_tokens=50)


def test_a_prompt_a_hundred_times_too_long_fails_alone_before_it_is_read(
    answerer, images, monkeypatch
):
    monkeypatch.setattr(answerer, "max_positions", None)
    monkeypatch.setattr(answerer, "made_for", 2)
    long = "What is beside the star? " * 100
    found = answerer(images[:2], ["What?", long], max_new_tokens=2)
    assert found[0].error is None
    assert "was made for 2 (max_position_embeddings)" in found[1].error


def test_what_does_not_fit_in_memory_is_decoded_in_parts(answerer, images, monkeypatch):
    expected = answerer(images, TEXTS, max_new_tokens=4)
    stock, sizes = answerer.model.generate, []

    def small(*args, **options):
        sizes.append(len(options["input_ids"]))
        if sizes[-1] > 2 or (sizes[-1] == 1 and "blind" in sizes):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return stock(*args, **options)

    monkeypatch.setattr(answerer.model, "generate", small)
    assert ids_of(answerer(images, TEXTS, max_new_tokens=4)) == ids_of(expected)
    assert sizes == [4, 2, 2]

    def smaller(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(answerer.model, "generate", smaller)
    with pytest.raises(MemoryError, match="not enough memory"):
        answerer(images[0], "What?", max_new_tokens=4)


@pytest.mark.parametrize(
    ("images", "questions", "ids", "message"),
    [
        (["a", "b"], ["What?"] * 3, None, "2 images for 3 questions; give one image per question"),
        (["a", "b"], ["What?"] * 2, ["x"], "1 different ids for 2 questions"),
        (["a", "b"], ["What?"] * 2, ["x", "x"], "1 different ids for 2 questions"),
    ],
)
def test_what_does_not_pair_up_is_refused(images, questions, ids, message):
    with pytest.raises(OptionError, match=message):
        requests_of(images, questions, ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "expected at least 1"),
        ({"batch_size": 0}, "expected at least 1"),
        ({"frames": "2"}, "frames='2'; expected a whole number"),
        ({"frames": 2.5}, "frames=2.5; expected a whole number"),
        ({"max_new_tokens": True}, "max_new_tokens=True; expected a whole number"),
        ({"max_new_tokens": None}, "max_new_tokens=None; expected a whole number"),
        ({"fps": "1"}, "fps='1'; expected a number"),
        ({"prompt_cache": 1.5}, "prompt_cache=1.5; expected a whole number of bytes"),
        ({"prompt_cache": PromptCache()}, "give the cache itself to Answerer"),
        ({"do_sample": True, "temperature": 0.0}, "expected more than 0"),
        ({"do_sample": True, "top_p": 1.5}, "at most 1"),
        ({"do_sample": True, "top_k": -1}, "or 0 for all"),
        ({"temperature": 0.5}, "set do_sample=True too"),
        ({"max_new_token": 3}, "did you mean 'max_new_tokens'"),
    ],
)
def test_options_out_of_range_are_refused(answerer, images, options, message):
    with pytest.raises(OptionError, match=message):
        answerer(images[0], "What?", **options)


def test_checkpoints_that_cannot_answer_are_refused(folder, tmp_path, monkeypatch):
    with pytest.raises(UnsupportedModelError, match="is a whisper model; expected a vision-lang"):
        Answerer.from_pretrained("zoo:whisper-synth")
    with pytest.raises(InputError, match="does not exist; give a folder"):
        Answerer.from_pretrained(tmp_path / "gone")
    with pytest.raises(InputError, match="cannot be loaded"):
        Answerer.from_pretrained(tmp_path)
    with pytest.raises(OptionError, match="dtype='int8'; expected auto, fp32"):
        Answerer.from_pretrained(folder, dtype="int8")
    with pytest.raises(OptionError, match="device 'abacus' is not known"):
        Answerer.from_pretrained(folder, device="abacus")

    def incomplete(path, **options):
        raise ImportError("requires the Torchvision library")

    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", incomplete)
    with pytest.raises(MissingExtraError, match=r"Torchvision.*mmdecode\[vlm\]"):
        Answerer.from_pretrained(folder)


def test_a_checkpoint_answers_in_half_precision(folder, images):
    half = Answerer.from_pretrained(folder, device="cpu", dtype="bfloat16")
    assert half.model.dtype == torch.bfloat16
    assert len(half(images[0], "What?", max_new_tokens=3).token_ids) == 3


# Tables of questions


def test_a_table_names_images_by_folder(tmp_path, images):
    table = tmp_path / "q.jsonl"
    rows = [
        {"question_id": 7, "image": "a.png", "text": "Is it?", "label": "yes"},
        {"id": "x", "images": ["a.png", "b.png"], "question": "Both?"},
        {"image": "a.png", "question": "Which?"},
        {"question": "Alone?"},
    ]
    write_json_lines(table, rows)
    found = read_requests(table)
    assert [(r.id, r.index, r.text, r.named) for r in found] == [
        ("7", 0, "Is it?", True),
        ("x", 1, "Both?", True),
        ("a.png: Which?", 2, "Which?", False),
        ("Alone?", 3, "Alone?", False),
    ]
    assert [[i.name for i in r.images] for r in found[:2]] == [
        [str(tmp_path / "a.png")],
        [str(tmp_path / "a.png"), str(tmp_path / "b.png")],
    ]
    [one] = read_requests(table, 1, tmp_path / "coco")
    assert one.images[0].name == str(tmp_path / "coco" / "a.png")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"image": "a.png"}', "line 2 asks nothing; expected 'question' or 'prompt'"),
        ('{"image": "a.png", "question": "Is it?"}', "has the id .* of line 1"),
        ('{"image": 3.5, "question": "Is?"}', "has float"),
        ('{"images": "a.png", "question": "Is?"}', "expected a list of paths"),
        ('{"images": ["a.png", ""], "question": "Is?"}', "has the path ''"),
        ('{"images": [["a.png"]], "question": "Is?"}', "has list"),
        ('{"image": "a\\u0000.png", "question": "Is?"}', "has the path"),
        ("{", "is not JSON"),
        ("[1]", "holds list"),
    ],
)
def test_a_line_that_asks_nothing_is_refused_by_its_number(tmp_path, line, message):
    table = tmp_path / "q.jsonl"
    table.write_text('{"image": "a.png", "question": "Is it?"}\n' + line + "\n")
    with pytest.raises(InputError, match=message):
        read_requests(table)
    table.write_text("")
    with pytest.raises(InputError, match="holds no line"):
        read_requests(table)


# Inside a pipeline of transformers


class Listener(Spy):
    """Hears which raw pixels a guided pipeline hands over."""


def test_a_guided_decoder_works_inside_the_pipeline_under_attach(model, processor, images):
    answerer = Answerer(model, processor, mmdecode.Decoder(guide=GUIDE))
    expected = answerer(images[:2], ["What?", "Is there a red circle?"], max_new_tokens=6)
    listener = Listener()
    ask = pipeline("image-text-to-text", model=model, processor=processor)
    chats = [
        [{"role": "user", "content": [{"type": "image", "image": p}, {"type": "text", "text": t}]}]
        for p, t in zip(images[:2], ["What?", "Is there a red circle?"], strict=True)
    ]

    def answers(decoder):
        kwargs = {"max_new_tokens": 6, "do_sample": False, "custom_generate": decoder}
        found = ask(chats, return_full_text=False, generate_kwargs=kwargs)
        return [one[0]["generated_text"].strip() for one in found]

    with mmdecode.attach(ask.model):
        assert answers(mmdecode.Decoder(guide=GUIDE)) == [a.text for a in expected]
        answers(mmdecode.Decoder(guide=listener))
    assert all(seen["pixel_values"].shape[-1] == 16 for seen in listener.seen)
    assert len(listener.seen) == 2


def test_what_is_known_of_an_answer_is_that_of_its_own_row(folder, images):
    answerer = Answerer.from_pretrained(folder, guide=GUIDE, device="cpu")
    options = {"max_new_tokens": 4, "trace": True, "first_logits": True}
    together = answerer(images, "What is there?", **options)
    assert len({answer.margin for answer in together}) == len(together)
    for answer, image in zip(together, images, strict=True):
        alone = answerer(image, "What is there?", **options)
        assert answer.margin == pytest.approx(alone.margin, abs=1e-4)
        assert answer.margins == pytest.approx(alone.margins, abs=1e-4)
        assert [one.decided for one in answer.trace] == answer.token_ids
        torch.testing.assert_close(answer.first_logits, alone.first_logits, atol=1e-4, rtol=1e-4)


def test_the_seconds_of_a_batch_are_shared(answerer, images, monkeypatch):
    clock = iter(range(0, 100, 6))
    monkeypatch.setattr("mmdecode.vlm.answerer.time.perf_counter", lambda: next(clock))
    assert [a.seconds for a in answerer(images[:3], "What?", max_new_tokens=1)] == [2.0] * 3


def test_the_noise_of_a_question_depends_on_its_image(answerer, images):
    names = []
    for image in images[:2]:
        [request] = requests_of([image], "What?")
        names.append(noise_name(request, answerer.prompts.question("What?", [image])))
    assert names[0] != names[1]

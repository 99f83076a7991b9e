"""A text model drafts for a vision-language model; its drafts do not depend on the image."""

import pytest
import torch

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.draft import assistant
from mmdecode.draft.assistant import Assistant
from mmdecode.engine.adapter import MAIN
from mmdecode.engine.call import Call, DraftTarget, Plan
from mmdecode.engine.contracts import BranchOutput
from mmdecode.guide.guidance import Guidance
from tests.support.rounds import rounds_of
from tests.support.tiny import text_model
from tests.support.tiny_vlm import CONFIGS, IMAGE, ours, reference, vision_inputs, vision_model


def text_drafter():
    return text_model("llama", seed=9, layers=1)


def words_alone(model, ids, written, length):
    """What the model of text would write after the words of a prompt, and what was written."""
    tokens = [*(token for token in ids if token != IMAGE), *written]
    for _ in range(length):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-length:]


def assert_drafts_from_words(family, inputs, **options):
    model = text_drafter()
    decoder = Decoder(Assistant(model, length=3, **options))
    rows = rounds_of(decoder, lambda d: ours(d, family, inputs=inputs))
    for ids, mask, rounds in zip(
        inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), rows, strict=True
    ):
        prompt = [token for token, real in zip(ids, mask, strict=True) if real]
        assert len(rounds) > 5
        for written, drafted in rounds:
            assert drafted == words_alone(model, prompt, written, 3)[: len(drafted)]


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl"])
@torch.no_grad()
def test_drafts_are_those_of_the_words_alone(family):
    assert_drafts_from_words(family, vision_inputs(family))


PLANTED = {
    "a prompt with its placeholders": lambda call: MAIN,
    "words without their padding mask": lambda call: assistant.BranchSpec(
        name="main", prompt=WORDS(call).prompt
    ),
}
WORDS = assistant._words


@pytest.mark.parametrize("name", PLANTED)
@torch.no_grad()
def test_the_comparison_finds(name, monkeypatch):
    monkeypatch.setattr(assistant, "_words", PLANTED[name])
    with pytest.raises(AssertionError):
        assert_drafts_from_words("llava", vision_inputs("llava"))


@torch.no_grad()
def test_asked_for_they_are_left_in():
    with pytest.raises(AssertionError):
        assert_drafts_from_words("llava", vision_inputs("llava"), text_only=False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", CONFIGS)
def test_the_target_writes_what_it_would(family):
    expected, _ = reference(family)
    assert ours(Decoder(Assistant(text_drafter(), 3)), family).tolist() == expected.tolist()


def test_a_model_that_reads_images_may_draft_from_text_only():
    """Then the same pictures and others are the same to it."""

    class Noting(Assistant):
        def begin(self, call, prefill):
            session = super().begin(call, prefill)
            self.read = session.branch.prefill(call, {})["main"].logits
            return super().begin(call, prefill)

    inputs = vision_inputs("llava")
    other = {**inputs, "pixel_values": inputs["pixel_values"] * -1.5}
    for text_only in (True, False):
        read = []
        for given in (inputs, other):
            draft = Noting(vision_model("llava", seed=3), 3, text_only=text_only)
            expected = ours(Decoder(), "llava", inputs=given)
            seen = {"pixel_values": given["pixel_values"]}
            found = ours(Decoder(draft), "llava", inputs=given, mm_inputs=seen)
            assert found.tolist() == expected.tolist()
            read.append(draft.read)
        assert torch.equal(*read) == text_only


@torch.no_grad()
def test_a_reader_of_words_is_not_guided():
    inputs, guide = vision_inputs("llava"), Guidance(2.0)
    plan = Plan(
        adapter=registry.adapter_for(vision_model("llava")), draft_target=DraftTarget(guide=guide)
    )
    mask = inputs["attention_mask"].bool()
    call = Call.of(inputs["input_ids"], mask, length=0, plan=plan)
    prefilled = BranchOutput(logits=torch.zeros(len(mask), 1, plan.adapter.vocab))
    session = Assistant(text_drafter(), 3).begin(call, prefilled)
    assert "the words of the prompt alone" in session.unguided
    assert session.branch.specs[0].prompt is not MAIN.prompt and len(session.branch.specs) == 1


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_prompt_that_ends_with_an_image_is_drafted_for(do_sample):
    ids = torch.tensor([[7, 9, *[IMAGE] * 4], [*[IMAGE] * 4, 7, 9], [0, 0, *[IMAGE] * 4]])
    pixels = vision_inputs("llava")["pixel_values"][:3]
    inputs = {"input_ids": ids, "attention_mask": (ids > 0).long(), "pixel_values": pixels}
    options = {**inputs, "do_sample": do_sample, "max_new_tokens": 12, "mm_request": [1, 2, 3]}
    model = vision_model("llava")
    rows = [
        model.generate(**options, custom_generate=Decoder(draft, seed=5)).tolist()
        for draft in (None, Assistant(text_drafter(), 3))
    ]
    assert rows[0] == rows[1]


def test_a_string_says_so():
    draft = registry.create(
        "draft", "assistant:text_only=true,max_rejection_probability=0.5", model=object()
    )
    assert draft.text_only and draft.max_rejection_probability == 0.5

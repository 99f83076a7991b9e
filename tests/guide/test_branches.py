"""Each branch of the linear family on every model family: live, cached right, and its row's own."""

import dataclasses
import functools
import zlib

import pytest
import torch

import mmdecode
from mmdecode.decoder import Decoder
from mmdecode.errors import IncompatibleError
from mmdecode.guide import AGLA, ICD, M3ID, RITUAL, VCD, CFGImage, Linear, PromptBias
from mmdecode.testing import drafts
from tests.conformance import test_instructblip as instructblip
from tests.conformance.test_transforms import FAMILIES, alone
from tests.support.tiny import HiddenPath
from tests.support.tiny_vlm import IMAGE, vision_inputs, vision_model

STEPS = 5
TILED = ("idefics3", "smolvlm")  # several images may be parts of one
NAMES = ("first", "second", "third")
MARKS = list(range(75, 80))  # not to be generated: they would look for images


def eight_bit(pixels):
    """Pixels as of images with eight bits, by the normalisation of SigLIP; padding stays."""
    steps = (pixels * 40 + 128).clamp(0, 255).round()
    return torch.where(pixels == 0, 0.0, (steps / 255 - 0.5) / 0.5)


@functools.cache
def prompts(family, batch=3):
    inputs = vision_inputs(family)
    inputs["pixel_values"] = eight_bit(inputs["pixel_values"])
    if batch == 3:
        return inputs
    return alone(family, inputs, row=0)


def longer(inputs, new):
    """Prompts with generated tokens after them."""
    more = dict(inputs)
    more["input_ids"] = torch.cat([inputs["input_ids"], new], 1)
    for name, value in (("attention_mask", 1), ("token_type_ids", 0), ("mm_token_type_ids", 0)):
        if name in inputs:
            more[name] = torch.nn.functional.pad(inputs[name], (0, new.shape[1]), value=value)
    return more


@dataclasses.dataclass(frozen=True)
class Asked:
    """A question as Answerer hands it over, whose words become ids by a rule of their own."""

    text: str
    images: tuple
    row: int
    inputs: dict

    def build(self, questions):
        inputs = self.inputs
        rows = []
        for question in questions:
            real = inputs["attention_mask"][question.row].bool()
            words = [zlib.crc32(word.encode()) % 59 + 1 for word in question.text.split()]
            rows.append([*words, *inputs["input_ids"][question.row][real].tolist()])
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        built = {**inputs, "input_ids": ids, "attention_mask": mask}
        for name, images in (("token_type_ids", False), ("mm_token_type_ids", True)):
            if name in inputs:
                marked = images or bool(inputs[name].any())
                built[name] = (ids == IMAGE).long() * marked
        return built


def asked(inputs):
    return [Asked("", (), row, inputs) for row in range(len(inputs["input_ids"]))]


class Spied(Linear):
    """A combination that keeps what its branches say."""

    def __init__(self, branches, weights):
        super().__init__(branches, weights)
        self.seen = []

    def apply(self, constants, call, proposal, outputs):
        self.seen.append({name: own.logits.clone() for name, own in outputs.items()})
        return super().apply(constants, call, proposal, outputs)


def all_branches(family, kind):
    """Every kind of branch that the family has, in one combination."""
    if kind == "questions":
        guides = [ICD()]
    else:
        guides = [
            VCD(),
            M3ID(),
            AGLA(),
            CFGImage(without="mean"),
            CFGImage(without="zero_features"),
            *[RITUAL(transform="vertical_flip"), CFGImage(without="black")] * (family not in TILED),
        ]
    branches = [
        dataclasses.replace(guide.branches[0], name=f"{type(guide).__name__}{index}")
        for index, guide in enumerate(guides)
    ]
    return Spied(branches, [1.5, *[-0.5 / len(branches)] * len(branches)])


def run(family, guide, inputs, draft=None, new=STEPS, do_sample=False, words=True, **options):
    questions = {"questions": asked(inputs)} if words else {}
    return mmdecode.generate(
        vision_model(family),
        decoder=Decoder(draft, guide, seed=3),
        max_new_tokens=new,
        do_sample=do_sample,
        request=NAMES[: len(inputs["input_ids"])],
        mm_inputs=questions,
        suppress_tokens=MARKS,
        **inputs,
        **options,
    )[:, inputs["input_ids"].shape[1] :]


@functools.cache
def decoded(family, kind):
    guide = all_branches(family, kind)
    return run(family, guide, prompts(family), words=kind == "questions"), guide.seen


KINDS = pytest.mark.parametrize("kind", ["images", "questions"])
EVERYWHERE = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.one_in(2)
@KINDS
@EVERYWHERE
def test_every_branch_is_live_at_every_step_and_only_where_there_are_images(family, kind):
    _, seen = decoded(family, kind)
    assert len(seen) == STEPS
    for scores in seen:
        main = scores.pop("main")
        for name, logits in scores.items():
            apart = (logits - main).abs().flatten(1).amax(1)
            assert apart[0] > 1e-3 and apart[2] > 1e-3, name
            assert apart[1] > 1e-3 if kind == "questions" else apart[1] < 1e-3, name
        scores["main"] = main


@pytest.mark.one_in(3)
@KINDS
@EVERYWHERE
def test_every_cached_branch_is_what_reading_all_again_says(family, kind):
    if family == "paligemma":
        pytest.skip("its prompt is read in both directions, so text read again is another prompt")
    new, seen = decoded(family, kind)
    for steps in (1, STEPS - 1):
        again = all_branches(family, kind)
        inputs = longer(prompts(family), new[:, :steps])
        run(family, again, inputs, new=1, words=kind == "questions")
        for name, logits in again.seen[0].items():
            assert torch.allclose(logits, seen[steps][name], atol=2e-3), (name, steps)


@pytest.mark.one_in(2)
@KINDS
@EVERYWHERE
def test_a_row_alone_is_as_in_the_batch(family, kind):
    together, seen = decoded(family, kind)
    guide = all_branches(family, kind)
    single = run(family, guide, prompts(family, batch=1), words=kind == "questions")
    assert single.tolist() == together[:1].tolist()
    for name, logits in guide.seen[-1].items():
        assert torch.allclose(logits, seen[-1][name][:1], atol=2e-3), name


@pytest.mark.one_in(3)
@KINDS
@EVERYWHERE
def test_drafting_does_not_change_the_distribution(family, kind):
    words = kind == "questions"
    rows = decoded(family, kind)[0].tolist()
    known = drafts.Known(rows, length=3, wrong_at=[2])
    for draft in (known, HiddenPath(rows)):
        guide = all_branches(family, kind)
        assert run(family, guide, prompts(family), draft, words=words).tolist() == rows
        assert len(guide.seen) < STEPS  # something was accepted


# A few methods as they are, and the way each of them changes the distribution


METHODS = {
    "vcd": lambda: VCD(),
    "icd": lambda: ICD(),
    "m3id": lambda: M3ID(rate=0.5),
    "ritual": lambda: RITUAL(),
    "ritual_normalized": lambda: RITUAL(normalize=True, transform="rotation"),
    "agla": lambda: AGLA(beta=0.1),
    "cfg_image": lambda: CFGImage(3.0),
    "rbd": lambda: mmdecode.guide.RBD(),
    "prompt_bias": lambda: PromptBias(),
}


@functools.cache
def undrafted(name, family, do_sample):
    make = METHODS.get(name, lambda: None)
    words = name in ("icd", "prompt_bias")
    return run(family, make(), prompts(family), new=8, do_sample=do_sample, words=words).tolist()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_with_a_draft_gives_the_tokens_it_gives_without(name, do_sample):
    for family in ("llava", "qwen2_vl"):
        rows = undrafted(name, family, do_sample)
        assert rows != undrafted("none", family, do_sample), "the method does nothing"
        words = name in ("icd", "prompt_bias")
        for draft in (drafts.Known(rows, length=3, wrong_at=[1, 5]), HiddenPath(rows)):
            found = run(
                family,
                METHODS[name](),
                prompts(family),
                draft,
                new=8,
                do_sample=do_sample,
                words=words,
            )
            assert found.tolist() == rows


@pytest.mark.parametrize("name", ["vcd", "m3id", "ritual", "agla", "rbd", "black"])
def test_instructblip_is_guided_by_what_its_language_model_reads(name):
    guide = METHODS.get(name, lambda: CFGImage(3.0, without="black"))
    inputs = {**instructblip.inputs()}
    inputs["pixel_values"] = eight_bit(inputs["pixel_values"])
    model = instructblip.model()

    def rows(guide, draft=None, inputs=inputs):
        found = mmdecode.generate(
            model,
            decoder=Decoder(draft, guide, seed=3),
            max_new_tokens=6,
            do_sample=False,
            request=NAMES[: len(inputs["input_ids"])],
            **inputs,
        )
        return found[:, -6:].tolist()

    together = rows(guide())
    assert together != rows(None)
    assert rows(guide(), drafts.Known(together, length=3, wrong_at=[2])) == together
    assert rows(guide(), inputs={k: v[:1] for k, v in inputs.items()}) == together[:1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_bias_is_the_answer_to_the_other_question(family):
    inputs = prompts(family)
    other = Asked("", (), 0, inputs)
    rewritten = [
        dataclasses.replace(q, text=" Answer yes whenever possible.") for q in asked(inputs)
    ]
    expected = run(family, None, other.build(rewritten), words=False)
    assert run(family, PromptBias(), inputs).tolist() == expected.tolist()


# What cannot be


def test_parts_of_an_image_are_not_transformed_one_by_one():
    for family in TILED:
        with pytest.raises(IncompatibleError, match="cut into parts"):
            run(family, RITUAL(), prompts(family), words=False)
        run(family, RITUAL(), prompts(family, batch=1), words=False)


def test_refusals_for_instructblip_name_the_model_that_the_caller_knows():
    decoder = Decoder(guide="causalmm:released=true")
    with pytest.raises(IncompatibleError, match="fit InstructBlipForConditionalGeneration"):
        mmdecode.generate(
            instructblip.model(), decoder=decoder, max_new_tokens=2, **instructblip.inputs()
        )


@pytest.mark.parametrize("name", ["icd", "prompt_bias"])
def test_a_question_that_is_not_at_hand_cannot_be_rewritten(name):
    with pytest.raises(IncompatibleError, match="Answerer"):
        run("llava", METHODS[name](), prompts("llava"), words=False)


IDLE = [
    *[
        "vcd",
        "m3id:rate=0.5",
        "ritual",
        "agla:beta=0.1",
        "cfg_image",
        "rbd",
        "contrast:transform=no_image",
    ],
    *["cfg_image:without=mean", "cfg_image:without=zero_features", "damro", "causalmm", "dagcd"],
    *["pai", "pai:gamma=1,beta=0", "pai:alpha=0", "scalingvis", "adaptvis", "conscious_gaze"],
]


@pytest.mark.parametrize("name", IDLE)
def test_prompts_without_images_are_answered_with_a_warning(name):
    inputs = vision_inputs("llava", images=False)
    with pytest.warns(UserWarning, match="inactive"):
        found = run("llava", name, inputs, words=False)
    assert found.tolist() == run("llava", None, inputs, words=False).tolist()


@pytest.mark.parametrize("name", IDLE)
def test_what_is_active_is_not_warned_of(name):
    run("llava", name, prompts("llava"), words=False)


class Same(VCD):
    """Its noise is none."""

    def __init__(self):
        super().__init__()
        unchanged = {"change": lambda values, draw: values}
        self.branches = [dataclasses.replace(self.branches[0], transform_options=unchanged)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_branch_that_changes_nothing_is_warned_of(family):
    with pytest.warns(UserWarning, match="Same is inactive"):
        run(family, Same(), prompts(family), words=False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["agla:keep=1", "rbd:a=0,keep=1", "damro:k=99,order=spatial"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_branch_that_shows_all_of_the_image_is_warned_of(family, name):
    """It is read another way, so it differs in the last bits."""
    with pytest.warns(UserWarning, match="is inactive"):
        run(family, name, prompts(family), words=False)


def test_a_question_that_stays_as_it_is_is_warned_of():
    class Mute(PromptBias):
        def __init__(self):
            super().__init__()
            options = {"change": lambda question, draw: question}
            self.branches = (dataclasses.replace(self.branches[0], transform_options=options),)

    with pytest.warns(UserWarning, match="Mute is inactive"):
        run("llava", Mute(), prompts("llava"))

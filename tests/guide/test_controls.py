"""Controls: exact on table models, drafted or not; and the guides after an Answerer."""

from types import SimpleNamespace

import pytest
import torch

from mmdecode import registry
from mmdecode.adapters.vision import pixels
from mmdecode.decoder import Decoder
from mmdecode.engine.contracts import BranchOutput
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import IncompatibleError
from mmdecode.guide import ICD, RITUAL, MarginShift, NearTies, Plausible, TemperatureMatched
from mmdecode.guide.answers import yes_no_ids, yes_no_margin
from mmdecode.guide.linear import plausible
from mmdecode.testing import check_guide, drafts
from mmdecode.testing.checks import PROMPTS, SEED, assert_lossless, run_rows
from mmdecode.testing.table import Table
from mmdecode.vlm import Answerer
from tests.support.target_logits import context
from tests.vlm.conftest import build_model, build_processor, image

MODEL = Table(5, seed=3, bias={0: 1.0, 4: -0.5})
YES, NO = [1, 3], [2]


def first_distribution(guide, main, length=0, **options):
    """The distribution of rows ``(B, V)`` that have generated ``length`` tokens."""
    call = context(len(main), length, **options)
    scores = {"main": BranchOutput(logits=main[:, None])}
    return guide.apply(
        guide.begin(call, scores), call, Proposal.empty(len(main), call.device), scores
    )[:, 0]


def margin(logits):
    return yes_no_margin(logits, YES, NO)


def shifted_distribution(shift, spread):
    def distribution(prompt, new):
        main = MODEL.target_logits([*prompt, *new])
        if new:
            return main
        main = main.clone()
        main[YES] += shift / 2 if spread else shift
        main[NO] -= shift / 2 if spread else 0.0
        return main

    return distribution


def tied_distribution(gap, mass):
    def distribution(prompt, new):
        main = MODEL.target_logits([*prompt, *new])
        p = main.softmax(-1)
        yes, no = float(p[YES].sum()), float(p[NO].sum())
        if new or yes + no <= mass or abs(yes - no) >= gap:
            return main
        forced = torch.full_like(main, -torch.inf)
        forced[YES] = main[YES]
        return forced

    return distribution


CONTROLS = {
    "shift": (lambda: MarginShift(2.5, yes=YES, no=NO), shifted_distribution(2.5, False)),
    "spread": (
        lambda: MarginShift(-2.5, spread=True, yes=YES, no=NO),
        shifted_distribution(-2.5, True),
    ),
    "ties": (lambda: NearTies(0.5, 0.2, yes=YES, no=NO), tied_distribution(0.5, 0.2)),
    "all_ties": (lambda: NearTies(1.1, 0.0, yes=YES, no=NO), tied_distribution(1.1, 0.0)),
    "cut": (
        lambda: Plausible(0.4),
        lambda p, n: plausible(*[MODEL.target_logits([*p, *n])] * 2, 0.4),
    ),
    "cold": (
        lambda: TemperatureMatched(4.0, 0.2),
        lambda p, n: plausible(
            4 * MODEL.target_logits([*p, *n]), MODEL.target_logits([*p, *n]), 0.2
        ),
    ),
}


@pytest.mark.filterwarnings("ignore:.*is inert:UserWarning")
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_has_the_distribution_of_its_formula_with_and_without_drafts(name, do_sample):
    make, distribution = CONTROLS[name]
    for draft in (None, drafts.FullTree(2), drafts.RandomTrees()):
        assert_lossless(
            Decoder(draft, make(), seed=SEED), MODEL, distribution, do_sample=do_sample, eos=[4]
        )


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:.*is inert:UserWarning")
@pytest.mark.parametrize("name", ["shift", "ties", "cold"])
def test_a_control_passes_the_public_check(name):
    check_guide(CONTROLS[name][0])


def test_controls_change_the_answer_and_neutral_ones_nothing():
    plain = run_rows(Decoder(seed=SEED), MODEL, PROMPTS, do_sample=False)
    changed = run_rows(Decoder(None, CONTROLS["shift"][0]()), MODEL, PROMPTS, do_sample=False)
    assert changed != plain
    for guide in (MarginShift(0.0), NearTies(0.0), registry.create("guide", "margin_shift")):
        assert guide.neutral
        assert run_rows(Decoder(None, guide), MODEL, PROMPTS, do_sample=False) == plain


@pytest.mark.parametrize("spread", [False, True])
def test_the_margin_moves_by_the_shift_at_the_first_token_alone(spread):
    main = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    guide = MarginShift(1.7, spread, yes=YES, no=NO)
    assert torch.allclose(margin(first_distribution(guide, main)), margin(main) + 1.7, atol=1e-5)
    assert torch.equal(first_distribution(guide, main, length=1), main)
    back = MarginShift(-1.7, spread, yes=YES, no=NO)
    assert torch.allclose(
        first_distribution(back, first_distribution(guide, main)), main, atol=1e-5
    )


@pytest.mark.parametrize(
    ("p_yes", "p_no", "flipped"),
    [
        (0.30, 0.60, True),
        (0.20, 0.75, False),  # further apart than the gap
        (0.05, 0.10, False),  # together too little
        (0.10, 0.11, True),
        (0.60, 0.30, True),
    ],
)
def test_a_near_tie_goes_to_yes(p_yes, p_no, flipped):
    rest = 1 - p_yes - p_no
    p = torch.tensor([[rest, p_yes / 2, p_no, p_yes / 2]])
    found = first_distribution(NearTies(yes=YES, no=NO), p.log())
    assert bool(found[0, 2].isneginf()) is flipped
    assert (found.argmax(-1).item() in YES) is flipped
    assert found[0, YES].tolist() == p.log()[0, YES].tolist()


def test_what_only_sampling_feels_says_so_in_greedy_generation():
    for guide in (Plausible(), TemperatureMatched()):
        with pytest.warns(UserWarning, match="inert in greedy"):
            rows = run_rows(Decoder(None, guide), MODEL, PROMPTS, do_sample=False)
        assert rows == run_rows(Decoder(), MODEL, PROMPTS, do_sample=False)
        run_rows(Decoder(None, guide, seed=1), MODEL, PROMPTS, do_sample=True)


def test_at_a_beta_of_one_sampling_is_greedy():
    greedy = run_rows(Decoder(), MODEL, PROMPTS, do_sample=False)
    sampled = run_rows(Decoder(None, Plausible(1.0), seed=1), MODEL, PROMPTS, do_sample=True)
    assert sampled == greedy


# Which tokens are yes


class Tokens:
    def __init__(self, known):
        self.known = known

    def __len__(self):
        return len(self.known)

    def convert_ids_to_tokens(self, ids):
        return [self.known[i] for i in ids]


def test_yes_and_no_are_found_where_they_can_be():
    tokens = Tokens(["a", "Yes", "no", "Ġyes"])
    assert yes_no_ids(tokens) == ((1, 3), (2,))
    main = torch.zeros(1, 4)
    by_option = first_distribution(MarginShift(1.0, tokenizer=tokens), main)
    question = SimpleNamespace(tokenizer=tokens)
    by_question = first_distribution(MarginShift(1.0), main, inputs={"questions": [question]})
    assert by_option.tolist() == by_question.tolist() == [[0, 1, 0, 1]]
    given = first_distribution(MarginShift(1.0, yes=0, tokenizer=tokens), main)
    assert given.tolist() == [[1, 0, 0, 0]]


def test_without_yes_and_no_there_is_nothing_to_shift():
    for guide in (MarginShift(1.0), NearTies(yes=1)):
        with pytest.raises(IncompatibleError, match="Answerer"):
            first_distribution(guide, torch.zeros(1, 4))
    with pytest.raises(IncompatibleError, match="this tokenizer"):
        first_distribution(MarginShift(1.0, tokenizer=Tokens(["a", "b"])), torch.zeros(1, 2))


# After an Answerer, whose processor makes the inputs


@pytest.fixture(scope="module")
def parts():
    processor = build_processor()
    return build_model(processor), processor


def answered(parts, guide, questions=("Is there a red circle?", "What is beside the star?")):
    answerer = Answerer(*parts, Decoder(guide=guide, seed=0))
    images = [image(seed) for seed in range(len(questions))]
    return answerer(images, list(questions), max_new_tokens=6, on_error="raise")


GUIDES = [
    "vcd",
    "icd",
    "icd:role=3",
    "m3id:rate=0.5",
    "ritual",
    "agla:beta=0.1",
    "rbd",
    "cfg_image:gamma=3",
    "cfg_image:gamma=3,without=mean",
    "cfg_image:gamma=3,without=black",
    "cfg_image:gamma=3,without=zero_features",
    "margin_shift:shift=9",
    "near_ties:gap=2,mass=0",
    "prompt_bias",
]


@pytest.mark.parametrize("spec", GUIDES)
def test_a_guide_after_an_answerer_answers_otherwise_and_alike_alone(parts, spec):
    plain = answered(parts, None)
    found = answered(parts, registry.create("guide", spec))
    assert [a.text for a in found] != [a.text for a in plain]
    [alone] = answered(parts, registry.create("guide", spec), ["Is there a red circle?"])
    assert alone.token_ids == found[0].token_ids


def test_a_shift_and_ties_lead_to_yes(parts):
    yes, no = yes_no_ids(parts[1].tokenizer)
    for spec in ("margin_shift:shift=1000", "near_ties:gap=2,mass=0"):
        assert all(a.token_ids[0] in yes for a in answered(parts, registry.create("guide", spec)))
    found = answered(parts, registry.create("guide", "margin_shift:shift=-1000,spread=true"))
    assert all(a.token_ids[0] in no for a in found)


def test_images_and_pixels_are_transformed_alike(parts):
    """With the questions at hand PIL images are turned; without, the pixels made of them."""
    model, processor = parts
    answerer = Answerer(model, processor)
    question = answerer.prompts.question("What is beside the star?", [image(1)])
    given = question.build([question])["pixel_values"][0]
    flip = RITUAL(transform="vertical_flip").branches[0].transform_options["change"]
    seen = pixels.edit_normalised(given, flip, seed=0)
    turned = pixels.edit_image(question.images[0], flip, torch.Generator())
    expected = answerer.prompts.question("What?", [turned])
    assert torch.allclose(seen, expected.build([expected])["pixel_values"][0], atol=1e-5)


def test_an_instruction_stands_before_the_question_and_after_its_images(parts):
    answerer = Answerer(*parts)
    change = ICD(role="Look away.").branches[0].transform_options["change"]
    for text, expected in (
        ("What?", "Look away. What?"),
        ("<image>\nWhat?", "<image>\nLook away. What?"),
        ("What is <image>?", "Look away. What is <image>?"),
    ):
        asked = answerer.prompts.question(text, [image(0)])
        assert change(asked, torch.Generator()).text == expected
    change = ICD().branches[0].transform_options["change"]
    asked = answerer.prompts.question("What?", [image(0)])
    texts = {change(asked, torch.Generator().manual_seed(s)).text for s in range(40)}
    assert len(texts) == 5 and all(text.endswith(" What?") for text in texts)


@pytest.mark.parametrize("own", ["<picture>", "<|image|>"])
def test_an_instruction_stands_after_a_placeholder_of_the_processor_too(parts, own):
    processor = build_processor()
    processor.tokenizer.add_special_tokens({"extra_special_tokens": [own]})
    processor.image_token = own
    prompts = Answerer(parts[0], processor).prompts
    change = ICD(role="Look away.").branches[0].transform_options["change"]
    for text, expected in (
        (f"{own}\nWhat?", f"{own}\nLook away. What?"),
        (f"{own}<image> What?", f"{own}<image> Look away. What?"),
        (f"What is {own}?", f"Look away. What is {own}?"),
    ):
        asked = prompts.question(text, [image(0)] * (2 if "<image>" in text else 1))
        assert change(asked, torch.Generator()).text == expected

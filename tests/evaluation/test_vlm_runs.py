"""Modes of decoding over questions: what is run once, what is drawn, what survives an interruption.

The model is a tiny random LLaVA whose head leans to yes, no and the end, so that some first tokens
are words and some are not.
"""

import contextlib
import dataclasses
import json

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.errors import IncompatibleError, OptionError, UnknownNameError
from mmdecode.evaluation import YesNoReport
from mmdecode.evaluation.vision.items import ITEMS, CaptionItem, YesNoItem, read_items, text_hash
from mmdecode.evaluation.vision.modes import Mode, modes_of
from mmdecode.evaluation.vision.runs import Recorder, sampled_token
from mmdecode.guide import VCD
from mmdecode.guide.answers import word_ids, yes_no_ids
from mmdecode.runs.rows import RowJournal
from mmdecode.vlm import Answerer
from mmdecode.vlm.images import image_source
from tests.support import seams
from tests.vlm.conftest import build_model, build_processor
from tests.vlm.conftest import image as pil_image

LAST = "contrast:alpha=1,prompt=last_token"  # a guide that draws nothing
SPLITS = ("random", "popular", "adversarial")


@pytest.fixture(scope="module")
def processor():
    return build_processor()


@pytest.fixture(scope="module")
def model(processor):
    model = build_model(processor)
    head = model.lm_head
    biased = torch.nn.Linear(head.in_features, head.out_features)
    biased.weight = head.weight
    with torch.no_grad():
        biased.bias.zero_()
        for ids, lean in zip(yes_no_ids(processor.tokenizer), (8.0, 7.0), strict=True):
            biased.bias[list(ids)] = lean
        biased.bias[processor.tokenizer.eos_token_id] = 5.0
    model.lm_head = biased
    return model


def questions(count=16):
    return [
        YesNoItem(
            id=f"question {index}",
            image=f"{index // 3}",
            question=f"Is there a {'red' if index % 2 else 'blue'} ring {index}?",
            target="yes" if index % 2 else "no",
            sets=SPLITS if index % 2 else (SPLITS[index // 2 % 3],),
        )
        for index in range(count)
    ]


def image(name):
    return image_source(pil_image(int(name)) if name.isdigit() else b"no image", name)


@pytest.fixture
def recorder(model, processor):
    def build(modes, items=None, **options):
        options = {"max_new_tokens": 3, "batch_size": 8, "warmup": 0} | options
        return Recorder(model, processor, items or questions(), modes, image, **options)

    return build


@pytest.fixture
def journal(tmp_path):
    """Opens the rows of a run; closed at the end."""
    with contextlib.ExitStack() as stack:

        def opened(settings=None, resume=False):
            found = RowJournal(
                tmp_path / ITEMS,
                lambda path: read_items(path, YesNoItem),
                YesNoItem.key,
                settings or {},
                resume,
            )
            return stack.enter_context(contextlib.closing(found))

        yield opened


def assert_equal(found, expected):
    """All but times; margins up to the rounding of other batches."""
    for one, other in zip(found, expected, strict=True):
        again = {"seconds": other.seconds}
        for name in ("margin", "main_margin"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-5)
            again[name] = getattr(other, name)
        assert dataclasses.replace(one, **again) == other


def of(rows, mode, seed=None):
    return {row.id: row for row in rows if (row.mode, row.seed) == (mode, seed)}


# Modes


def test_controls_stand_next_to_the_methods():
    modes = modes_of(["none", "ritual:alpha=3", "vcd:beta=0.2", "ritual:alpha=3"], seeds=range(2))
    assert {mode.name: mode.against for mode in modes} == {
        "greedy": (),
        "sampled": ("greedy",),
        "prompt_bias": ("greedy",),
        "near_ties": ("greedy",),
        "ritual:alpha=3": ("greedy",),
        "plausible:beta=0.1, sampled": ("sampled",),
        "temperature_matched:total=4,beta=0.1, sampled": ("sampled",),
        "ritual:alpha=3, sampled": (
            "sampled",
            "plausible:beta=0.1, sampled",
            "temperature_matched:total=4,beta=0.1, sampled",
        ),
        "vcd:beta=0.2": ("greedy",),
        "plausible:beta=0.2, sampled": ("sampled",),
        "vcd:beta=0.2, sampled": ("sampled", "plausible:beta=0.2, sampled"),
    }
    assert [mode.name for mode in modes if not mode.control] == [
        "greedy", "ritual:alpha=3", "ritual:alpha=3, sampled", "vcd:beta=0.2",
        "vcd:beta=0.2, sampled",
    ]  # fmt: skip
    assert {mode.seeds for mode in modes} == {(), (0, 1)}


def test_controls_are_sampled_where_the_methods_are_sampled_alone():
    modes = modes_of(["vcd"], greedy=False, seeds=[0, 1])
    assert {mode.name: (mode.against, mode.seeds) for mode in modes if mode.control} == {
        "greedy": ((), ()),
        "sampled": (("greedy",), (0, 1)),
        "prompt_bias, sampled": (("sampled",), (0, 1)),
        "near_ties, sampled": (("sampled",), (0, 1)),
        "plausible:beta=0.1, sampled": (("sampled",), (0, 1)),
    }


def test_controls_can_be_left_out_and_captions_have_no_yes():
    def named(guides, **options):
        return [mode.name for mode in modes_of(guides, **options)]

    assert named(["vcd"], controls=False) == ["greedy", "vcd"]
    assert named(["vcd"], greedy=False, seeds=[0], controls=False) == ["sampled", "vcd, sampled"]
    assert named(["vcd"], greedy=False, seeds=[0], yes_no=False) == [
        "greedy", "sampled", "plausible:beta=0.1, sampled", "vcd, sampled",
    ]  # fmt: skip
    assert named(["vcd"], yes_no=False) == ["greedy", "vcd"]
    assert named(["plausible"], seeds=[0], yes_no=False) == [
        "greedy", "sampled", "plausible, sampled",
    ]  # fmt: skip


def test_modes_that_make_no_sense_are_refused():
    with pytest.raises(OptionError, match="has no effect on greedy decoding"):
        modes_of(["plausible"])
    with pytest.raises(OptionError, match="no mode to run"):
        modes_of(["vcd"], greedy=False)
    with pytest.raises(UnknownNameError, match="vdc"):
        modes_of(["vdc"])


# What is run


def test_each_question_is_asked_once_for_all_splits_seeds_and_greedy(recorder, monkeypatch):
    asked = []

    def counted(self, requests, answers=Answerer.answers, **options):
        asked.extend(request.id for request in requests)
        return answers(self, requests, **options)

    monkeypatch.setattr(Answerer, "answers", counted)
    rows = recorder(modes_of([], seeds=range(4), controls=False), max_new_tokens=1).run()
    again = {(r.seed, r.id) for r in rows if r.mode == "sampled" and r.seconds is not None}
    assert len(asked) == len(questions()) + len(again)
    assert len(again) < 32 < sum(r.seconds is None for r in rows)


def test_rows_hold_what_a_scorer_needs(recorder, model, processor):
    rows = recorder(modes_of(["vcd:alpha=1"]), suffix=" Yes or no?").run()
    plain, vcd, bias = (of(rows, name) for name in ("greedy", "vcd:alpha=1", "prompt_bias"))
    guide = registry.create("guide", "vcd:alpha=1")
    guided = Answerer(model, processor, Decoder(guide=guide, seed=0))
    for item in questions()[:3]:
        row = vcd[item.id]
        text = f"{item.question} Yes or no?"
        answer = guided(pil_image(int(item.image)), text, max_new_tokens=3, trace=True)
        assert (row.output, row.tokens) == (answer.text, len(answer.token_ids))
        assert row.prompt_hash == text_hash(f"USER: <image>\n{text} ASSISTANT:")
        margins = answer.margins
        assert set(margins) == {"main", "noised", "guided"} and len(set(margins.values())) == 3
        assert row.margin == pytest.approx(margins["guided"], abs=1e-4)
        assert row.main_margin == pytest.approx(margins["main"], abs=1e-4)
        assert plain[item.id].margin == pytest.approx(margins["main"], abs=1e-4)
        assert row.passes == 2 * row.tokens and plain[item.id].passes == plain[item.id].tokens
        assert bias[item.id].passes == 1 + bias[item.id].tokens  # the question itself is read too
        assert row.seconds > 0 and row.error is None


def test_captions_are_decoded_for_each_seed_and_have_no_margin(recorder):
    items = [
        CaptionItem(id=f"{index}", image=f"{index}", objects=("ring",), question="Describe it.")
        for index in range(4)
    ]
    rows = recorder(modes_of(["vcd"], seeds=range(2), yes_no=False), items).run()
    assert len({row.output for row in rows if row.mode == "sampled"}) > 1
    assert all(row.seconds > 0 and row.error is None for row in rows)


def test_modes_take_turns_and_each_begins(recorder):
    seen = []
    modes = modes_of([LAST], controls=False)
    recorder(modes, batch_size=4, chunk=1).run(progress=lambda row: seen.append(row.mode))
    turns = [seen[index] for index in range(0, 32, 4)]
    assert turns == ["greedy", LAST, LAST, "greedy"] * 2


# Drawn answers


def test_a_redrawn_token_is_what_decoding_with_that_seed_gives(recorder):
    modes = modes_of([LAST], seeds=range(6), controls=False)
    short = recorder(modes, max_new_tokens=1).run()
    decoded = recorder(modes, max_new_tokens=1, redraw=False).run()
    assert all(row.seconds is not None for row in decoded)
    assert sum(row.seconds is None for row in short) > len(short) / 2
    for row, other in zip(short, decoded, strict=True):
        assert row.output == other.output and row.margin == pytest.approx(other.margin, abs=1e-4)
    assert len({row.output for row in short}) > 3


def test_what_is_no_word_is_decoded_to_its_end(recorder, processor):
    modes = modes_of([], seeds=range(6), controls=False)
    redrawn, decoded = (of_all(recorder(modes, redraw=value).run()) for value in (True, False))
    words = {
        processor.tokenizer.decode([i]).strip()
        for word in ("yes", "no")
        for i in word_ids(processor.tokenizer, word)
    }
    for key, row in redrawn.items():
        if row.seconds is None:
            assert row.output in words and decoded[key].output.startswith(row.output)
            assert row.tokens == 1
        else:
            assert row.output == decoded[key].output
    assert any(row.seconds is None for row in redrawn.values())
    assert any(row.seconds is not None and row.seed is not None for row in redrawn.values())


def of_all(rows):
    return {(row.mode, row.seed, row.id): row for row in rows}


@pytest.mark.slow
def test_seeds_sample_from_the_distribution_itself():
    logits = torch.tensor([0.5, 2.0, -torch.inf, 1.0, -1.0])
    count = 2000
    for name in ("one", "another"):
        counts = np.bincount(
            [sampled_token(logits, seed, name) for seed in range(count)], minlength=5
        )
        expected = count * logits.softmax(0).double().numpy()
        assert counts[2] == 0
        seen = expected > 0
        assert chisquare(counts[seen], expected[seen] * count / expected.sum()).pvalue > 1e-3
        hot = (
            count * (logits * 1.2).softmax(0).double().numpy()
        )  # another distribution is told apart
        assert chisquare(counts[seen], hot[seen] * count / hot.sum()).pvalue < 1e-6
    sampled = ([sampled_token(logits, n, name) for n in range(200)] for name in ("one", "another"))
    pairs = list(zip(*sampled, strict=True))
    assert len(set(pairs)) > 8


def test_a_guide_that_draws_is_decoded_for_each_seed(recorder):
    modes = modes_of(["vcd", LAST], seeds=range(2), controls=False)
    rows = recorder(modes, max_new_tokens=1).run()
    for guide, random in (("vcd", True), (LAST, False)):
        one, two = (of(rows, f"{guide}, sampled", seed) for seed in range(2))
        margins = np.array([[one[i.id].margin, two[i.id].margin] for i in questions()])
        assert (np.abs(margins[:, 0] - margins[:, 1]).max() > 1e-3) is np.bool_(random)
        assert all(row.seconds is not None for row in one.values()) is random


def test_too_few_questions_to_tell_are_decoded_for_each_seed(recorder):
    rows = recorder(modes_of([LAST], seeds=range(2)), questions(4)).run()
    assert all(row.seconds is not None for row in rows if row.mode == f"{LAST}, sampled")


def test_small_batches_share_a_distribution_too(recorder):
    rows = recorder(modes_of([LAST], seeds=range(2), controls=False), batch_size=1).run()
    sampled = [row for row in rows if row.mode == f"{LAST}, sampled"]
    assert any(row.seconds is None for row in sampled)


def test_rows_count_the_tokens_that_a_guide_changed(recorder, model, processor):
    rows = recorder(modes_of(["vcd:alpha=9,beta=0"], controls=False)).run()
    guide = registry.create("guide", "vcd:alpha=9,beta=0")
    guided = Answerer(model, processor, Decoder(guide=guide, seed=0))
    counts = []
    for item in questions():
        row = of(rows, "vcd:alpha=9,beta=0")[item.id]
        [answer] = guided(
            [pil_image(int(item.image))],
            item.question,
            ids=[item.id],
            max_new_tokens=3,
            trace=True,
        )
        steps = [step for one in answer.trace for step in one.steps]
        assert row.changed == sum(step.changed for step in steps) <= row.tokens == len(steps)
        counts.append(row.changed)
    assert max(counts) > 0
    assert {row.changed for row in rows if row.mode == "greedy"} == {None}
    report = YesNoReport(rows, resamples=10)
    share = report.summary["modes"]["vcd:alpha=9,beta=0"]["changed"]
    assert share == sum(counts) / sum(r.tokens for r in rows if r.changed is not None)
    assert "changed %" in report.table()


@pytest.mark.parametrize(
    ("guide", "known"),
    [("scalingvis", False), ("pai", False), ("adaptvis", False), ("conscious_gaze", True)],
)
def test_what_an_edited_branch_hides_is_left_out(recorder, guide, known):
    """Conscious Gaze edits a branch next to the main one."""
    rows = recorder(modes_of([guide], controls=False), questions(3)).run()
    for row in of(rows, guide).values():
        assert row.margin is not None
        assert (row.changed is not None) == (row.main_margin is not None) == known
    report = YesNoReport(rows, resamples=10)
    assert (report.summary["modes"][guide]["changed"] is not None) == known
    assert ("changed %" in report.table()) == known


@pytest.mark.parametrize(
    ("guide", "passes"),
    [("none", 1), ("vcd", 1), ("rbd", 1), ("pai", 1), ("adaptvis", 1), ("conscious_gaze", 2)],
)
def test_forward_passes_are_those_of_the_model(recorder, monkeypatch, guide, passes):
    built = recorder([Mode(name="only", guide=guide)], questions(1), max_new_tokens=6)
    counted = []
    seams.SCORE.plant(  # one forward pass each
        monkeypatch, lambda score: lambda *given: counted.append(1) or score(*given)
    )
    [row] = built.run()
    assert row.tokens > 1 and row.forwards == len(counted) == passes * (row.tokens - 1)


def test_rows_from_before_forwards_were_counted_are_read(tmp_path, recorder):
    rows = recorder(modes_of([], controls=False), questions(3)).run()
    earlier = [{k: v for k, v in row.as_dict().items() if k != "forwards"} for row in rows]
    (tmp_path / "items.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in earlier))
    report = YesNoReport(read_items(tmp_path, YesNoItem), resamples=10)
    assert report.cost("greedy")["rows_per_token"] == 1
    assert report.cost("greedy")["forwards_per_token"] is None
    assert "rows/token" in report.table() and "forwards/token" not in report.table()


# Interruptions and failures


@pytest.mark.one_in(2)
@pytest.mark.parametrize("written", [1, 50])
def test_a_resumed_run_equals_an_uninterrupted_one(recorder, journal, tmp_path, written):
    modes = modes_of(["vcd"], seeds=range(2), controls=False)
    small = {"chunk": 1, "fewest": 8}
    whole = recorder(modes, **small).run()

    class Stopped(Exception):
        pass

    def stop(row):
        if len(begun.rows) == written:
            raise Stopped

    begun = journal({"a": 1})
    with pytest.raises(Stopped):
        recorder(modes, **small).run(begun, stop)
    begun.close()
    path = tmp_path / "items.jsonl"
    with path.open("a") as file:
        file.write('{"id": "cut of')
    with pytest.raises(OptionError, match="other settings"):
        journal({"a": 2}, True)
    again = journal({"a": 1}, True)
    assert len(again.rows) == written
    assert path.read_text().count("\n") == written and path.read_text().endswith("}\n")
    added = []
    resumed = recorder(modes, **small).run(again, added.append)
    assert_equal(resumed, whole)
    assert len(added) == len(whole) - written
    assert_equal(journal({"a": 1}, True).rows.values(), whole)


def test_a_finished_run_is_not_run_again(recorder, journal, monkeypatch):
    modes = modes_of([], controls=False)
    rows = recorder(modes).run(file := journal())
    monkeypatch.setattr(Answerer, "answers", None)
    assert recorder(modes, warmup=1).run(file) == rows


def test_failures_are_reported_and_the_rest_goes_on(recorder, journal):
    items = questions()
    items[4] = dataclasses.replace(items[4], image="broken")
    modes = modes_of(["vcd"], seeds=range(2), controls=False)
    rows = recorder(modes, items).run(file := journal())
    assert len(rows) == recorder(modes, items).total == 6 * len(items)
    failed = [row for row in rows if row.error]
    assert {row.id for row in failed} == {items[4].id} and "broken" in failed[0].error
    assert len(failed) == 6
    mended = recorder(modes).run(file)
    assert not any(row.error for row in mended)


def test_a_question_that_a_guide_refuses_leaves_the_others(recorder, processor, monkeypatch):
    def refuse(self, call, prefill, begin=VCD.begin):
        if any("ring 7?" in text for text in processor.batch_decode(call.request.prompt_ids)):
            raise IncompatibleError("not this one")
        return begin(self, call, prefill)

    monkeypatch.setattr(VCD, "begin", refuse)
    rows = recorder([Mode(name="vcd", guide="vcd")]).run()
    assert [row.id for row in rows if row.error] == ["question 7"]
    assert rows[7].error == "not this one"


def test_a_guide_that_does_not_fit_is_refused_before_anything_is_run(
    recorder, journal, monkeypatch
):
    def refuse(self, call, prefill):
        raise IncompatibleError("no images to be noised")

    monkeypatch.setattr(VCD, "begin", refuse)
    file = journal()
    with pytest.raises(IncompatibleError, match="no images to be noised"):
        recorder(modes_of(["vcd"]), warmup=1).run(file)
    assert not file.done


# The shifted baseline


def test_one_failed_answer_does_not_take_the_shifted_baseline_away(recorder):
    items = questions()
    items[4] = dataclasses.replace(items[4], image="broken")
    rows = recorder(modes_of(["vcd"], controls=False), items).run()
    with pytest.warns(UserWarning, match="1 answers of 'greedy' have no margin"):
        report = YesNoReport(rows, resamples=20)
    shifted = of([i for one in report.answers("greedy shifted to vcd") for i in one],
                 "greedy shifted to vcd")  # fmt: skip
    assert shifted[items[4].id].error and shifted[items[3].id].margin is not None
    assert "1 answers of the baseline have no margin" in report.about()
    whole = [row for row in rows if row.id != items[4].id]
    alone = YesNoReport(whole, resamples=20).answers("greedy shifted to vcd")[0]
    assert {i.id: i.margin for i in alone} == {
        name: row.margin for name, row in shifted.items() if not row.error
    }


def test_the_journal_holds_rows_of_any_kind(tmp_path):
    @dataclasses.dataclass
    class Note:
        text: str

        def as_dict(self):
            return {"text": self.text}

    def read(path):
        return [Note(line) for line in path.read_text().splitlines()]

    journal = RowJournal(tmp_path / "notes.jsonl", read, lambda note: note.text, {}, False)
    journal.add(Note("one"))
    journal.finish_with([Note("two")])
    journal.close()
    assert (tmp_path / "notes.jsonl").read_text() == '{"text": "two"}\n'

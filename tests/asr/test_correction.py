import dataclasses
import json
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdecode.asr.correction.corrector import Corrector
from mmdecode.asr.correction.guard import GUARD, EditGuard, edits_of, words_of
from mmdecode.asr.correction.n_best_lists import NBestList
from mmdecode.asr.correction.prompts import TEMPLATES, ListPrompts, PromptOptions, Template
from mmdecode.draft.source import Source
from mmdecode.errors import IncompatibleError, InputError, OptionError, UnknownNameError
from tests.support.correctors import LISTS, TEMPLATE, Writes, model, tokenizer
from tests.support.faults import ERRORS, FEW, Faulty, failure_of

FAMILIES = ("llama", "t5", "bart")
families = pytest.mark.parametrize("family", FAMILIES)


def corrector(family="t5", **options):
    given = {"template": TEMPLATE, "max_new_tokens": 40, "guard": None, "batch_size": 3}
    return Corrector(model(family), tokenizer(family != "llama"), **given | options)


def answering(what, family="t5", **options):
    """A corrector whose model writes ``what(hypotheses)``."""
    prompts = corrector(family).prompts
    texts = {tuple(prompts.answer(one.best)): prompts.answer(what(one.hypotheses)) for one in LISTS}
    return corrector(family, guide=Writes(texts), **options)


# Prompts

texts = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=30).filter(
    lambda text: " ".join(text.split())
)


@settings(max_examples=60, deadline=None)
@given(hypotheses=st.lists(texts, min_size=1, max_size=12))
@pytest.mark.parametrize("name", [*TEMPLATES, TEMPLATE, "{{say}} {numbered} !"])
def test_a_prompt_says_what_it_was_made_of(name, hypotheses):
    template = Template.of(name)
    known = tuple(" ".join(text.split()) for text in hypotheses)
    shown = known[:1] if name == "1_best" else known
    assert template.hypotheses(template.prompt(hypotheses)) == shown


def test_prompts_have_the_published_forms():
    lines = ["one", "two", "three"]
    n_best = Template.of("n_best").prompt(lines)
    assert n_best.endswith(
        "\n\n### Best-hypothesis:\none\n\n### Other-hypothesis:\ntwo\nthree\n\n### Response:\n"
    )
    assert (
        Template.of("1_best")
        .prompt(lines)
        .endswith("\n\n### Best-hypothesis:\none\n\n### Response:\n")
    )
    assert Template.of("flanec").prompt(lines).endswith("\n\n1. one\n2. two\n3. three")


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("n_bset", UnknownNameError, "did you mean 'n_best'"),
        ("no name {}", OptionError, "placeholders"),
        ("{others}", OptionError, r"\{best\}"),
        ("{best} {best}", OptionError, "each once"),
        ("{best} {audio}", OptionError, "audio"),
        ("{best", OptionError, "double literal braces"),
    ],
)
def test_a_template_that_shows_no_hypothesis_is_refused(text, error, says):
    with pytest.raises(error, match=says):
        Template.of(text)


def test_a_text_that_is_no_prompt_is_refused():
    with pytest.raises(InputError, match="does not match the template"):
        Template.of("n_best").hypotheses("something else")


@pytest.mark.parametrize("seq2seq", [False, True])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("text", ["a b", "", "a </s> b</s>"])
def test_an_answer_ends_once_and_a_causal_prompt_does_not(seq2seq, ends, text):
    prompts = ListPrompts(tokenizer(ends), seq2seq, PromptOptions(template=TEMPLATE))
    answer = prompts.answer(text)
    assert answer.count(1) == 1
    assert answer[-1] == 1
    assert (1 in prompts.prompt(["a"])) == (ends and seq2seq)
    assert prompts.text(prompts.answer("a b")) == "a b"


def test_a_chat_model_is_asked_in_its_own_form():
    chatting = tokenizer.__wrapped__()
    chatting.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<bot>"
    prompts = ListPrompts(chatting, False, PromptOptions(template="{best}", chat=True))
    assert chatting.decode(prompts.prompt(["hello"])) == "<user>hello<bot>"
    with pytest.raises(InputError, match="no chat template"):
        ListPrompts(tokenizer(), False, PromptOptions(chat=True))


def test_a_tokenizer_without_an_end_is_refused():
    endless = tokenizer.__wrapped__()
    endless.eos_token = None
    with pytest.raises(InputError, match="no end-of-sequence"):
        ListPrompts(endless, False, PromptOptions())


# The guard

HYPOTHESES = ["there's iron they say in all our blood", "there is iron they say in all are blood"]


@pytest.mark.parametrize(
    "answer",
    [
        *HYPOTHESES,
        "There's iron, they say, in all our blood.",  # case and punctuation are no edits
        "there's iron they say in all of our blood",
        "there is iron they say in all our blood",
    ],
)
def test_the_guard_takes_transcripts(answer):
    assert GUARD(answer, HYPOTHESES, Template.of("n_best")) is None


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "empty"),
        (" \n ", "empty"),
        ("there's iron they say\nin all our blood", "several lines"),
        ("### Response: there's iron they say in all our blood", "repeats the prompt"),
        ("there's iron ### Other-hypothesis: they say in all our blood", "repeats the prompt"),
        ("1. there's iron they say in all our blood", "a list"),
        ("- there's iron they say in all our blood", "a list"),
        ("Sure, there's iron they say in all our blood", "talk about the task"),
        ("Here is the transcription: there's iron they say in all our blood", "talk"),
        ("The corrected transcription is there's iron they say in all our blood", "talk"),
        ("Transcription: there's iron they say in all our blood", "talk"),
        ("I'm sorry there's iron they say in all our blood", "talk"),
        ("steel is what some people find in everybody's veins", "word edits"),
        ("there's iron", "word edits"),
        ("there's iron they say in all our " + "blood" * 20, "times as long"),
    ],
)
def test_the_guard_says_why_it_refuses(answer, why):
    assert why in GUARD(answer, HYPOTHESES, Template.of("n_best"))


def test_a_hypothesis_is_never_refused():
    odd = ["sure i will", "1. go", "", "of course", "i'm sorry", "- no", "### Response:"]
    for text in [*odd, *(one.best for one in LISTS)]:
        assert GUARD(text, ["x y z", text], Template.of("n_best")) is None


def test_one_word_may_always_change_and_the_bound_is_relative():
    assert GUARD("no", ["yes"]) is None
    assert "word edits" in GUARD("no way", ["yes"])
    ten = "a b c d e f g h i j".split()
    assert EditGuard(distance=0.3)(" ".join(["x", "y", "z", *ten[3:]]), [" ".join(ten)]) is None
    four = " ".join(["w", "x", "y", "z", *ten[4:]])
    assert "4 word edits" in EditGuard(distance=0.3)(four, [" ".join(ten)])
    loose = EditGuard(distance=math.inf, shorter=0, longer=math.inf)
    assert loose("w" * 500, [" ".join(ten)]) is None


def test_words_of_no_hypothesis_may_be_refused():
    together = "there's iron they say in all are blood"
    assert EditGuard(novel=0)(together, HYPOTHESES) is None
    novel = together.replace("iron", "irony")
    assert "in no hypothesis: irony" in EditGuard(novel=0)(novel, HYPOTHESES)
    assert EditGuard(novel=1)(novel, HYPOTHESES) is None


def test_scripts_without_spaces_are_counted_by_characters():
    assert words_of("我喜欢 GPT4 吗?") == ["我", "喜", "欢", "gpt4", "吗"]
    assert "word edits" in GUARD("我们去吃饭吧", ["今天天气很好"])
    assert GUARD("今天天汽很好", ["今天天气很好"]) is None


def test_edits_are_those_of_the_alignment():
    jiwer = pytest.importorskip("jiwer")
    dice = random.Random(0)
    for _ in range(60):
        left, right = (dice.choices("abcd", k=dice.randint(1, 9)) for _ in range(2))
        found = jiwer.process_words(" ".join(left), " ".join(right))
        assert edits_of(left, right) == found.substitutions + found.deletions + found.insertions
    assert edits_of([], ["a", "b"]) == edits_of(["a", "b"], []) == 2


@pytest.mark.parametrize(
    "wrong", [{"distance": -1.0}, {"novel": -1}, {"shorter": 1.1}, {"longer": 0.5}]
)
def test_a_guard_that_refuses_everything_is_refused(wrong):
    with pytest.raises(OptionError, match="distance"):
        EditGuard(**wrong)


# What is handed on


@families
def test_a_model_that_copies_reproduces_the_first_hypothesis(family):
    copying = answering(lambda texts: texts[0], family, guard=GUARD)
    found = copying(LISTS)
    assert [one.text for one in found] == [one.best for one in LISTS]
    assert [one.id for one in found] == [one.id for one in LISTS]
    assert not any(one.refused or one.edited for one in found)
    assert copying.stats.accepted == copying.stats.drafted > 0
    assert copying.stats.rounds == len(LISTS) - 1 + 1  # "yes" too: all that is left is the end


def test_what_the_guard_refuses_is_replaced_by_the_first_hypothesis():
    found = answering(lambda texts: "sure! " + texts[-1], guard=GUARD)(LISTS)
    assert [one.text for one in found] == [one.best for one in LISTS]
    assert [one.raw for one in found] == ["sure! " + one.hypotheses[-1] for one in LISTS]
    assert all("talk" in one.refused for one in found)
    free = answering(lambda texts: "sure! " + texts[-1])(LISTS)
    assert [one.text for one in free] == [one.raw for one in found]
    assert all(one.edited and one.refused is None for one in free)


def test_an_answer_that_does_not_end_is_refused():
    [found] = answering(lambda texts: texts[0], max_new_tokens=5, guard=GUARD)(LISTS[:1])
    assert found.raw == "the c"
    assert "did not end within 5 tokens" in found.refused


def test_a_list_without_a_word_and_one_that_is_too_long_are_handed_on():
    long = NBestList("long", (" ".join(["word"] * 60), "word"))
    lists = [NBestList("silence", ("", " ...")), *LISTS, long]
    for family in ("llama", "bart"):
        found = corrector(family)(lists)
        assert [one.id for one in found] == [one.id for one in lists]
        assert (found[0].text, found[0].raw, found[0].refused) == ("", "", None)
        assert "positions" in found[-1].refused
        assert found[-1].text == long.best
        assert [one.raw for one in found[1:-1]] == [one.raw for one in corrector(family)(LISTS)]


def test_rows_of_a_results_file_hold_all_but_the_index():
    [found] = corrector()(LISTS[:1])
    row = found.as_dict()
    assert json.loads(json.dumps(row)) == row
    assert set(row) == {
        "id", "text", "best", "raw", "refused", "tokens", "preference", "error", "kind",
    }  # fmt: skip


# How sure


def likelihood(own, one, answer):
    """Log-probability of an answer by itself, token by token."""
    prompt = own.prompts.prompt(one.hypotheses)
    total = 0.0
    for end in range(len(answer)):
        if own.seq2seq:
            begun = torch.tensor([[own.model.config.decoder_start_token_id, *answer[:end]]])
            given = {"input_ids": torch.tensor([prompt]), "decoder_input_ids": begun}
        else:
            given = {"input_ids": torch.tensor([prompt + answer[:end]])}
        with torch.no_grad():
            total += float(own.model(**given).logits[0, -1].log_softmax(-1)[answer[end]])
    return total


@pytest.mark.one_in(2)
@families
def test_preferences_are_differences_of_likelihoods(family):
    own = answering(lambda texts: texts[-1], family, copy_below=-math.inf)
    found = own(LISTS)
    for one, made in zip(LISTS, found, strict=True):
        first, answer = own.prompts.answer(one.best), own.prompts.answer(one.hypotheses[-1])
        expected = likelihood(own, one, answer) - likelihood(own, one, first)
        assert made.raw == one.hypotheses[-1] and made.refused is None
        assert made.preference == pytest.approx(expected, abs=1e-3)
    assert len({one.preference for one in found}) > 3


def test_the_first_hypothesis_is_handed_on_below_the_copy_threshold():
    free = corrector(copy_below=-math.inf)(LISTS)
    preferences = sorted({one.preference for one in free if one.raw != one.best})
    threshold = preferences[len(preferences) // 2]
    held = corrector(copy_below=threshold)(LISTS)
    assert [one.preference for one in held] == [one.preference for one in free]
    for one in held:
        if one.preference >= threshold or one.raw == one.best:
            assert (one.text, one.refused) == (one.raw, None)
        else:
            assert one.text == one.best and "nats" in one.refused
    assert {one.refused is None for one in held} == {True, False}


def test_a_copy_is_not_preferred_to_itself():
    copying = answering(lambda texts: texts[0], copy_below=5.0)
    assert {one.preference for one in copying(LISTS)} == {0.0}
    assert not any(one.refused for one in copying(LISTS))


# Decoding


def written(family, lists=LISTS, **options):
    return {one.id: one.raw for one in corrector(family, **options)(lists)}


@pytest.mark.one_in(8)
@families
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_batches_and_drafts_change_no_answer(family, temperature):
    alone = {"draft": None, "batch_size": 1, "temperature": temperature, "seed": 4}
    expected = written(family, **alone)
    assert len({*expected.values()}) > 3
    for options in (
        {"batch_size": 5},
        {"draft": "hypotheses", "batch_size": 1},
        {"draft": "hypotheses", "batch_size": 5},
        {"draft": "lookup:length=4", "batch_size": 3},
        {"draft": Source(length=3, ngram=1), "batch_size": 2},
    ):
        assert written(family, **alone | options) == expected
    assert written(family, LISTS[::-1], **alone | {"batch_size": 2}) == expected
    if temperature:
        assert written(family, **alone | {"seed": 5}) != expected


@families
def test_greedy_answers_are_those_of_plain_generate(family):
    own = corrector(family)
    ends = {"eos_token_id": 1, "pad_token_id": 0}
    for one, found in zip(LISTS, own(LISTS), strict=True):
        ids = torch.tensor([own.prompts.prompt(one.hypotheses)])
        mask = torch.ones_like(ids)
        row = model(family).generate(ids, attention_mask=mask, max_new_tokens=40, **ends)[0]
        new = row[1:] if own.seq2seq else row[ids.shape[1] :]
        assert own.prompts.text(new) == found.raw


@pytest.mark.one_in(2)
@families
def test_beams_are_those_of_transformers_and_know_no_guide(family):
    found = written(family, beams=3)
    assert found != written(family)
    own = corrector(family, beams=3)
    for one in LISTS:
        ids = torch.tensor([own.prompts.prompt(one.hypotheses)])
        row = model(family).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, num_beams=3,
            eos_token_id=1, pad_token_id=0,
        )[0]  # fmt: skip
        new = row[1:] if own.seq2seq else row[ids.shape[1] :]
        assert found[one.id] == own.prompts.text(own._ended(new.tolist()))
    for more in ({"guide": "cfg:scale=2"}, {"draft": "lookup"}, {"temperature": 1.0}):
        with pytest.raises(IncompatibleError, match="beams=2"):
            corrector(family, beams=2, **more)


def test_all_hypotheses_are_the_draft():
    rounds = {}
    for count in (1, 4):
        own = answering(lambda texts: texts[min(1, len(texts) - 1)], count=count)
        assert own(LISTS)[0].raw == "the cat sits on the mat"
        rounds[count] = own.stats.rounds
    plain = answering(lambda texts: texts[min(1, len(texts) - 1)], draft=None)
    plain(LISTS)
    assert 3 * rounds[4] < 2 * rounds[1] < plain.stats.rounds


def test_audio_reaches_a_guide():
    received = []

    class Listens(Writes):
        def begin(self, call, prefill):
            received.extend(call.request.inputs["audio"])
            return super().begin(call, prefill)

    prompts = corrector().prompts
    texts = {tuple(prompts.answer(o.best)): prompts.answer(o.best) for o in LISTS}
    own = corrector(guide=Listens(texts))
    own(LISTS, audio=[one.id for one in LISTS])
    assert sorted(received) == ["a", "b", "c", "d", "e"]
    with pytest.raises(OptionError, match="1 recordings for 5 lists"):
        own(LISTS, audio=["x"])


def test_corrections_come_as_batches_end():
    own = corrector(batch_size=2)
    stream = own.corrections(LISTS)
    first = next(stream)
    assert own.stats.calls == 1
    rest = [*stream]
    assert own.stats.calls == 3
    assert {one.id for one in (first, *rest)} == {"a", "b", "c", "d", "e"}


# Folders


@pytest.mark.one_in(3)
@families
def test_a_folder_says_how_it_wants_to_be_asked(family, tmp_path):
    model(family).save_pretrained(tmp_path)
    tokenizer(family != "llama").save_pretrained(tmp_path)
    plain = Corrector.from_pretrained(tmp_path, device="cpu", max_new_tokens=20)
    assert plain.prompts.options == PromptOptions()
    PromptOptions(template=TEMPLATE, count=2).save(tmp_path)
    loaded = Corrector.from_pretrained(tmp_path, device="cpu", max_new_tokens=40, guard=None)
    assert loaded.prompts.options == PromptOptions(template=TEMPLATE, count=2)
    assert [o.raw for o in loaded(LISTS)] == [o.raw for o in corrector(family, count=2)(LISTS)]
    assert Corrector.from_pretrained(tmp_path, device="cpu", count=4).prompts.options.count == 4
    with pytest.raises(OptionError, match="did you mean 'template'"):
        Corrector.from_pretrained(tmp_path, templete="n_best")


@pytest.mark.parametrize(
    "wrong",
    [{"beams": 0}, {"batch_size": 0}, {"max_new_tokens": 0}, {"temperature": -1.0}, {"count": 0}],
)
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(OptionError, match=next(iter(wrong))):
        corrector(**wrong)


def test_a_checkpoint_that_is_none_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="cannot be loaded"):
        Corrector.from_pretrained(tmp_path)


def test_options_are_kept_whole(tmp_path):
    options = PromptOptions(template="{best} ü", count=3, chat=True)
    options.save(tmp_path)
    assert PromptOptions(**PromptOptions.kept(str(tmp_path))) == options
    assert dataclasses.asdict(options) == PromptOptions.kept(str(tmp_path))


# Lists that raise


def words_of_ids(call):
    return call.request.inputs["source_ids"]


STAGES = ("prompt", "begin", "propose", "text")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("stage", "name"),
    [  # by default each stage and each error once
        pytest.param(stage, name, marks=() if STAGES.index(stage) == index else pytest.mark.slow)
        for stage in STAGES
        for index, name in enumerate(FEW)
    ],
)
def test_a_list_that_raises_fails_alone(stage, name, monkeypatch):
    bad, error = LISTS[2], ERRORS[name]
    plain = corrector()
    expected = [one for one in plain(LISTS) if one.id != bad.id]
    ids = [plain.prompts.answer(text) for text in plain.prompts.shown(bad.hypotheses)]
    [answer] = plain([bad])
    faulty = Faulty(lambda call: ids in words_of_ids(call), error, stage)
    failing = corrector(draft=faulty, batch_size=4)
    own = failing.prompts
    if stage == "prompt":
        monkeypatch.setattr(
            own, "prompt", raising(own.prompt, error, lambda h: h == bad.hypotheses)
        )
    if stage == "text":
        decoding = raising(own.text, error, lambda found: plain.prompts.text(found) == answer.raw)
        monkeypatch.setattr(own, "text", decoding)
    found = failing(LISTS)
    failed = found.pop(2)
    assert found == expected
    text, kind = failure_of(name)
    assert text in failed.error and failed.kind == kind and failed.text == bad.best
    assert failing.stats.tokens == sum(one.tokens for one in expected)


def raising(run, error, is_bad):
    def called(given):
        if is_bad(given):
            raise error()
        return run(given)

    return called


def test_an_error_of_the_configuration_that_all_lists_have_is_the_callers():
    def error():
        return OptionError("a=1; expected 2")

    with pytest.raises(OptionError, match="a=1"):
        corrector(draft=Faulty(lambda call: True, error))(LISTS)

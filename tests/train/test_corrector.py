import json
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from mmdecode.asr.correction.corrector import Corrector
from mmdecode.asr.correction.n_best_lists import NBestList, hash_fraction, split, write_lists
from mmdecode.asr.correction.prompts import NO_LABEL, ListPrompts, PromptOptions
from mmdecode.errors import InputError, MissingExtraError, OptionError, UnknownNameError
from mmdecode.runs.files import MAKER
from mmdecode.train import corrector as recipe
from mmdecode.train.corrector import (
    FROM_SCRATCH,
    JUDGED,
    Batches,
    CorrectorOptions,
    Data,
    bits_per_token,
    example_of,
    train,
    train_from_lists,
)
from mmdecode.train.loop import BITS, FitOptions
from tests.support.commands import invoke, json_of
from tests.support.correctors import TEMPLATE, model, tokenizer
from tests.support.files import json_lines

WORDS = "ant bee cat dog eel fox gnu hen".split()
LISTS = [
    NBestList(f"list {n}", (f"{a} {b} {c}", f"{a} {a} {c}", f"{a} {b} {b}"), None, f"{a} {b} {c} x")
    for n, (a, b, c) in enumerate((a, b, c) for a in WORDS for b in WORDS for c in WORDS[:2])
]
DATA = Data.of(LISTS)
ASKED = PromptOptions(template=TEMPLATE, count=2)
FIT = FitOptions(steps=6, batch=4, peak_rate=1e-2, every=3)
OPTIONS = CorrectorOptions(prompts=ASKED, fit=FIT, decoded=4, rank=2)
families = pytest.mark.parametrize("family", ["llama", "t5"])


def fresh(family):
    """A model of its own, with dropout, which a training may change."""
    own = model.__wrapped__(family)
    for module in own.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    return own, tokenizer.__wrapped__(family != "llama")


def prompts_of(family):
    return ListPrompts(tokenizer(family != "llama"), family != "llama", ASKED)


# What is learned


def test_parts_are_those_of_the_evaluation_and_share_no_list():
    names = [{one.id for one in part} for part in (DATA.training, DATA.development)]
    tuned, test = split(LISTS, JUDGED)
    assert names[0] | names[1] == {one.id for one in tuned}
    assert not names[0] & names[1]
    assert not {one.id for one in test} & (names[0] | names[1])
    assert 0.6 < len(names[0]) / len(LISTS) < 0.8
    assert Data.of(LISTS[::-1]).training == DATA.training[::-1]
    with pytest.raises(InputError, match="0 have a reference"):
        Data.of([replace(one, reference=None) for one in LISTS])


@families
def test_only_answers_have_labels_and_each_ends_once(family):
    prompts = prompts_of(family)
    examples = [
        example_of(prompts, one.hypotheses[:n], " ".join(WORDS[:n]))
        for n, one in enumerate(LISTS[:3], 1)
    ]
    batch = prompts.collated(examples)
    for row, example in enumerate(examples):
        labels, ids = batch["labels"][row], batch["input_ids"][row]
        asked = labels != NO_LABEL
        assert labels[asked].tolist() == example.answer
        assert (labels == 1).sum() == 1
        ends = int((labels == 1).nonzero())
        assert (labels[ends + 1 :] == NO_LABEL).all()
        length = int(batch["attention_mask"][row].sum())
        whole = example.prompt if prompts.seq2seq else example.prompt + example.answer
        assert ids[:length].tolist() == whole
        if not prompts.seq2seq:
            assert torch.equal(ids[asked], labels[asked])
            assert (labels[: len(example.prompt)] == NO_LABEL).all()


@families
@torch.no_grad()
def test_the_loss_is_that_of_the_answers_alone_whatever_is_next_to_them(family):
    prompts, own = prompts_of(family), model(family)
    examples = [example_of(prompts, one.hypotheses, one.reference) for one in LISTS[:40:4]]
    examples.append(example_of(prompts, ("a very long first hypothesis " * 3,), "a"))
    total, tokens = 0.0, 0
    for example in examples:
        answer = torch.tensor(example.answer)
        if prompts.seq2seq:
            start = torch.tensor([[own.config.decoder_start_token_id, *example.answer[:-1]]])
            logits = own(input_ids=torch.tensor([example.prompt]), decoder_input_ids=start).logits
        else:
            ids = torch.tensor([example.prompt + example.answer])
            logits = own(input_ids=ids).logits[:, len(example.prompt) - 1 : -1]
        total += float(F.cross_entropy(logits[0], answer, reduction="sum"))
        tokens += len(answer)
    found = bits_per_token(own, own.device, prompts, examples)
    assert found == pytest.approx(total / tokens * BITS, rel=1e-5)


def test_each_list_comes_once_in_a_pass_and_a_batch_depends_on_its_step_alone():
    batches = Batches(prompts_of("t5"), DATA.training, OPTIONS)
    steps = -(-len(DATA.training) // FIT.batch)
    passes = [
        [e for step in range(p * steps, (p + 1) * steps) for e in batches(step)] for p in (0, 1)
    ]
    for one in passes:
        assert len(one) == len(DATA.training)
        assert {tuple(e.prompt) for e in one} == {tuple(e.prompt) for e in batches.examples}
    assert passes[0] != passes[1]
    again = Batches(prompts_of("t5"), DATA.training, OPTIONS)
    assert again(7) == batches(7)


def test_copies_are_lists_of_other_words_whose_answer_is_the_first_hypothesis():
    batches = Batches(prompts_of("t5"), DATA.training, replace(OPTIONS, copies=0.5))
    prompts = batches.prompts
    real, copies = batches(3)[:2], batches(3)[2:]
    known = {tuple(e.prompt) for e in batches.examples}
    assert all(tuple(e.prompt) in known and prompts.text(e.answer).endswith(" x") for e in real)
    assert len(copies) == 2
    for step in range(10):
        for example in batches(step)[2:]:
            shown = prompts.template.hypotheses(prompts.text(example.prompt) + "\n")
            assert prompts.text(example.answer) == shown[0]
            first, second = (text.split() for text in shown)
            assert first[0] == second[0]  # alike everywhere


def test_long_lists_are_left_out_and_counted():
    batches = Batches(prompts_of("t5"), DATA.training, replace(OPTIONS, longest=28))
    lengths = [len(e) for e in Batches(prompts_of("t5"), DATA.training, OPTIONS).examples]
    assert batches.left_out == sum(length > 28 for length in lengths)
    with pytest.raises(InputError, match="more than 3 tokens"):
        Batches(prompts_of("t5"), DATA.training, replace(OPTIONS, longest=3))


# Training


@pytest.mark.one_in(2)
@families
def test_adapters_are_trained_kept_and_loaded(family, tmp_path):
    pytest.importorskip("peft")
    base, out = tmp_path / "base", tmp_path / "out"
    own, words = fresh(family)
    own.save_pretrained(base)
    words.save_pretrained(base)
    card = train_from_lists(str(base), LISTS, out, OPTIONS)
    bits = card["development_bits_per_token"]
    assert bits["after"] < bits["before"]
    assert card["parameters_learnt"] < own.num_parameters() / 2
    assert json.loads((out / "card.json").read_text()) == {"made_by": MAKER} | card
    rows = json_lines(out / "state" / "log.jsonl")
    assert [row["step"] for row in rows] == [3, 6]
    state = torch.load(out / "state" / "state.pt", weights_only=True)["modules"]
    assert sum(p.numel() for p in state.values()) == card["parameters_learnt"]
    loaded = Corrector.from_pretrained(out, device="cpu", guard=None, max_new_tokens=20)
    assert loaded.prompts.options == ASKED
    found = bits_per_token(
        loaded.model, loaded.model.device, loaded.prompts,
        [example_of(loaded.prompts, o.hypotheses, o.reference) for o in DATA.development],
    )  # fmt: skip
    assert found == pytest.approx(bits["after"], abs=2e-3)
    adapter = {
        name.rpartition(".lora_")[0] for name in load_file(out / "adapter_model.safetensors")
    }
    kind = {name.rpartition(".")[2] for name in adapter}
    assert kind == (
        {"q", "k", "v", "o"} if family == "t5" else {"q_proj", "k_proj", "v_proj", "o_proj"}
    )


def test_all_weights_are_trained_and_an_interrupted_training_ends_alike(tmp_path, monkeypatch):
    options = replace(OPTIONS, method="full")
    cards, weights = [], []
    for name, stops in (("whole", None), ("twice", 4)):
        own, words = fresh("t5")
        if stops is not None:
            sound = recipe.loss_at

            def interrupted(model, device, batches, step, sound=sound, stops=stops):
                if step == stops:
                    raise KeyboardInterrupt
                return sound(model, device, batches, step)

            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(recipe, "loss_at", interrupted)
                train(own, words, DATA, options, tmp_path / name / "state", tmp_path / name)
            own, words = fresh("t5")
        cards.append(train(own, words, DATA, options, tmp_path / name / "state", tmp_path / name))
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    for card in cards:
        card.pop("minutes")
    before = cards[1]["development_bits_per_token"].pop("before")
    assert before == cards[0]["development_bits_per_token"].pop("before")
    assert cards[0] == cards[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    with pytest.raises(OptionError, match="other settings"):
        other = replace(options, fit=replace(FIT, peak_rate=1.0))
        train(*fresh("t5"), DATA, other, tmp_path / "whole" / "state", tmp_path / "whole")


def test_a_training_that_only_gets_worse_is_stopped_and_its_best_is_kept(tmp_path, monkeypatch):
    looks = iter([9.0, 4.0, 5.0, 6.0, 7.0])
    monkeypatch.setattr(recipe, "bits_per_token", lambda *a: next(looks))
    fit = replace(FIT, steps=99, every=2, patience=2)
    options = replace(OPTIONS, method="full", fit=fit)
    card = train(*fresh("t5"), DATA, options, tmp_path / "state", tmp_path)
    assert card["steps"] == 2
    assert card["development_bits_per_token"] == {"before": 9.0, "after": 4.0}
    best = torch.load(tmp_path / "state" / "best.pt", weights_only=True)
    kept = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(kept[name], best[name]) for name in kept)


@pytest.mark.slow
def test_a_small_model_from_scratch_learns_its_lists(tmp_path):
    fit = replace(FROM_SCRATCH.fit, steps=40, batch=8, every=40)
    options = replace(FROM_SCRATCH, fit=fit, decoded=4)
    card = train_from_lists(None, LISTS, tmp_path, options)
    bits = card["development_bits_per_token"]
    assert bits["after"] < bits["before"] - 2
    loaded = Corrector.from_pretrained(tmp_path, device="cpu")
    assert loaded.prompts.options == FROM_SCRATCH.prompts
    again = recipe.decoded(loaded.model, loaded.prompts.tokenizer, DATA.development, options)
    assert again == card["development_decoded"]


@pytest.mark.parametrize(("method", "given"), [("scratch", "x"), ("lora", None), ("full", None)])
def test_a_method_and_a_model_that_do_not_go_together_are_refused(method, given, tmp_path):
    with pytest.raises(OptionError, match="builds its own model"):
        train_from_lists(given, LISTS, tmp_path, replace(OPTIONS, method=method))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"method": "lorra"}, UnknownNameError),
        ({"targets": "mlp"}, UnknownNameError),
        ({"rank": 0}, OptionError),
        ({"copies": 1.0}, OptionError),
    ],
)
def test_settings_out_of_range_are_refused(wrong, error):
    with pytest.raises(error):
        CorrectorOptions(**wrong)


def test_the_command_trains_from_files_and_leaves_the_test_part_alone(tmp_path, monkeypatch):
    own, words = fresh("t5")
    own.save_pretrained(tmp_path / "base")
    words.save_pretrained(tmp_path / "base")
    write_lists(LISTS[:60], tmp_path / "one.jsonl.gz", "generator")
    write_lists(LISTS[60:], tmp_path / "two.jsonl")
    seen = []
    sound = recipe.train
    monkeypatch.setattr(recipe, "train", lambda *a, **k: seen.append(a) or sound(*a, **k))
    arguments = ["train", "corrector", "--model", str(tmp_path / "base"), "--method", "full"]
    arguments += ["--data", str(tmp_path / "one.jsonl.gz"), "--data", str(tmp_path / "two.jsonl")]
    arguments += ["--out", str(tmp_path / "out"), "--steps", "4", "--batch-size", "4", "--json"]
    arguments += ["--template", TEMPLATE, "--n-best", "2"]
    done = invoke(*arguments, catch_exceptions=False)
    assert done.exit_code == 0
    card = json_of(done)
    assert card["options"]["prompts"] == {"template": TEMPLATE, "count": 2, "chat": False}
    data = seen[0][2]
    assert max(hash_fraction(one.id) for one in (*data.training, *data.development)) < JUDGED
    assert card["lists"]["training"] == len(DATA.training)


def test_without_peft_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"mmdecode\[train\]"):
        recipe.with_adapters(model("t5"), "base", OPTIONS)

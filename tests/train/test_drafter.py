import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from mmdecode import registry
from mmdecode.draft.dream import Dream
from mmdecode.draft.eagle import Eagle
from mmdecode.draft.flash import Flash
from mmdecode.draft.hydra import Hydra
from mmdecode.draft.kangaroo import Kangaroo
from mmdecode.draft.medusa import Medusa
from mmdecode.draft.vispec import ViSpec
from mmdecode.engine.cache import RaggedCache
from mmdecode.engine.masks import block_mask, chain
from mmdecode.errors import InputError, OptionError, UnknownNameError
from mmdecode.models.feature_drafter import Rows
from mmdecode.runs.files import MAKER
from mmdecode.train.drafters import recipes
from mmdecode.train.drafters import trainer as recipe
from mmdecode.train.drafters.recipes import (
    Options,
    Sample,
    distribution_losses,
    sizes_of,
    targets_of,
    unrolled,
)
from mmdecode.train.drafters.targets import Texts, with_answers
from mmdecode.train.drafters.trainer import answered, collect, train
from mmdecode.vlm.requests import AnswerRequest
from tests.draft.test_eagle import SECTIONS, random_drafter
from tests.support.commands import invoke, json_of
from tests.support.kinds import having
from tests.support.tiny import VOCAB, WIDTH, text_model
from tests.support.tiny_vlm import vision_inputs, vision_model

NEAR = {"atol": 1e-8, "rtol": 1e-8}


def requests(count):
    return [AnswerRequest(str(index), index, str(index), (), named=True) for index in range(count)]


def build(asked):
    """Ragged prompts, padded on the left; what a request says is their seed."""
    rows = [
        torch.randint(
            1, VOCAB, (3 + r.index % 4,), generator=torch.Generator().manual_seed(r.index)
        )
        for r in asked
    ]
    width = max(map(len, rows))
    ids = torch.stack([F.pad(row, (width - len(row), 0)) for row in rows])
    mask = torch.stack([F.pad(torch.ones_like(row), (width - len(row), 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def samples(count=3, length=6):
    generator = torch.Generator().manual_seed(1)
    return [
        Sample(r, torch.randint(1, VOCAB, (length + r.index,), generator=generator).tolist())
        for r in requests(count)
    ]


SMALL = Options(
    held_out=4,
    tested=2,
    max_new_tokens=12,
    length=2,
    fit=replace(Options().fit, steps=4, batch=4, every=2, peak_rate=5e-3),
)


# What is learned from


def test_states_are_those_of_a_plain_pass_over_prompt_and_answer():
    model, drafter = text_model("llama", layers=3), random_drafter("eagle3")
    some = samples()
    batch = collect(Texts(model, build), drafter, some)
    for row, sample in enumerate(some):
        prompt = build([sample.request])["input_ids"][0]
        ids = torch.cat([prompt, torch.tensor(sample.answer)])
        width = len(ids)
        assert batch.ids[row, -width:].tolist() == ids.tolist()
        assert batch.asked[row].sum() == len(sample.answer)
        with torch.no_grad():
            found = model(ids[None], output_hidden_states=True)
        levels = torch.cat([found.hidden_states[level] for level in (2, 1, 0)], -1)
        rows = batch.rows
        own = slice(1 - width, None)
        torch.testing.assert_close(rows.features[row, own], levels[0, :-1], atol=1e-4, rtol=1e-4)
        embeds = model.get_input_embeddings()(ids[1:])
        assert torch.equal(rows.embeds[row, own], embeds)
        assert rows.positions[row, own].tolist() == list(range(width - 1))
        assert rows.kept[row].sum() == width - 1
        logits = batch.logits()[row, -width:]
        torch.testing.assert_close(logits, found.logits[0], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_rows_of_an_image_hold_the_targets_merged_embeddings(family):
    model = vision_model(family)
    given = vision_inputs(family)
    answers = [Sample(r, [5, 6, 7]) for r in requests(3)]
    drafter = random_drafter(rope_parameters=SECTIONS)
    batch = collect(Texts(model, lambda asked: dict(given)), drafter, answers)
    rows, images = batch.rows, registry.adapter_for(model).spans("image", batch.ids)[:, 1:]
    assert torch.equal(rows.images > 0, images) and images.any()
    words = model.get_input_embeddings()(batch.ids[:, 1:])
    differ = (rows.embeds != words).any(-1)
    assert torch.equal(differ, images)
    height = rows.positions[:, 1]
    turned = (rows.positions != height[:, None]).any(1)
    assert bool(turned.any()) == (family == "qwen2_5_vl")


def test_answers_follow_the_prompt_whatever_its_padding():
    inputs = build(requests(3)) | {"mm_token_type_ids": torch.ones(3, 5).long(), "pixel_values": 0}
    found = with_answers(inputs, [[7, 8], [9], []])
    assert found["pixel_values"] == 0
    assert found["input_ids"].shape == (3, 5)
    for row, answer in enumerate([[7, 8], [9], []]):
        real = inputs["input_ids"][row][inputs["attention_mask"][row] > 0].tolist() + answer
        assert found["input_ids"][row].tolist() == [0] * (5 - len(real)) + real
        assert found["attention_mask"][row].sum() == len(real)
        assert found["mm_token_type_ids"][row].sum() == len(real) - len(answer)


def test_answers_are_the_targets_own_and_are_asked_for_once(tmp_path):
    model = text_model("llama")
    file = tmp_path / "answers.jsonl"
    first = answered(Texts(model, build), requests(3), SMALL, file)
    plain = model.generate(**build(requests(3)), max_new_tokens=12, do_sample=False)
    assert [sample.answer for sample in first] == plain[:, -12:].tolist()
    again = answered(Texts(mute(model), build), requests(3), SMALL, file)
    assert again == first


def mute(model):
    """A model that cannot be run."""
    return SimpleNamespace(generation_config=model.generation_config)


# Passes over own states


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_later_pass_makes_what_drafting_makes(kind):
    """After every row, token by token with a cache, as `FeatureDraft` does it."""
    drafter = random_drafter(kind).double()
    generator = torch.Generator().manual_seed(0)
    embeds, features = torch.randn(2, 2, 7, WIDTH, generator=generator).double()
    kept = torch.ones(2, 7).bool()
    kept[1, :2] = False
    positions = (kept.long().cumsum(1) - 1).clamp_min(0)
    rows = Rows(embeds=embeds, features=features, positions=positions, kept=kept)
    pads = torch.tensor([0, 2])
    with torch.no_grad():
        passes = unrolled(drafter, rows, 3)
        for last in range(3, 5):
            cache, width = RaggedCache(1, 2, embeds.device), last + 1
            cache.open(9)
            mask = block_mask(cache.start, pads, *chain(width, embeds.device), 9, torch.float64)
            part = Rows(
                embeds=embeds[:, :width],
                features=features[:, :width],
                positions=positions[:, :width],
            )
            states = drafter(part, mask, cache)[:, -1:]
            for ahead in range(3):
                torch.testing.assert_close(states[:, 0], passes[ahead][:, last], **NEAR)
                if ahead == 2:
                    break
                cache.set_start(torch.full((2,), width + ahead))
                cache.open(9)
                one = chain(1, embeds.device)
                mask = block_mask(cache.start, pads, *one, 9, torch.float64)
                token = last + 1 + ahead
                part = Rows(
                    embeds=embeds[:, token : token + 1],
                    features=states,
                    positions=positions[:, last, None] + 1 + ahead,
                )
                states = drafter(part, mask, cache)


def test_pass_i_is_asked_for_the_token_i_plus_one_positions_ahead():
    model = text_model("llama")
    batch = collect(Texts(model, build), random_drafter(), samples())
    logits = batch.logits()
    for index in range(3):
        targets = targets_of(batch, logits, index)
        for row in range(3):
            for position in targets.asked[row].nonzero()[:, 0].tolist():
                assert batch.asked[row, position + 1] and batch.asked[row, position + 2 + index]
                assert torch.equal(targets.logits[row, position], logits[row, position + 1 + index])
                assert torch.equal(
                    targets.features[row, position], batch.last[row, position + 1 + index]
                )
        lengths = batch.asked.sum(1)
        assert targets.asked.sum(1).tolist() == (lengths - 1 - index).clamp_min(0).tolist()


@pytest.mark.parametrize("kind", recipes.RECIPES)
@pytest.mark.parametrize("length", [1, 2])
def test_answers_too_short_for_a_kind_teach_it_nothing_and_break_nothing(kind, length):
    """Of one token none is drafted; where each answer is as short, there is no loss, not NaN."""
    model = text_model("llama", layers=3)
    recipe, options = recipes.RECIPES[kind], replace(SMALL, kind=kind, **having(kind, heads=4))
    short = [Sample(r, [5 + r.index] * length) for r in requests(3)]
    module = recipe.build(registry.adapter_for(model), short, options)
    batch = collect(Texts(model, build), recipe.reads(module), short)
    loss = recipe.loss(module, batch, options, torch.Generator().manual_seed(0))
    loss.backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    assert loss.isfinite() and all(grad.isfinite().all() for grad in grads)
    if length == 1 and kind not in ("text", "kangaroo"):  # these are asked for the first one too
        assert loss.item() == 0 and not any(grad.any() for grad in grads)


def test_nothing_is_asked_where_the_most_likely_token_is_outside_the_vocabulary():
    wanted = torch.zeros(1, 3, 6)
    wanted[0, :, 4], wanted[0, 1, 2] = 1.0, 3.0
    targets = recipes.Targets(features=wanted, logits=wanted, asked=torch.ones(1, 3).bool())
    own = torch.tensor([0, 2, 5])
    losses, asked = distribution_losses(torch.zeros(1, 3, 3), targets, own)
    assert asked.tolist() == [[False, True, False]]
    assert losses[0, [0, 2]].tolist() == [0, 0]
    assert float(losses[0, 1]) == pytest.approx(math.log(3))


# Trainings


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", recipes.RECIPES)
def test_each_kind_is_trained_and_can_be_loaded(kind, tmp_path):
    model = text_model("llama", layers=3)
    options = replace(SMALL, kind=kind, **having(kind, draft_vocabulary=40))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    card = train(Texts(model, build), requests(12), options, tmp_path / "state", tmp_path)
    kept = json.loads((tmp_path / "card.json").read_text())
    assert kept == json.loads(json.dumps({"made_by": MAKER} | card))
    assert 1 <= card["tokens_per_pass"] <= 3
    assert len(card["accepted_by_position"]) == 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    if kind == "text":
        assert registry.create("draft", f"assistant:model={tmp_path}", target=model).length == 5
        return
    others = (Dream, Flash, Hydra, Kangaroo, Medusa, ViSpec)
    cls = {other.__name__.lower(): other for other in others}.get(kind, Eagle)
    draft = cls.from_pretrained(tmp_path)
    if kind == "eagle3":
        assert draft.drafter.lm_head.out_features == 40
        answers = {
            token
            for s in answered(
                Texts(model, build), requests(6), options, tmp_path / "state" / "answers.jsonl"
            )
            for token in s.answer
        }
        assert len(answers) > 1 and answers <= {*draft.drafter.target_ids().tolist()}


def test_a_text_drafter_learns_distributions_of_words_that_close_ranks():
    model, some = vision_model("llava"), [Sample(r, [5, 6, 7]) for r in requests(3)]
    given = vision_inputs("llava")
    batch = collect(Texts(model, lambda asked: dict(given)), None, some)
    adapter = registry.adapter_for(model)
    assert not (batch.words & adapter.spans("image", batch.ids)).any()
    own = recipes.RECIPES["text"]
    module = own.build(adapter, some, Options(kind="text", layers=2)).eval()
    distribution, losses = batch.logits().log_softmax(-1), []
    for row in range(3):
        words = batch.ids[row][batch.words[row]]
        with torch.no_grad():
            drafted = module(words[None]).logits[0].log_softmax(-1)
        mine = distribution[row][batch.words[row]]
        first = int(batch.asked[row][batch.words[row]].int().argmax())
        losses += [-(mine[t].exp() * drafted[t]).sum() for t in range(first - 1, len(words) - 1)]
    with torch.no_grad():
        found = own.loss(module, batch, Options(kind="text"), torch.Generator())
    torch.testing.assert_close(found, torch.stack(losses).mean(), atol=1e-4, rtol=1e-4)
    assert len(losses) == 9


def test_a_drafter_learns_what_its_target_writes(tmp_path):
    """A few steps over answers that are asked for again are enough to be mostly right."""
    torch.manual_seed(0)
    model = text_model("llama")
    options = replace(
        SMALL,
        law_weight=1.0,
        noise=0.0,
        passes=2,
        fit=replace(SMALL.fit, steps=100, every=50, batch=8, peak_rate=1e-2),
    )
    asked = requests(16)
    # the last ones are asked again, so that this is about learning and not about what is alike
    again = [replace(r, id=f"{r.id} again") for r in asked[:4]]
    card = train(Texts(model, build), asked + again, options, tmp_path / "state", tmp_path)
    assert card["tokens_per_pass"] > 2


def test_an_interrupted_training_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    model = text_model("llama")
    whole = train(
        Texts(model, build), requests(10), SMALL, tmp_path / "one" / "state", tmp_path / "one"
    )
    batches, calls = recipe.Batches.__call__, []

    def interrupted(self, step):
        calls.append(step)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return batches(self, step)

    monkeypatch.setattr(recipe.Batches, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(
            Texts(model, build), requests(10), SMALL, tmp_path / "two" / "state", tmp_path / "two"
        )
    monkeypatch.undo()
    card = train(
        Texts(model, build), requests(10), SMALL, tmp_path / "two" / "state", tmp_path / "two"
    )
    assert {**card, "minutes": 0} == {**whole, "minutes": 0}
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
    other = replace(SMALL, decay=0.5)
    with pytest.raises(OptionError, match="settings"):
        train(
            Texts(model, build), requests(10), other, tmp_path / "two" / "state", tmp_path / "two"
        )


def test_states_are_kept_while_there_is_room():
    model, calls = text_model("llama"), []

    def counted(asked):
        calls.append(len(asked))
        return build(asked)

    some = samples(8)
    for memory, expected in ((512.0, 2), (0.0, 6), (0.03, 4)):
        calls.clear()
        options = replace(SMALL, memory=memory)
        batches = recipe.Batches(Texts(model, counted), random_drafter(), some, options)
        seen = [batches(step).ids.shape for step in range(6)]
        assert seen[0] != seen[1]
        assert len(calls) == expected


def test_a_drafter_of_a_target_has_its_sizes():
    model = vision_model("llava")
    config = sizes_of(registry.adapter_for(model))
    assert config["hidden_size"] == config["target_hidden_size"] == WIDTH
    assert (config["vocab_size"], config["target_num_layers"]) == (VOCAB, 2)


def test_what_cannot_be_trained_is_refused(tmp_path):
    with pytest.raises(UnknownNameError, match="eagle"):
        Options(kind="egle")
    with pytest.raises(OptionError, match=r"heads=3 .* kind='eagle', only with medusa and hydra"):
        Options(heads=3)
    with pytest.raises(OptionError, match="held_out=0"):
        Options(held_out=0)
    with pytest.raises(InputError, match="held out"):
        train(Texts(text_model("llama"), build), requests(4), SMALL, tmp_path, tmp_path)
    target = text_model("llama").requires_grad_(True)  # others share it
    with pytest.raises(OptionError, match="draft_vocabulary=99"):
        options = replace(SMALL, kind="eagle3", draft_vocabulary=99)
        train(Texts(target, build), requests(9), options, tmp_path / "a", tmp_path)
    with pytest.raises(OptionError, match="exit_layer=9"):
        options = replace(SMALL, kind="kangaroo", exit_layer=9)
        train(Texts(target, build), requests(9), options, tmp_path / "a", tmp_path)
    with pytest.raises(InputError, match=r"\./nowhere"):
        train(Texts(target, build), requests(9), SMALL, tmp_path / "a", tmp_path, start="./nowhere")
    assert all(parameter.requires_grad for parameter in target.parameters())
    assert not list(tmp_path.iterdir()), "what is refused leaves nothing"


def test_the_command_trains_for_the_zoo(tmp_path):
    given = "drafter --model zoo:llava-scenes --steps 1 --batch-size 2 --held-out 1 --tested 1"
    words = [*given.split(), "--limit", "3", "--json", "--out", str(tmp_path)]
    found = invoke("train", *words)
    assert found.exit_code == 0, found.output
    card = json_of(found)
    assert card["requests"] == {"learnt": 1, "held_out": 1, "tested": 1}
    assert Eagle.from_pretrained(tmp_path).drafter.config["target_num_layers"] == 8


def test_medusa_heads_of_a_model_that_hears_nothing_are_a_kind_of_drafter(tmp_path, monkeypatch):
    asked = []

    def noted(model, data, out, options, **given):
        asked.append((model, data, options.kind, options.heads, options.fit.seed, given["limit"]))
        assert given["precision"] == "bf16"
        return {"tokens_per_pass": 1.0, "entropy_bits_per_token": 1.0}

    monkeypatch.setattr(recipe, "train_from", noted)
    table = tmp_path / "questions.jsonl"
    table.write_text("{}\n")
    given = "medusa --model zoo:llava-scenes --heads 3 --limit 7 --seed 2 --dtype bf16 --data"
    words = [*given.split(), str(table), "--out", str(tmp_path / "out")]
    found = invoke("train", *words)
    assert found.exit_code == 0, found.output
    assert asked == [("zoo:llava-scenes", str(table), "medusa", 3, 2, 7)]

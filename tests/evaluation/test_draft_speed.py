"""``mmdecode bench``: counts are those of the decoder, ratios those of the clock."""

import json
from functools import partialmethod

import numpy as np
import pytest
import torch
from rich.console import Console

from mmdecode.api import generate
from mmdecode.cli import bench
from mmdecode.decoder import Decoder
from mmdecode.draft.lookup import LookupSession, PromptLookup
from mmdecode.draft.source import Source
from mmdecode.errors import OptionError, UnsupportedModelError
from mmdecode.evaluation.speed import draft_speed
from mmdecode.evaluation.speed.draft_speed import AGAIN, PLAIN, Setting, calls, confidence, measure
from mmdecode.evaluation.speed.stopwatch import Cost
from mmdecode.runs.files import MAKER
from mmdecode.vlm import Answerer
from tests.support.commands import invoke, json_of
from tests.support.correctors import model

SETTING = Setting(max_new_tokens=12)


def prompts(rows=2, batches=2):
    dice = torch.Generator().manual_seed(0)
    ids = [torch.randint(2, 200, (rows, 5), generator=dice) for _ in range(batches)]
    return [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in ids]


def answers(batch, setting=SETTING):
    given = {"max_new_tokens": setting.max_new_tokens, **setting.generation()}
    return generate(model("llama"), decoder=Decoder(), **batch, **given)[:, 5:].tolist()


def by_way(found):
    return {row.way: row for row in found}


def test_a_draft_that_knows_the_answer_is_counted():
    [batch] = prompts(batches=1)
    right = answers(batch)
    found = by_way(measure(model("llama"), [batch], {"known": Source(3, ids=right)}, SETTING))
    assert list(found) == [PLAIN, AGAIN, "known"]
    known, plain = found["known"], found[PLAIN]
    assert known.identical == plain.identical == found[AGAIN].identical == 1
    assert all(len(row) == 12 for row in right)  # none of them ends by itself
    # eleven tokens after the first in passes of four, the last of them cut
    assert known.tokens_per_pass == pytest.approx(11 / 3, abs=1e-3)
    assert known.by_depth == [1.0, 1.0, pytest.approx(2 / 3, abs=1e-3)]
    assert known.accepted_per_pass == pytest.approx(sum(known.by_depth), abs=1e-3)
    assert (plain.tokens_per_pass, plain.accepted_per_pass, plain.by_depth) == (1.0, 0.0, [])
    assert plain.draft_share is None and known.draft_share > 0
    assert known.tokens == plain.tokens == 12


def test_answers_that_differ_are_counted():
    peers = {"generate": {}, "another distribution": {"repetition_penalty": 5.0}}
    found = by_way(measure(model("llama"), prompts(), {}, SETTING, peers=peers))
    assert found["generate"].identical == 1 and found["generate"].tokens_per_pass is None
    assert found["another distribution"].identical < 1


def test_sampled_answers_are_the_same_with_the_same_noise():
    setting = Setting(max_new_tokens=8, temperature=1.0, seed=3, repeats=2)
    peers = {"generate": {}}
    found = by_way(
        measure(model("llama"), prompts(), {"lookup": PromptLookup(3)}, setting, peers=peers)
    )
    assert found[AGAIN].identical == found["lookup"].identical == 1
    assert found["generate"].identical is None  # it draws with noise of its own


def test_ratios_are_those_of_decoding_and_of_the_whole(monkeypatch):
    spent = {PLAIN: (1.0, 5.0), AGAIN: (1.0, 5.0), "lookup": (2.0, 4.0)}

    def clock(ways, items, repeats, device, done=lambda: None):
        seconds, results = {}, {}
        for name, call in ways.items():
            way, _, length = name.rpartition("/")
            seconds[name] = [[spent[way][length != "1"]] * items for _ in range(repeats)]
            results[name] = [
                call(item, repeat) for repeat in range(repeats) for item in range(items)
            ]
        return seconds, results

    monkeypatch.setattr(draft_speed, "interleaved", clock)
    found = by_way(measure(model("llama"), prompts(), {"lookup": PromptLookup(3)}, SETTING))
    assert found["lookup"].decode == (2.0, 2.0, 2.0)  # four seconds after the first token, or two
    assert found["lookup"].end_to_end == (1.25, 1.25, 1.25)
    assert found["lookup"].first_token_ms == 2000
    assert found["lookup"].ms_per_token == pytest.approx(2000 / 22, abs=0.01)


def test_the_share_of_a_draft_is_what_its_steps_take(monkeypatch):
    draft, [batch] = PromptLookup(3), prompts(batches=1)
    setting = Setting(max_new_tokens=6)
    monkeypatch.setattr(draft_speed, "timed", lambda device, call: (1.0, call()))
    steps = []

    def counting(self, step, *given):
        steps.append(1)
        return step(self, *given)

    for name in ("propose", "observe"):
        step = getattr(LookupSession, name)
        monkeypatch.setattr(LookupSession, name, partialmethod(counting, step))

    def run(length, item):
        return generate(model("llama"), decoder=Decoder(draft), max_new_tokens=length, **batch)

    spent = {"whole": np.zeros((1, 1)), "first": np.array([0.5])}
    way = draft_speed._Way(run=run, decoder=None, answers=[], **spent)
    share = way.draft_share(draft, setting, torch.device("cpu"))
    # the whole took a second, half of it to the first token; each step took one
    assert len(steps) > 4 and share == len(steps) / 0.5
    assert "begin" not in vars(draft)


def test_calls_are_announced():
    done = []
    found = measure(
        model("llama"), prompts(), {"a": PromptLookup(2)}, Setting(max_new_tokens=3, repeats=2),
        peers={"generate": {}}, done=lambda: done.append(1),
    )  # fmt: skip
    assert len(found) == 4
    assert len(done) == calls(2, 1, 1, Setting(max_new_tokens=3, repeats=2)) == 40


def test_confidence_is_of_the_distribution_that_is_decoded():
    [batch] = prompts(batches=1)
    found = confidence(model("llama"), [batch], Setting(max_new_tokens=4), None)
    right = answers(batch, Setting(max_new_tokens=4))
    bits, close = [], []
    for prompt, answer in zip(batch["input_ids"].tolist(), right, strict=True):
        for end in range(4):
            with torch.no_grad():
                logits = model("llama")(torch.tensor([prompt + answer[:end]])).logits[0, -1]
            distribution = torch.distributions.Categorical(logits=logits)
            bits.append(float(distribution.entropy()) / np.log(2))
            first, second = distribution.probs.topk(2).values.tolist()
            close.append(first - second < 0.05)
    assert 0 < np.mean(close) < 1
    assert found["entropy_bits"] == pytest.approx(np.mean(bits), abs=1e-3)
    assert found["close"] == pytest.approx(np.mean(close), abs=1e-3)


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(OptionError, match="no batch"):
        measure(model("llama"), [], {}, SETTING)
    with pytest.raises(OptionError, match="supports no guide"):
        measure(model("llama"), prompts(), {}, SETTING, guide=object(), peers={"generate": {}})
    for wrong in ({"max_new_tokens": 1}, {"temperature": -1.0}, {"repeats": 0}):
        with pytest.raises(OptionError, match="expected at least"):
            Setting(**wrong)


def test_a_cost_is_per_token():
    fast, slow = Cost(np.ones(3), np.full(3, 2)), Cost(np.ones(3), np.ones(3))
    assert fast.over(slow) == (2.0, 2.0, 2.0)
    mixed = Cost(np.array([1.0, 2.0]), np.array([1, 1]))
    assert mixed.over(Cost(np.ones(2), np.ones(2))) == (0.667, 0.5, 1.0)


def test_a_way_of_transformers_that_fails_is_left_out_and_named():
    class Fails:
        def generate(self, wrong=False, **given):
            if wrong:
                raise ValueError("no\nmore")

    found, failed = draft_speed.working(Fails(), {}, {"good": {}, "bad": {"wrong": True}})
    assert found == {"good": {}}
    assert failed == {"bad": "transformers' generate fails on this model: ValueError: no"}


def test_why_transformers_own_draft_cannot_be_timed_is_printed_below_the_table(capsys):
    """Its lookup next to images, and in batches, on the model that ships."""
    answerer = Answerer.from_pretrained("zoo:llava-scenes", device="cpu")
    reasons = []
    for size in (1, 2):
        (batch,) = bench.prompts_of(answerer, bench.SCENES, 2, size)[:1]
        works, failed = draft_speed.working(answerer.model, batch, draft_speed.PEERS)
        assert list(works) == ["generate"] and "Error" not in failed["generate, lookup"]
        reasons += failed.values()
    assert "shows the image again" in reasons[0] and "one prompt at a time" in reasons[1]
    Console(width=100).print(bench.table_of([], "t", failed))
    shown = " ".join(capsys.readouterr().out.split())
    assert "generate, lookup: not timed. Transformers' assisted" in shown


def test_the_command_measures_the_shipped_model(tmp_path):
    path = tmp_path / "new" / "bench"
    asked = ["bench", "vlm", "--limit", "2", "--max-new-tokens", "4", "--draft", "lookup:length=2"]
    asked += ["--batch-size", "1", "--batch-size", "2", "--out", str(path), "--json"]
    done = invoke(*asked)
    assert done.exit_code == 0, done.output
    printed = json_of(done)
    assert json.loads((path / "results.json").read_text()) == {"made_by": MAKER} | printed
    assert [case["batch"] for case in printed["cases"]] == [1, 2]
    for case in printed["cases"]:
        rows = {row["way"]: row for row in case["rows"]}
        assert rows["lookup:length=2"]["identical"] == rows["generate"]["identical"] == 1
        assert case["entropy_bits"] > 0


def test_too_few_questions_for_a_batch_are_an_error():
    done = invoke("bench", "vlm", "--limit", "2", "--batch-size", "4")
    assert isinstance(done.exception, OptionError) and "raise --limit" in str(done.exception)


def test_a_model_without_images_is_refused_before_its_weights_are_read(monkeypatch):
    monkeypatch.setattr(Answerer, "from_pretrained", None)
    done = invoke("bench", "vlm", "--model", "zoo:lm-synth")
    assert isinstance(done.exception, UnsupportedModelError)
    says = "bench vlm times vision-language models; zoo:lm-synth is a llama model: compare drafters"
    assert str(done.exception).startswith(says)

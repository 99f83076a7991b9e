"""Trainings in half precision, in several processes, and from a drafter that exists."""

import json
import math
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mmdecode.errors import InputError, MissingExtraError, OptionError, UnknownNameError
from mmdecode.models.eagle import EagleModel
from mmdecode.models.vispec import ViSpecModel
from mmdecode.train import distributed as workers
from mmdecode.train.begin import begun
from mmdecode.train.distributed import Alone, Worker
from mmdecode.train.drafters import trainer as recipe
from mmdecode.train.drafters.recipes import RECIPES, Options
from mmdecode.train.drafters.targets import Texts
from mmdecode.train.drafters.trainer import train
from mmdecode.train.loop import FitOptions, fit
from tests.support.kinds import having
from tests.support.tiny import text_model
from tests.train.test_drafter import SMALL, build, requests

FIT = FitOptions(steps=6, every=2, batch=3, peak_rate=1e-2)


def half(model):
    return text_model(model).__class__(text_model(model).config).eval().to(torch.bfloat16)


# Precision


def test_in_half_precision_what_learns_stays_in_float32(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    losses, seen = [], []
    backward = Worker.backward

    def noted(self, loss, learner):
        losses.append(loss.item())
        backward(self, loss, learner)
        seen.extend(p.dtype for p in learner.parameters())
        seen.extend(p.grad.dtype for p in learner.parameters())

    class Reads(recipe.RECIPES["eagle"].__class__):
        def loss(self, module, batch, options, dice):
            made.append(module.fc(torch.ones(1, module.fc.in_features)).dtype)
            states.append(batch.last.dtype)
            return super().loss(module, batch, options, dice)

    made, states = [], []
    monkeypatch.setitem(RECIPES, "eagle", Reads())
    monkeypatch.setattr(Worker, "backward", noted)
    pace = replace(SMALL.fit, steps=40, every=20, peak_rate=1e-2)
    options = replace(SMALL, fit=pace, noise=0.0, law_weight=1.0)
    target = Texts(half("llama"), build)
    worker = Worker("cpu", "bf16")
    card = train(target, requests(10), options, tmp_path / "state", tmp_path, worker=worker)
    assert {*seen} == {torch.float32}
    assert {*made} == {*states} == {torch.bfloat16}
    assert card["precision"] == "bf16"
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert all(math.isfinite(loss) for loss in losses)
    with pytest.raises(OptionError, match="precision was 'bf16'"):
        train(target, requests(10), options, tmp_path / "state", tmp_path)


def test_precisions_may_follow_one_another():
    pytest.importorskip("accelerate")
    for precision in ("bf16", "fp32", "bf16"):
        with Worker("cpu", precision).autocast():
            made = torch.ones(1, 1) @ torch.ones(1, 1)
        assert made.dtype == workers.PRECISIONS[precision]


def test_a_step_whose_gradients_overflow_is_left_out(tmp_path):
    """A scaler with one parameter in each of two optimizers, as fp16 has on a GPU."""
    worker = Worker("cpu")
    worker.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    learner = nn.Linear(1, 1)
    first, second = (torch.optim.SGD([p], lr=1.0) for p in learner.parameters())
    for bad in (False, True, False):
        before = [p.detach().clone() for p in learner.parameters()]
        loss = learner(torch.tensor([[0.1]])).sum() * (math.inf if bad else 1.0)
        worker.backward(loss, learner)
        worker.step(learner, [first, second])
        moved = [float(b - p.detach()) for b, p in zip(before, learner.parameters(), strict=True)]
        # the norm of (0.1, 1) is cut to 1, and the scale is gone
        expected = [0.0, 0.0] if bad else [0.1 / 1.01**0.5, 1 / 1.01**0.5]
        assert moved == pytest.approx(expected, rel=1e-4)
    assert worker.scaler.get_scale() == 2.0


def test_what_cannot_be_is_refused(monkeypatch):
    with pytest.raises(UnknownNameError, match="bf16"):
        Worker("cpu", "bf61")
    with pytest.raises(OptionError, match="fp16"):
        Worker("cpu", "fp16")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtraError, match=r"mmdecode\[train\]"):
        Worker("cpu", "bf16")
    assert Worker("cpu").precision == "fp32"


# Processes


def learned(folder, worker):
    """A line through points, of which each batch has its own."""
    torch.manual_seed(0)
    learner = nn.Linear(2, 1)

    def loss_at(step):
        dice = FIT.dice(worker.batch_index(step))
        points = torch.randn(4, 2, generator=dice)
        return F.mse_loss(learner(points)[:, 0], points @ torch.tensor([1.0, -2.0]))

    def both(step):
        return torch.stack([loss_of(2 * step), loss_of(2 * step + 1)]).mean()

    def loss_of(batch_index):
        points = torch.randn(4, 2, generator=FIT.dice(batch_index))
        return F.mse_loss(learner(points)[:, 0], points @ torch.tensor([1.0, -2.0]))

    fit(
        learner,
        loss_at=both if type(worker) is Alone else loss_at,
        held_out=lambda: float((learner.weight[0] - torch.tensor([1.0, -2.0])).norm()),
        keep=lambda: None,
        options=FIT,
        work=folder,
        worker=worker,
    )
    return torch.cat([p.detach().flatten() for p in learner.parameters()])


def learn_in_parallel(folder, rank):
    """What one of two processes does."""
    worker = Worker("cpu")
    assert (worker.rank, worker.size) == (rank, 2)
    torch.save(learned(folder / "both", worker), folder / f"{rank}.pt")
    worker.leave()


@pytest.mark.slow
def test_two_processes_step_by_the_mean_of_their_batches(tmp_path):
    pytest.importorskip("accelerate")
    expected = learned(tmp_path / "alone", Alone())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    started = []
    for rank in range(2):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": root}
        code = (
            "from pathlib import Path; from tests.train.test_workers import learn_in_parallel; "
            f"learn_in_parallel(Path({str(tmp_path)!r}), {rank})"
        )
        variables = os.environ | {name: str(value) for name, value in own.items()}
        started.append(subprocess.Popen([sys.executable, "-c", code], env=variables))
    assert [process.wait() for process in started] == [0, 0]
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected)
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("alone", "both")]
    held_out = [[json.loads(line)["held_out"] for line in lines] for lines in logs]
    assert held_out[0] == pytest.approx(held_out[1], abs=1e-4)


# From a drafter that exists


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", RECIPES)
def test_a_training_starts_from_what_was_learned(kind, tmp_path, monkeypatch):
    options = replace(SMALL, kind=kind, **having(kind, draft_vocabulary=40, exit_layer=1))
    target = Texts(text_model("llama"), build)
    train(target, requests(10), options, tmp_path / "one" / "state", tmp_path / "one")
    starts = []
    monkeypatch.setattr(
        recipe, "fit", lambda module, **_: starts.append(module.state_dict()) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        train(
            target, requests(10), options, tmp_path / "state", tmp_path, start=str(tmp_path / "one")
        )
    best = torch.load(tmp_path / "one" / "state" / "best.pt", weights_only=True)
    assert starts[0].keys() == best.keys()
    for name, value in best.items():  # they are written in half precision
        torch.testing.assert_close(starts[0][name], value, atol=1e-3, rtol=1e-3)


def test_vispec_starts_from_a_drafter_of_eagle(tmp_path):
    target = Texts(text_model("llama"), build)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 80}
    eagle, built = EagleModel(sizes), ViSpecModel({**sizes, "num_queries": 2})
    own = {name: value.clone() for name, value in built.state_dict().items()}
    eagle.half().float().save_pretrained(tmp_path)
    module = begun(built, str(tmp_path), "a model")
    assert type(module) is ViSpecModel
    learned = eagle.state_dict()
    for name, value in module.state_dict().items():
        assert torch.equal(value, learned.get(name, own[name]))
    with pytest.raises(InputError, match="holds no drafter"):
        begun(EagleModel(sizes), "zoo:llava-scenes-medusa", "a model")
    options = replace(SMALL, kind="eagle")
    with pytest.raises(
        InputError, match=r"zoo:llava-scenes-eagle .* LlamaForCausalLM.* has shape .*, expected "
    ):
        train(
            target,
            requests(10),
            options,
            tmp_path / "state",
            tmp_path,
            start="zoo:llava-scenes-eagle",
        )


# Requests that choose the checkpoint, and requests that are reported


def test_reported_requests_did_not_choose_the_checkpoint(tmp_path, monkeypatch):
    asked = []
    measured = recipe.measured

    def noted(target, requests, *rest):
        asked.append([request.id for request in requests])
        return measured(target, requests, *rest)

    monkeypatch.setattr(recipe, "measured", noted)
    target = Texts(text_model("llama"), build)
    card = train(target, requests(10), SMALL, tmp_path / "state", tmp_path)
    assert card["requests"] == {"learnt": 4, "held_out": 4, "tested": 2}
    development, test = ["4", "5", "6", "7"], ["8", "9"]
    assert asked == [development, development, test]
    asked.clear()
    options = replace(SMALL, tested=0)
    train(target, requests(10), options, tmp_path / "other" / "state", tmp_path / "other")
    assert asked == [["6", "7", "8", "9"]] * 3
    with pytest.raises(OptionError, match="tested=-1"):
        Options(tested=-1)

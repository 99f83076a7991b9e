"""DoLa on synthetic layers: which one is chosen, and the resulting distribution."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch

import mmdecode as mm
from mmdecode import registry
from mmdecode.engine.contracts import BranchOutput
from mmdecode.errors import OptionError
from mmdecode.guide.dola import DoLa, jensen_shannon
from mmdecode.testing.table import call_of
from tests.support.rounded import as_on_cuda
from tests.support.tiny import text_model

V = 6


def context(depth, model=None):
    return call_of([[0]], SimpleNamespace(num_layers=depth, model=model))


@pytest.mark.parametrize("family", ["gemma", "llama"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_layers_of_a_rounded_model_are_those_of_the_float_one(
    family, device, monkeypatch, tmp_path
):
    guide, tied = DoLa((0.0, 1.0)), family == "gemma"
    model = copy.deepcopy(text_model(family, layers=4))
    expected = guide.candidates(registry.adapter_for(model))
    assert expected.start == 2 * tied
    if device == "cuda":
        as_on_cuda(monkeypatch)
    mm.quantize(model)
    assert guide.candidates(registry.adapter_for(model)) == expected
    assert guide.candidates(registry.adapter_for(copy.deepcopy(model))) == expected
    if device == "cpu":
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        assert guide.candidates(registry.adapter_for(again)) == expected


def made(depth, seed=0, nodes=3):
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, nodes, V, generator=draw) * 2
    exits = {i: torch.randn(2, nodes, V, generator=draw) * 2 for i in range(depth)}
    return BranchOutput(logits=logits, early_exit_logits=exits)


def divergence(p, q):
    """By the formula, token by token."""
    total = 0.0
    for a, b in zip(p.softmax(-1).tolist(), q.softmax(-1).tolist(), strict=True):
        middle = (a + b) / 2
        total += a * math.log(a / middle) / 2 + b * math.log(b / middle) / 2
    return total


def test_divergence_is_that_of_jensen_and_shannon():
    main, exit = made(1).logits, made(1).early_exit_logits[0]
    found = jensen_shannon(main.log_softmax(-1), exit.log_softmax(-1))
    expected = [[divergence(main[b, u], exit[b, u]) for u in range(3)] for b in range(2)]
    torch.testing.assert_close(found, torch.tensor(expected))
    apart = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]])
    assert float(jensen_shannon(*apart)) == pytest.approx(math.log(2))
    assert float(jensen_shannon(apart[0], apart[0])) == 0


def test_each_node_takes_the_candidate_that_differs_most():
    guide, scores = DoLa((0.0, 1.0), relative_top=0.2), made(8)
    found = guide.apply(None, context(8), None, {"main": scores})
    chosen = set()
    for row in range(2):
        for node in range(3):
            main = scores.logits[row, node]
            layer = max(
                range(0, 8, 2),
                key=lambda i: divergence(main, scores.early_exit_logits[i][row, node]),
            )
            chosen.add(layer)
            distribution = main.log_softmax(-1) - scores.early_exit_logits[layer][
                row, node
            ].log_softmax(-1)
            kept = main.softmax(-1) >= 0.2 * main.softmax(-1).max()
            torch.testing.assert_close(found[row, node][kept], distribution[kept])
            assert torch.isneginf(found[row, node][~kept]).all()
    assert len(chosen) > 1
    assert torch.isneginf(found).any()


def test_layers_that_agree_leave_what_is_plausible_alike():
    logits = made(1).logits
    scores = BranchOutput(logits=logits, early_exit_logits={4: logits, 6: logits})
    found = DoLa().apply(None, context(8), None, {"main": scores})
    kept = ~torch.isneginf(found)
    assert torch.allclose(found[kept], torch.zeros(()), atol=1e-6)
    assert kept.any(-1).all() and not kept.all()


def test_candidates_are_fractions_of_the_depth():
    untied = SimpleNamespace(num_layers=32, model=None)
    low, high, every = (
        registry.create("guide", f"dola:bucket={name}") for name in ("low", "high", "all")
    )
    assert list(low.candidates(untied)) == list(range(0, 16, 2))
    assert list(high.candidates(untied)) == list(range(16, 32, 2))
    assert list(every.candidates(untied)) == list(range(0, 32, 2))
    assert every.needs(untied).early_exit_logits == set(range(0, 32, 2))
    matrix = SimpleNamespace(weight=object())
    tied = SimpleNamespace(
        get_output_embeddings=lambda: matrix, get_input_embeddings=lambda: matrix
    )
    assert list(low.candidates(SimpleNamespace(num_layers=32, model=tied))) == list(range(2, 16, 2))
    assert list(low.candidates(SimpleNamespace(num_layers=1, model=None))) == [0]


def test_options():
    assert DoLa(alpha=0, relative_top=0).neutral and not DoLa().neutral
    alone, scores = DoLa(alpha=0, relative_top=0.5), made(1)
    assert not alone.neutral and not alone.needs(None).early_exit_logits
    found = alone.apply(None, None, None, {"main": scores})
    kept = scores.logits.softmax(-1) >= 0.5 * scores.logits.softmax(-1).amax(-1, keepdim=True)
    assert torch.equal(found, scores.logits.masked_fill(~kept, -torch.inf))
    assert DoLa().total == 0
    for options in ({"alpha": -1}, {"relative_top": 2}, {"layers": (0.5, 0.2)}):
        with pytest.raises(OptionError):
            DoLa(**options)
    with pytest.raises(OptionError, match="low, high, all"):
        registry.create("guide", "dola:bucket=middle")

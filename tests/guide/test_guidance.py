"""Guidance of image tokens: its formula, where it ends, and that drafts change nothing."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.jacobi import Jacobi
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.guide.guidance import Guidance
from mmdecode.models import llamagen
from mmdecode.testing import check_guide, drafts
from mmdecode.testing.checks import (
    SEED,
    assert_distribution,
    assert_lossless,
    run_rows,
)
from mmdecode.testing.table import NOTHING, Table
from tests.support.tiny import prompts, text_model
from tests.support.tiny_vlm import vision_inputs, vision_model

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "llamagen"
MODEL = Table(5, seed=3)
SMALL = Table(4, seed=11, sharpness=1.5)
OTHER = Table(4, seed=2, sharpness=1.0)
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def formula(model, scale, until=None):
    """Guidance on plain lists of tokens."""

    def distribution(prompt, new):
        c, u = (
            model.target_logits([*prompt, *new]),
            model.target_logits([*prompt, *new], salt=NOTHING),
        )
        return c if until is not None and len(new) > until else u + scale * (c - u)

    return distribution


def at(guide, conditional, unconditional):
    """What a guide makes of the distributions of tokens 0, 1, ..., ``(B, n, V)``."""
    rows, size, _ = conditional.shape
    call = Call.of(torch.zeros(rows, 0, dtype=torch.long))
    proposal = Proposal(tokens=torch.ones(rows, size - 1).long(), kind="deterministic")
    scores = {
        "main": BranchOutput(logits=conditional),
        "unconditional": BranchOutput(logits=unconditional),
    }
    return guide.apply(None, call, proposal, scores)


# The formula


def test_golden_distributions_are_those_of_the_published_code():
    io = load_file(GOLDEN / "c2i_io.safetensors")
    scale = json.loads((GOLDEN / "config.json").read_text())["c2i"]["cases"]["cfg_scale"]
    rows = io["cached.out.logits_rows"].chunk(2)
    torch.testing.assert_close(at(Guidance(scale), *rows), io["cached.out.guided"], **CLOSE)
    assert (at(Guidance(scale - 1), *rows) - io["cached.out.guided"]).abs().max() > 0.1


def test_the_golden_interval_ends_where_the_published_code_ends_it():
    io, cases = (
        load_file(GOLDEN / "c2i_io.safetensors"),
        json.loads((GOLDEN / "config.json").read_text())["c2i"]["cases"],
    )
    model = llamagen.load_published(GOLDEN / "gpt_c2i_model.pt", grid_size=4, num_heads=3)
    codes, classes = io["greedy_cfg_interval.out.codes"], io["full.in.cond"]
    with torch.no_grad():
        given = model.code_logits(classes, codes)
        nothing = model.code_logits(model.unconditional(classes), codes)
    expected = io["greedy_cfg_interval.out.guided"]
    until = cases["cfg_interval"] + 1
    found = at(Guidance(cases["cfg_scale"], until), given, nothing)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert torch.equal(found[:, until + 1 :], given[:, until + 1 :])
    for wrong in (until - 1, until + 1):
        found = at(Guidance(cases["cfg_scale"], wrong), given, nothing)
        assert (found - expected).abs().max() > 0.1


def test_a_token_that_either_branch_rules_out_is_out():
    c, u = torch.tensor([[[0.0, -torch.inf, 1.0]]]), torch.tensor([[[0.0, -torch.inf, -torch.inf]]])
    assert at(Guidance(2.0), c, u).isinf().tolist() == [[[False, True, True]]]


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("until", [None, 0, 4])
def test_drafted_tokens_are_those_of_the_formula(until, do_sample):
    distribution = formula(MODEL, 2.5, until)
    for draft in (None, drafts.RandomTrees(), Jacobi(5), Assistant(MODEL, 3)):
        decoder = Decoder(draft, Guidance(2.5, until), seed=SEED, draft_guided=True)
        rows = assert_lossless(decoder, MODEL, distribution, do_sample=do_sample)
    assert rows != run_rows(
        Decoder(seed=SEED), MODEL, ([1, 2, 3], [0, 0, 2, 1, 4, 2], [3], [2, 2]), do_sample=do_sample
    )


def test_its_distribution_is_a_function_of_each_nodes_prefix():
    check_guide(lambda: Guidance(2.0, until=3), lambda: Guidance(1.0))


# A drafting model that is guided too


def test_a_guided_drafter_keeps_the_enumerated_distribution():
    guide = Guidance(2.0, until=1)
    make = lambda: Decoder(Assistant(OTHER, 2, guide), guide, "rejection")  # noqa: E731
    assert_distribution(make, SMALL, formula(SMALL, 2.0, 1), samples=20_000)


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_the_model_itself_drafts_what_it_accepts_if_it_is_guided_alike(rule):
    rates = {}
    for name, own in (("alike", Guidance(4.0, 30)), ("other", Guidance(4.0, 9)), ("none", None)):
        drafter = Assistant(MODEL, 3, own)
        decoder = Decoder(drafter, Guidance(4.0, 30), rule, SEED, draft_guided=False)
        run_rows(decoder, MODEL, [[1, 2, 3], [2, 0]], do_sample=True, max_new_tokens=40)
        rates[name] = decoder.stats.acceptance_rate
    assert rates["alike"] == 1.0 > max(rates["other"], rates["none"])


# Settings


def test_a_scale_of_one_runs_no_second_branch():
    guide = registry.create("guide", "guidance:scale=1")
    assert guide.neutral and not list(guide.branches)
    assert not Guidance(0.0).neutral and registry.create("guide", "guidance:scale=3").scale == 3
    assert Guidance(4.0).total == 1.0
    rows = [
        run_rows(Decoder(guide=g, seed=SEED), MODEL, [[1, 2]], do_sample=True)
        for g in (None, guide)
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("options", [{"scale": -1}, {"scale": "x"}, {"scale": 2, "until": -1}])
def test_what_is_no_strength_is_refused(options):
    with pytest.raises(OptionError):
        Guidance(**options)


def test_models_that_write_text_are_refused():
    decoder = Decoder(guide=Guidance(2.0))
    with pytest.raises(IncompatibleError, match="'unconditional'"):
        text_model("llama").generate(**prompts(2), custom_generate=decoder, max_new_tokens=2)
    with pytest.raises(IncompatibleError, match="there is no such transform"):
        vision_model("llava").generate(
            **vision_inputs("llava"), custom_generate=decoder, max_new_tokens=2
        )

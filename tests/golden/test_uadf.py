"""Uncertainty-aware dynamic fusion against what the reference's own code computed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmdecode.asr.correction.calibration import confidence, temperature_for
from mmdecode.engine.adapter import BranchSpec
from mmdecode.guide.fusion import ACOUSTIC
from mmdecode.guide.uadf import UADF
from tests.support.target_logits import distribution

DATA = Path(__file__).parents[1] / "data" / "golden" / "uadf"
FOUND = json.loads((DATA / "manifest.json").read_text())
VALUES = load_file(DATA / "expected.safetensors")
BRANCH = BranchSpec(name=ACOUSTIC)


@pytest.mark.parametrize("run", FOUND["runs"], ids=lambda r: f"{r['tau_asr']}-{r['tau_llm']}")
def test_fused_scores_ids_and_weights_are_the_reference_s(run):
    guide = UADF(
        BRANCH,
        beta=FOUND["beta"],
        main_temperature=run["tau_llm"],
        acoustic_temperature=run["tau_asr"],
    )
    main, acoustic = VALUES["logits.llm"], VALUES["logits.asr"]
    found = distribution(guide, main, acoustic)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(len(main)))
    weight = guide.weight((main / run["tau_llm"]).log_softmax(-1))
    torch.testing.assert_close(weight[:, 0], torch.tensor(run["weight_own_recompute"]))
    name = f"fused.tau_asr_{run['tau_asr']}.tau_llm_{run['tau_llm']}"
    torch.testing.assert_close(found.exp() * (1 + weight), VALUES[name], atol=1e-6, rtol=0.0)
    assert found.argmax(-1).tolist() == run["ids"]
    assert main.argmax(-1).tolist() == run["llm_greedy"] != run["ids"]


def test_a_probability_that_underflows_makes_no_score_nan():
    main = VALUES["underflow.logits.llm"][None]
    assert VALUES["underflow.fused_as_reference"].isnan().any()
    assert (main.softmax(-1) == 0).any()
    found = distribution(UADF(BRANCH), main, VALUES["logits.asr"][:1])
    assert not found.isnan().any()
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(1))


@pytest.mark.parametrize("case", FOUND["calibration"], ids=lambda c: str(c["case"]))
def test_temperatures_of_the_calibration_have_the_wanted_confidence(case):
    logits = VALUES[f"calibration{case['case']}.logits"][None]
    wanted = case["accuracy_percent"] / 100
    temperature = temperature_for(logits, wanted)
    if "temperature" in case:
        assert temperature == pytest.approx(case["temperature"], abs=1e-3)
    # where the reference did not converge the confidence is right all the same
    assert confidence(logits, temperature) == pytest.approx(wanted, abs=1e-4)

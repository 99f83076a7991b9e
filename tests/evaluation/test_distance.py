"""The distance of a rounded model to the float model that it was made of."""

import copy

import pytest
import torch

import mmdecode as mm
from mmdecode.errors import InputError
from mmdecode.evaluation.audit.plain import Case, Plain, distance
from tests.support.tiny import prompts, text_model


def case():
    ids = prompts(1)["input_ids"]
    return Case(name="one", inputs={"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def test_a_model_is_at_no_distance_from_itself_and_at_some_from_its_rounded_form():
    model = text_model("llama")
    plain, cases = Plain(model, max_new_tokens=8), [case()]
    none = distance(plain, plain, cases, cases)
    assert (none.tokens, none.same_choice) == (8, 1.0)
    assert none.largest < 1e-4

    rounded = mm.quantize(copy.deepcopy(model))
    some = distance(Plain(rounded, max_new_tokens=8), plain, cases, cases)
    assert 0.01 < some.mean < some.largest < 10
    assert "of 8 choices are the same" in some.words

    ids = rounded.generate(**case().inputs, max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        logits = [one(ids[:, :-1]).logits[0, -8:].log_softmax(-1) for one in (rounded, model)]
    apart = (logits[0] - logits[1]).abs()
    assert some.largest == pytest.approx(float(apart.max()), rel=1e-3)
    assert some.mean == pytest.approx(float(apart.mean()), rel=1e-3)
    same = (logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean()
    assert some.same_choice == pytest.approx(float(same))


def test_without_an_input_there_is_nothing_to_compare():
    plain = Plain(text_model("llama"))
    with pytest.raises(InputError, match="at least one input"):
        distance(plain, plain, [], [])

"""Masks of the chunk-causal encoder, entry by entry."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmdecode.models import causal_whisper
from mmdecode.models.causal_whisper import block_mask

DATA = Path(__file__).parents[1] / "data" / "golden" / "carelesswhisper"
CASES = [tuple(one.values()) for one in json.loads((DATA / "manifest.json").read_text())["cases"]]


def table(frames, chunk, extra):
    return load_file(DATA / "masks.safetensors")[f"visible.n{frames}.g{chunk}.e{extra}"]


@pytest.mark.parametrize(("frames", "chunk", "extra"), CASES)
def test_masks_are_those_of_the_formula(frames, chunk, extra):
    assert torch.equal(block_mask(frames, chunk, extra), table(frames, chunk, extra))


MISTAKES = {
    "blocks of the start are not extended": lambda n, g, e: block_mask(n, g),
    "the own block is not complete": lambda n, g, e: block_mask(n, g, e).tril(),
    "the next block is seen": lambda n, g, e: block_mask(n + g, g, e)[g:, :n][:n],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_mask_is_found(mistake):
    made = [MISTAKES[mistake](*case) for case in CASES]
    assert any(not torch.equal(one, table(*case)) for one, case in zip(made, CASES, strict=True))


def test_all_tables_are_compared():
    assert len(load_file(DATA / "masks.safetensors")) == len(CASES) > 4
    assert causal_whisper.block_mask is block_mask

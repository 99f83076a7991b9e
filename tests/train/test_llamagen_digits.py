import json
from dataclasses import replace

import pytest
import torch

from mmdecode.models.llamagen import LlamaGenForImageGeneration
from mmdecode.runs.files import MAKER
from mmdecode.train.loop import FitOptions
from mmdecode.train.zoo.llamagen_digits import LEVELS, LlamaGenDigitsOptions, run, shift, split
from mmdecode.zoo.scenes import digit_scans

OPTIONS = LlamaGenDigitsOptions(
    width=24,
    layers=1,
    heads=2,
    inner=32,
    fit=FitOptions(steps=4, batch=8, every=2),
    num_sampled=10,
)


def test_scans_are_grey_levels_and_no_scan_is_in_two_parts():
    parts = split()
    assert [len(part.codes) for part in parts] == [1437, 180, 180]
    assert sum(len(part.codes) for part in parts) == len(digit_scans()[0])
    rows = [{tuple(row) for row in part.codes.tolist()} for part in parts]
    assert not (rows[0] & rows[1] or rows[0] & rows[2] or rows[1] & rows[2])
    assert parts[0].codes.max() == LEVELS - 1 == 16
    assert all(part.classes.unique().tolist() == list(range(10)) for part in parts)


def test_shifts_move_by_a_pixel_at_most_and_leave_the_rest_alone():
    scans = torch.arange(1, 65).repeat(400, 1)
    moved = shift(scans, 0.5, torch.Generator().manual_seed(0)).view(-1, 8, 8)
    corners = moved[:, 4, 4] - 37  # where the pixel of row 4 and column 4 came from
    assert set(corners.tolist()) == {d + 8 * r for d in (-1, 0, 1) for r in (-1, 0, 1)}
    assert 0.4 < float((corners == 0).float().mean()) < 0.7
    right = moved[corners == -1][0]
    assert right[:, 0].tolist() == [0] * 8
    assert torch.equal(right[:, 1:], scans[0].view(8, 8)[:, :-1])
    assert torch.equal(shift(scans, 0.0, torch.Generator()), scans)


def test_the_recipe_makes_a_model_and_its_card(tmp_path):
    found = run(OPTIONS, tmp_path / "work", tmp_path / "out")
    model = LlamaGenForImageGeneration.from_pretrained(tmp_path / "out")
    assert model.config.grey
    assert model.config.vocab_size == LEVELS
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert card == {"made_by": MAKER} | {k: v for k, v in found.items() if k != "folder"}
    assert set(card["bits_per_code"]) == {"training", "development", "test"}
    again = run(OPTIONS, tmp_path / "work", tmp_path / "out")
    assert again == found


def test_a_model_that_learns_by_heart_is_stopped(tmp_path, monkeypatch):
    from mmdecode.train.zoo import image_codes

    looks = iter([4.0, 3.0, 3.5, 3.6, 3.7, 0.0])
    monkeypatch.setattr(image_codes, "bits_per_code", lambda *a: next(looks, 1.0))
    fit = replace(OPTIONS.fit, steps=100, patience=3)
    card = run(replace(OPTIONS, fit=fit), tmp_path / "work", tmp_path / "out")
    assert card["steps"] == 4
    log = (tmp_path / "work" / "log.jsonl").read_text().splitlines()
    assert len(log) == 5
    best = torch.load(tmp_path / "work" / "best.pt", weights_only=True)
    last = torch.load(tmp_path / "work" / "state.pt", weights_only=True)["modules"]
    assert not torch.equal(best["lm_head.weight"], last["lm_head.weight"])
    shipped = LlamaGenForImageGeneration.from_pretrained(tmp_path / "out").state_dict()
    assert float((shipped["lm_head.weight"] - best["lm_head.weight"]).abs().max()) < 1e-3
    assert card["minutes"] == pytest.approx(0, abs=1)

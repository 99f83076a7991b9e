"""Positions of codes and forced tokens among the generated tokens."""

import pytest
import torch

from mmdecode.errors import OptionError, ShapeError
from mmdecode.models.image_layout import Layout

IDS = torch.tensor([7, 3, 9])
PLAIN = Layout(rows=2, columns=3, ids=IDS)
LINES = Layout(rows=2, columns=3, ids=IDS, newline=1, tail=(4, 5))


def values_of(layout, ask):
    return ask(torch.arange(layout.length)).tolist()


def test_a_plain_grid_forces_nothing():
    assert PLAIN.length == 6 and not PLAIN.has_forced
    assert values_of(PLAIN, PLAIN.forced) == [-1] * 6
    assert values_of(PLAIN, PLAIN.left) == [-1, 0, 1, -1, 3, 4]
    assert values_of(PLAIN, PLAIN.above) == [-1, -1, -1, 0, 1, 2]


def test_newlines_and_the_tail_are_forced_and_have_no_neighbours():
    assert LINES.length == 10 and LINES.has_forced and LINES.stride == 4
    assert values_of(LINES, LINES.forced) == [-1, -1, -1, 1, -1, -1, -1, 1, 4, 5]
    assert values_of(LINES, LINES.left) == [-1, 0, 1, -1, -1, 4, 5, -1, -1, -1]
    assert values_of(LINES, LINES.above) == [-1, -1, -1, -1, 0, 1, 2, -1, -1, -1]
    assert int(LINES.forced(torch.tensor(30))) == 5  # after the end, where a window may reach


def test_the_grammar_leaves_codes_or_the_forced_token():
    allowed = LINES.allowed(torch.arange(10)[None], 12)
    assert allowed.shape == (1, 10, 12)
    left = [row.nonzero()[:, 0].tolist() for row in allowed[0]]
    assert left == [[3, 7, 9]] * 3 + [[1]] + [[3, 7, 9]] * 3 + [[1], [4], [5]]
    assert PLAIN.allowed(torch.tensor([0, 5]), 12).sum(-1).tolist() == [3, 3]


def test_tokens_become_codes():
    tokens = torch.tensor([[7, 3, 9, 1, 9, 9, 7, 1, 4, 5]])
    assert LINES.codes(tokens).tolist() == [[[0, 1, 2], [2, 2, 0]]]
    assert PLAIN.codes(tokens[:, [0, 1, 2, 4, 5, 6]]).tolist() == [[[0, 1, 2], [2, 2, 0]]]


def test_what_is_no_image_is_refused():
    with pytest.raises(ShapeError, match=r"3 tokens .* 2 x 3 .* has 10"):
        LINES.codes(torch.tensor([[7, 3, 9]]))
    with pytest.raises(ShapeError, match="no image code"):
        PLAIN.codes(torch.tensor([[7, 3, 9, 8, 7, 7]]))
    with pytest.raises(ShapeError, match="no image code"):
        PLAIN.codes(torch.tensor([[7, 3, 9, 700, 7, 7]]))
    with pytest.raises(OptionError, match="0 x 3"):
        Layout(rows=0, columns=3, ids=IDS)

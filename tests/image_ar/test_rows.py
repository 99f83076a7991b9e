"""ZipAR: plain decoding where the window is a row, else what its schedule and mask say it is."""

import itertools

import pytest
import torch
from torch import nn

from mmdecode import registry
from mmdecode.adapters.images.base import Preset
from mmdecode.engine.adapter import Prompt
from mmdecode.engine.noise import Noise, Role, request_key
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.guide.guidance import Guidance
from mmdecode.image_ar import rows as rows_loop
from mmdecode.image_ar.rows import ZipAR, raster_mask, schedule
from mmdecode.models.image_layout import Layout
from mmdecode.testing.checks import LEVEL, p_value
from mmdecode.testing.table import Table, TableAdapter
from tests.support.seams import edited
from tests.support.tiny_images import (
    MODELS,
    SAMPLING,
    SEED,
    conditions,
    draw,
    image_model,
    scale_of,
)

BATCH = (0, 1, 2)


def zipped(family, window, rows=BATCH, do_sample=True, guidance=None):
    """Tokens by rows side by side, of images named as those of `draw`."""
    options = conditions(family, rows)
    grid = {"grid": options.pop("grid")} if "grid" in options else {}
    adapter = registry.image_adapter_for(image_model(family), **grid)
    guidance = scale_of(family) if guidance is None else guidance
    loop = ZipAR(adapter, window, guidance, SAMPLING)
    names = [f"image {row}" for row in rows]
    return loop.generate(do_sample=do_sample, seed=SEED, request=names, **options)


# A window of a row


@pytest.mark.one_in(2)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", MODELS)
def test_a_window_of_a_whole_row_gives_the_image_of_plain_decoding(family, do_sample):
    plain = draw(family, do_sample=do_sample)
    for window in (4, 9):
        found = zipped(family, window, do_sample=do_sample)
        assert torch.equal(found.tokens, plain)
        assert found.passes == found.codes[0].numel()
    if do_sample:
        assert not torch.equal(zipped(family, 1).tokens, plain)


def test_guidance_may_end_before_the_image():
    guide = Guidance(2.5, until=6)
    plain = draw("llamagen", do_sample=True, guidance=guide)
    assert torch.equal(zipped("llamagen", 4, guidance=guide).tokens, plain)
    assert not torch.equal(zipped("llamagen", 4).tokens, plain)


@pytest.mark.parametrize("family", ["llamagen_captions", "emu3"])
def test_an_image_does_not_depend_on_its_batch(family):
    together = zipped(family, 2).tokens
    alone = [zipped(family, 2, rows=(row,)).tokens[0] for row in BATCH]
    assert torch.equal(together, torch.stack(alone))


# The schedule


@pytest.mark.parametrize("newline", [None, 7])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 5), (4, 1), (3, 5), (5, 3)])
def test_each_cell_is_decided_once_and_as_soon_as_it_may_be(height, width, newline):
    layout = Layout(height, width, torch.arange(7), newline=newline)
    for window in (1, 2, 3, 5, 8):
        ahead = [0] * height  # cells that each row has
        waves = []
        while ahead[-1] < width:
            free = [
                row
                for row in range(height)
                if ahead[row] < width
                and (row == 0 or ahead[row - 1] >= min(ahead[row] + window, width))
            ]
            waves.append([row * layout.stride + ahead[row] for row in free])
            for row in free:
                ahead[row] += 1
        found = schedule(layout, window)
        assert found == waves
        assert len(found) == width + (height - 1) * min(window, width)
        assert sorted(itertools.chain(*found)) == layout.cell_indices().flatten().tolist()


def test_the_pass_of_each_cell_and_the_tokens_of_each_pass_are_reported():
    added = []
    adapter = registry.image_adapter_for(image_model("llamagen"))
    output = ZipAR(adapter, 2, 1.0).generate(classes=[1, 5], seed=0, on_tokens=added.append)
    assert output.commits.tolist() == [[2 * i + j for j in range(4)] for i in range(4)]
    assert output.passes == len(added) == 10 and sum(added) == 32
    assert torch.equal(output.codes.flatten(1), output.tokens)


# A window of less than a row, by one dense pass over all that was read


def dense(generated, label, window):
    """Logits that decide each place ``(16, V)``, of one image of the LlamaGen model."""
    model, tokens = image_model("llamagen"), generated.tolist()
    side, lead = 4, min(window, 4)
    came = [(cell // side) * lead + cell % side for cell in range(side * side)]
    inputs = []  # pass, place, token, whether it stands there
    for step in range(1, max(came) + 1):
        for cell in range(side * side):
            if came[cell] == step - 1:
                inputs.append((step, cell, tokens[cell], True))
            follower = cell + 1
            starts = follower < len(came) and follower % side == 0 and came[follower] == step
            if starts and came[cell] >= step:
                row = [p for p in range(cell - side + 1, cell) if came[p] < step]
                inputs.append((step, cell, tokens[max(row)], False))
    steps, indices, read, real = (torch.tensor(part) for part in zip(*inputs, strict=True))
    seen = (steps <= steps[:, None]) & (indices <= indices[:, None]) & real
    seen |= torch.eye(len(steps), dtype=torch.bool)
    mask = nn.functional.pad(seen, (1, 0), value=True)
    mask = nn.functional.pad(mask, (0, 0, 1, 0))
    mask[0, 0] = True
    embeds = torch.cat(
        [model.embed_condition(torch.tensor([label])), model.model.embed_tokens(read)[None]], 1
    )
    positions = torch.cat([torch.zeros(1, dtype=torch.long), indices + 1])[None]
    states = model.model(
        inputs_embeds=embeds, attention_mask=mask[None, None], position_ids=positions
    )
    logits = model.lm_head(states.last_hidden_state)[0]
    index = [0]
    for cell in range(1, side * side):
        [found] = ((steps == came[cell]) & (indices == cell - 1)).nonzero().flatten().tolist()
        index.append(found + 1)
    return logits[index]


@torch.no_grad()
def agrees_with_the_dense_pass(window, do_sample):
    found = zipped("llamagen", window, do_sample=do_sample, guidance=1.0).tokens
    labels = conditions("llamagen")["classes"]
    agree = []
    for row, label in enumerate(labels):
        logits = dense(found[row], label, window)
        if do_sample:
            noise = Noise.of(SEED, [request_key(f"image {row}", 0)])
            indices = torch.arange(16)[None]
            expected = noise.sample(SAMPLING.warp(logits)[None], indices, Role.TARGET)[0]
        else:
            expected = logits.argmax(-1)
        agree.append(torch.equal(expected, found[row]))
    return all(agree)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_tokens_are_those_of_a_dense_pass_over_what_was_read(window, do_sample):
    assert agrees_with_the_dense_pass(window, do_sample)


def changed_mask(old, new):
    return "raster_mask", edited(raster_mask, old, new)


def changed_loop(owner, method, old, new):
    changed = type("Mutant", (owner,), {method: edited(getattr(owner, method), old, new)})
    return owner.__name__, changed


FRONTIER = rows_loop.Frontier
MUTANTS = {
    "empty slots are seen": lambda: changed_mask(
        "seen |= offset", "seen |= (offset >= len(held))[:, None]\n    seen |= offset"
    ),
    "time decides, not raster order": lambda: changed_mask(
        "(position[:, None] <= at[:, None])", "(at[:, None] >= 0)"
    ),
    "stand-ins stay": lambda: changed_loop(FRONTIER, "feed", "torch.where(stays, at, -1)", "at"),
    "a stand-in does not see itself": lambda: changed_mask(
        "seen |= offset[:, None] == own[:, None]", "pass"
    ),
    "positions count slots": lambda: changed_loop(
        FRONTIER,
        "feed",
        "positions = (self.ends - self.pads)[:, None] + at",
        "positions = (self.cache.start - self.pads)[:, None] + torch.arange(len(indices))",
    ),
    "positions are one too far": lambda: changed_loop(
        FRONTIER, "feed", "self.pads)[:, None] + at", "self.pads)[:, None] + at + 1"
    ),
    "ends of rows are not read": lambda: changed_loop(
        ZipAR, "generate", "*waves[step - 1], *(", "*("
    ),
    "the first code above stands in": lambda: changed_loop(
        ZipAR, "generate", "max(k for k in known if k < p)", "p // 4 * 4"
    ),
    "noise counts passes": lambda: changed_loop(
        ZipAR, "_decided", "indices, Role", "indices * 0 + len(cells), Role"
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_loop_is_found(name, monkeypatch):
    target, mutant = MUTANTS[name]()
    monkeypatch.setattr(rows_loop, target, mutant)
    monkeypatch.setitem(globals(), target, mutant)
    assert not all(agrees_with_the_dense_pass(window, True) for window in (2, 3, 1))


# Markov fields, whose distribution is known exactly


class Field(nn.Module):
    """Logits of a cell by its neighbours at given offsets ``(rows, columns)``; V = 2."""

    dtype = torch.float64

    def __init__(self, *offsets):
        super().__init__()
        self.offsets = offsets
        generator = torch.Generator().manual_seed(4)
        size = [3] * len(offsets) + [2]  # a neighbour is none, 0 or 1
        self.register_buffer("table", 2 * torch.randn(*size, generator=generator).double())
        self.device = self.table.device


class FieldAdapter(TableAdapter):
    """Finds each neighbour by the position it was read at, among what the mask shows."""

    preset = Preset()
    num_layers = 1

    def __init__(self, model, height, width):
        self.model, self.vocab = model, 2
        self.layout = Layout(height, width, torch.arange(2))

    def condition(self, count):
        return {"salt": torch.zeros(count, dtype=torch.long)}

    def row_names(self, inputs):
        return [b""] * len(inputs["salt"])

    def prompt(self, call, spec):
        ids = torch.zeros(call.batch, 1, dtype=torch.long)
        return Prompt(ids=ids, mask=ids == 0, inputs=call.request.model_kwargs)

    def forward(self, tokens, mask, positions, past):
        width = self.layout.columns
        key = torch.stack([positions.expand_as(tokens), tokens], -1)[:, None].double()
        keys, _ = past.update(key, key, 0)
        at, held = keys[:, 0, None].long().unbind(-1)  # (B, 1, K)
        cell = positions.expand_as(tokens)  # that the token decides: the prompt decides cell 0
        found = []
        for down, right in self.model.offsets:
            column = cell % width + right
            there = (column >= 0) & (column < width) & (cell // width + down >= 0)
            wanted = cell + down * width + right + 1  # positions are one on from cells
            match = (mask[:, 0] == 0) & (at == wanted[..., None])
            value = (match * (held + 1)).sum(-1).clamp_max(2)
            found.append(torch.where(there, value, 0))
        return torch.stack(found, -1)

    def head(self, hidden):
        return self.model.table[tuple(hidden.unbind(-1))].float()


def follows_its_distribution(field, window, height=2, width=3, count=20_000):
    """Whether images of a field have the joint distribution by enumeration."""
    images = torch.tensor(list(itertools.product(range(2), repeat=height * width)))
    grid = nn.functional.pad(images.view(-1, height, width) + 1, (2, 2, 2, 0))
    around = [
        grid[:, 2 + down : 2 + down + height, 2 + right : 2 + right + width]
        if (down, right) < (0, 0)
        else torch.zeros(len(images), height, width, dtype=torch.long)  # not there yet
        for down, right in field.offsets
    ]
    distributions = field.table.log_softmax(-1)[tuple(around)]  # (images, h, w, 2)
    joint = distributions.gather(-1, images.view(-1, height, width, 1)).sum((1, 2, 3)).exp()
    torch.testing.assert_close(joint.sum(), torch.ones(()).double())
    loop = ZipAR(FieldAdapter(field, height, width), window)
    generated = loop.generate(count=count, seed=1, request=range(count))
    cell = (generated.tokens * 2 ** torch.arange(height * width).flip(0)).sum(1)
    return p_value(torch.bincount(cell, minlength=len(images)), joint) > LEVEL


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_field_of_left_and_upper_neighbours_keeps_its_distribution(window):
    assert follows_its_distribution(Field((0, -1), (-1, 0)), window)
    assert follows_its_distribution(Field((0, -1), (-1, 0)), window, 3, 2)


def test_a_window_covers_what_lies_up_to_the_right():
    field = Field((0, -1), (-1, 0), (-1, 1))
    assert not follows_its_distribution(field, 1)
    assert follows_its_distribution(field, 2)
    assert follows_its_distribution(field, 3)


@pytest.mark.parametrize("name", ["time decides, not raster order", "positions count slots"])
def test_a_field_tells_a_wrong_loop(name, monkeypatch):
    # of the row below nothing may be seen, although some of it came earlier
    field = Field((0, -1), (-1, 0), (1, -2))
    assert follows_its_distribution(field, 1)
    monkeypatch.setattr(rows_loop, *MUTANTS[name]())
    assert not follows_its_distribution(field, 1)


# Refusals


def test_what_cannot_be_decoded_in_rows_is_refused():
    adapter = registry.image_adapter_for(image_model("llamagen"))
    with pytest.raises(OptionError, match=r"window must be 1 or more, got 0.*raster order"):
        ZipAR(adapter, 0)
    with pytest.raises(IncompatibleError, match=r"ZipAR does not fit Table.*no grid"):
        ZipAR(TableAdapter(Table(4)), 2)
    with pytest.raises(OptionError, match="request has 3 keys for 1 images"):
        ZipAR(adapter, 2).generate(classes=[0], request=range(3))
    with pytest.raises(OptionError, match="class 99 does not exist"):
        ZipAR(adapter, 2).generate(classes=[99])
    narrow = FieldAdapter(Field((0, -1)), 2, 3)
    narrow.windows = {"sliding_attention": 4}
    with pytest.raises(IncompatibleError, match=r"ZipAR does not fit Field.*sliding-window"):
        ZipAR(narrow, 2)


def test_guidance_of_a_model_without_an_unconditional_input_is_refused():
    adapter = registry.image_adapter_for(image_model("imagegpt"))
    with pytest.raises(IncompatibleError, match="guidance does not fit ImageGPT"):
        ZipAR(adapter, 2, guidance=2.0).generate(count=1)

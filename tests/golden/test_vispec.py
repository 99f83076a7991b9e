"""ViSpec's drafter against what the reference's own code computed on the same weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from mmdecode.draft import growing
from mmdecode.draft.vispec import ViSpec
from mmdecode.models.feature_drafter import Rows
from mmdecode.models.image_rows import members_of, numbered
from mmdecode.train.drafters.losses import ranking_loss, vispec_loss
from mmdecode.train.drafters.recipes import Unrolled
from tests.golden.given import Given, begin, commit
from tests.golden.test_eagle import assert_tree

DATA = Path(__file__).parents[1] / "data" / "golden" / "vispec"
INPUTS = load_file(DATA / "inputs.safetensors")
EXPECTED = load_file(DATA / "expected.safetensors")
LOSSES = load_file(DATA / "losses.safetensors")
HEAD = load_file(DATA / "target_lm_head.safetensors")["lm_head.weight"]
CLOSE = {"atol": 3e-4, "rtol": 0.0}
CASES = ("one_image", "two_images_equal_gaps", "image_first_after_bos", "no_image")
layouts = pytest.mark.parametrize("layout", ["drafter_llava", "drafter_qwen"])
cases = pytest.mark.parametrize("case", CASES)


def given(layout, case, *shape):
    """A draft, the ids of a prompt, its states, and its embeddings with those of images."""
    total, depth, top_k = shape or (30, 3, 8)
    draft = ViSpec.from_pretrained(DATA / layout, depth=depth + 1, top_k=top_k, nodes=total - 1)
    ids, images = INPUTS[f"{case}.prompt_ids"], INPUTS[f"{case}.image_mask"]
    embeds = draft.drafter.embed_tokens.weight.detach()[ids]
    embeds[images] = INPUTS[f"{case}.image_embeds"]
    return draft, ids, images, INPUTS[f"{case}.target_hidden"], embeds


def rows_of(layout, case):
    """All rows of a prompt and of the token after it, in one pass."""
    draft, ids, images, hidden, embeds = given(layout, case)
    after = draft.drafter.embed_tokens(INPUTS[f"{case}.next_token"]).detach()
    images = F.pad(images, (0, 1))[:, 1:]
    return draft.drafter, Rows(
        embeds=torch.cat([embeds[:, 1:], after], 1),
        features=hidden,
        positions=torch.arange(ids.shape[1])[None],
        kept=torch.ones_like(images),
        images=numbered(images),
    )


def states_of(drafter, rows):
    """Prepared and packed rows, their states, and keys and values."""
    packed, pads = drafter.prepare(rows).packed()
    assert not pads.any()
    length = packed.embeds.shape[1]
    mask = ~torch.ones(length, length, dtype=torch.bool).tril() * torch.finfo(torch.float32).min
    past = Unrolled()
    return packed, drafter(packed, mask[None, None], past), past.held[0]


def spread(packed, states, length):
    """States at the positions of their rows, 0 elsewhere."""
    full = torch.zeros(1, length, states.shape[-1])
    full[:, packed.positions[0]] = states
    return full


@cases
@layouts
@torch.no_grad()
def test_summaries_states_keys_and_the_global_vector_of_a_prompt_match(layout, case):
    drafter, rows = rows_of(layout, case)
    packed, states, (keys, values) = states_of(drafter, rows)
    prefix = f"{layout}.{case}"
    found = {
        "prefill.hidden_full_length": spread(packed, states, rows.embeds.shape[1]),
        "prefill.key": keys,
        "prefill.value": values,
        "prefill.last_logits": states[:, -1] @ HEAD.T,
    }
    made = drafter.imadpt(rows.embeds, members_of(rows.images))[0]
    found |= {f"adaptor_output.image{i}": image for i, image in enumerate(made)}
    for name, value in found.items():
        torch.testing.assert_close(value, EXPECTED[f"{prefix}.{name}"], **CLOSE)
    vector = torch.zeros(1, drafter.width) if packed.carried is None else packed.carried[:, -1]
    torch.testing.assert_close(vector, EXPECTED[f"{prefix}.global_image_vector"], **CLOSE)


@cases
@layouts
@torch.no_grad()
def test_the_second_pass_of_training_matches(layout, case):
    """Its features are the states of the first, shifted by one: the reference's form of it."""
    drafter, rows = rows_of(layout, case)
    length = rows.embeds.shape[1]
    packed, states, _ = states_of(drafter, rows)
    shifted = spread(packed, states, length)[:, :-1]
    again = Rows(**{**vars(rows), "features": torch.cat([rows.features[:, :1], shifted], 1)})
    packed, states, _ = states_of(drafter, again)
    expected = EXPECTED[f"{layout}.{case}.training.second_pass_hidden"]
    torch.testing.assert_close(spread(packed, states, length), expected, **CLOSE)


TIED = {
    ("drafter_qwen", "two_images_equal_gaps", "tree_30_3_8"),
    ("drafter_qwen", "two_images_equal_gaps", "second_cycle"),
}
"""Trees at whose edge a node is as likely as its parent: the reference keeps the node alone."""


@pytest.mark.parametrize("shape", [(30, 3, 8), (12, 2, 4)], ids=str)
@cases
@layouts
@torch.no_grad()
def test_trees_of_two_rounds_match(layout, case, shape, monkeypatch):
    grown = []
    grow = growing.grow
    monkeypatch.setattr(growing, "grow", lambda *a: grown.append(grow(*a)) or grown[-1])
    draft, ids, images, hidden, embeds = given(layout, case, *shape)
    session = begin(draft, Given(HEAD, images), ids, hidden, embeds)

    def assert_drafted(name, order=""):
        proposal = session.propose(40)
        if (layout, case, name) not in TIED:
            assert_tree(proposal, f"{layout}.{case}.{name}{order}", EXPECTED)
            return
        scores = grown[-1].scores[0].sort(descending=True).values
        assert scores[draft.nodes - 1] == scores[draft.nodes]

    commit(session, INPUTS[f"{case}.next_token"], hidden[:, -1:], 0)
    name = "tree_" + "_".join(map(str, shape))
    assert_drafted(name, ".greedy")
    assert_drafted(name, ".sampling")
    if shape != (12, 2, 4):
        return
    commit(session, INPUTS[f"{case}.more_ids"], INPUTS[f"{case}.more_hidden"], 2)
    assert_drafted("second_cycle")
    prefix = f"{layout}.{case}.second_cycle"
    keys = EXPECTED[f"{prefix}.stable_key"]
    torch.testing.assert_close(session.cache.layers[0].keys[:, :, : keys.shape[2]], keys, **CLOSE)
    position = session.positions(session.cache.start[:, None])
    assert position.item() == EXPECTED[f"{prefix}.real_length"].item()


@layouts
@torch.no_grad()
def test_images_with_unlike_gaps_between_them_are_read(layout):
    """The reference fails here: the formulas once more, image by image."""
    case = "two_images_unequal_gaps_no_reference_output"
    drafter, rows = rows_of(layout, case)
    packed, states, _ = states_of(drafter, rows)
    spans = [(rows.images[0] == i).nonzero().flatten() for i in (1, 2)]
    embeds, states_before, positions = [], [], []
    vector = torch.zeros(drafter.width)
    queries = len(drafter.imadpt.q)
    for row in range(rows.embeds.shape[1]):
        inside = next((span for span in spans if row in span), None)
        if inside is None:
            mixed = drafter.img_fc(torch.cat([rows.features[0, row], vector]))
            embeds.append(drafter.fc(torch.cat([rows.embeds[0, row], mixed])))
        else:
            made = drafter.imadpt(rows.embeds[:, inside], torch.ones(1, 1, len(inside)).bool())
            index = row - int(inside[-1]) + queries - 2
            vector = made[0, 0, -1]
            if index < 0:
                continue
            embeds.append(made[0, 0, index])
        states_before.append(rows.features[0, row])
        positions.append(row)
    read = Rows(
        embeds=torch.stack(embeds)[None],
        features=torch.stack(states_before)[None],
        positions=torch.tensor(positions)[None],
        images=torch.ones(1, len(positions), dtype=torch.long),  # all as they are
    )
    mask = (
        torch.finfo(torch.float32).min * ~torch.ones(len(positions), len(positions)).tril().bool()
    )
    expected = drafter(read, mask[None, None], Unrolled())
    assert packed.positions.tolist() == [positions]
    torch.testing.assert_close(states, expected, **CLOSE)


def test_the_losses_match():
    predicted, wanted = (LOSSES[name] @ HEAD.T for name in ("predict", "target"))
    asked = LOSSES["loss_mask"].bool()

    def mean(values):
        return (values * asked).sum() / asked.sum()

    close = {"rtol": 1e-4, "atol": 0.0}
    first = LOSSES["stage1.vloss_ploss_total"]
    distance = F.smooth_l1_loss(LOSSES["predict"], LOSSES["target"], reduction="none").mean(-1)
    surprise = -(wanted.softmax(-1) * predicted.log_softmax(-1)).sum(-1)
    found = mean(distance), mean(surprise + 0.1 * ranking_loss(predicted, wanted))
    total = found[0] + 0.1 * found[1]
    torch.testing.assert_close(torch.stack([*found, total]), first, **close)
    second = mean(vispec_loss(predicted, wanted))
    torch.testing.assert_close(second, LOSSES["stage2.loss"][0], **close)

"""FLASH's drafter against what runs of the reference's code: how it fuses, which state is whose."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from mmdecode.models.feature_drafter import Rows
from mmdecode.models.flash import FlashModel
from mmdecode.train.drafters.recipes import Batch, targets_of

DATA = Path(__file__).parents[1] / "data" / "golden" / "flashsd"
EXPECTED = load_file(DATA / "expected.safetensors")


def test_text_is_fused_as_published():
    weights = torch.load(DATA / "drafter" / "pytorch_model.bin", weights_only=True)
    # the released class has no A, and its keys are four groups whatever its configuration says
    config = json.loads((DATA / "drafter" / "config.json").read_text()) | {"compress_len": 4}
    config |= {"num_key_value_heads": 4}
    weights |= {"A": torch.zeros(4, config["hidden_size"])}
    drafter = FlashModel.from_weights(config, weights, DATA)
    rows = Rows(
        embeds=drafter.embed_tokens(EXPECTED["input_ids"]),
        features=EXPECTED["hidden_states"],
        positions=torch.arange(9).expand(2, -1),
    )
    torch.testing.assert_close(drafter.read(rows), EXPECTED["fc_output"], atol=1e-4, rtol=0.0)


def test_each_state_is_compared_with_the_token_that_the_reference_puts_it_at():
    given, placed = EXPECTED["rearrange.input"], EXPECTED["rearrange.output"]
    _, length, steps, _ = given.shape
    # states that say where they are
    last = torch.arange(length + 1.0)[None, :, None]
    all_of_them = last[..., 0] >= 0
    batch = Batch(
        rows=None,
        ids=last[..., 0].long(),
        last=last,
        words=all_of_them,
        asked=all_of_them,
        adapter=None,
    )
    seen = 0
    for step in range(steps):
        targets = targets_of(batch, last, step)
        for row in range(length - step):
            slots = (placed[0] == given[0, row, step]).all(-1).nonzero().flatten().tolist()
            assert len(slots) == 1
            # slot t of a block is asked for the state of token t + 1
            assert targets.features[0, row].item() == slots[0] - step * length + 1
            seen += 1
    assert seen == sum(range(length - steps + 1, length + 1))

"""Kangaroo: the first layers and an adapter draft as in training, while they are confident."""

import math

import pytest
import torch
from torch import nn

import mmdecode
from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.draft.kangaroo import Kangaroo
from mmdecode.draft.layer_skip import LayerSkip, shallow
from mmdecode.errors import IncompatibleError, InputError, OptionError
from mmdecode.guide.vcd import VCD
from mmdecode.models.feature_drafter import Rows
from mmdecode.models.kangaroo import KangarooModel
from mmdecode.testing import check_draft
from mmdecode.train.drafters.recipes import RECIPES, Options, unrolled
from tests.draft.test_eagle import SIZES, decode, inputs_of, model_of
from tests.draft.test_feature_sampling import batch_of
from tests.support.rounds import rounds_of
from tests.support.tiny import NEW, text_model

FAMILIES = ("llama", "llava", "qwen2_5_vl")


def untrained(family, exit_layer=1):
    """As a training builds it."""
    torch.manual_seed(0)
    adapter = registry.adapter_for(model_of(family))
    return RECIPES["kangaroo"].build(adapter, [], Options(kind="kangaroo", exit_layer=exit_layer))


def random_adapter(family, seed=0):
    torch.manual_seed(seed)
    module = untrained(family)
    for weight in module.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.3)
    return module


def whole(family):
    """After the last layer, with an attention that adds nothing: the model itself."""
    model = model_of(family)
    module = untrained(family)
    module.exit_layer = registry.adapter_for(model).num_layers
    with torch.no_grad():
        module.layers[0].self_attn.o_proj.weight.zero_()
        module.norm.weight.copy_(model.get_decoder().norm.weight)
    module.norm.eps = model.get_decoder().norm.variance_epsilon
    return module


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_after_the_last_layer_everything_is_accepted(family, do_sample):
    expected, _ = decode(family, do_sample=do_sample)
    draft = Kangaroo(whole(family), length=3, confidence_threshold=0.0)
    found, decoder = decode(family, draft, do_sample=do_sample)
    assert found == expected
    assert decoder.stats.accepted == decoder.stats.drafted > 0
    assert decoder.stats.passes == math.ceil((NEW - 1) / 4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("confidence_threshold", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_adapter_changes_no_token(family, do_sample, confidence_threshold):
    expected, _ = decode(family, do_sample=do_sample)
    draft = Kangaroo(random_adapter(family), length=3, confidence_threshold=confidence_threshold)
    found, decoder = decode(family, draft, do_sample=do_sample)
    assert found == expected
    assert decoder.stats.drafted > 0


def test_an_adapter_that_adds_nothing_is_an_early_exit():
    module = untrained("llama")
    with torch.no_grad():
        module.layers[0].self_attn.o_proj.weight.zero_()
        module.norm.weight.copy_(model_of("llama").get_decoder().norm.weight)
    module.norm.eps = model_of("llama").get_decoder().norm.variance_epsilon
    traces = [
        decode("llama", draft, trace=True)[1].trace
        for draft in (
            Kangaroo(module, length=3, confidence_threshold=0.0),
            LayerSkip(exit_layer=1, length=3),
        )
    ]
    assert traces[0] == traces[1]


@torch.no_grad()
def distribution_of_training(module, ids):
    """What the adapter says after each token, as a training has it: one pass over all."""
    model = model_of("llama")
    ids = torch.tensor([ids])
    states = model(ids, output_hidden_states=True).hidden_states[module.exit_layer]
    rows = Rows(embeds=states, features=states, positions=torch.arange(ids.shape[1])[None])
    (made,) = unrolled(module, rows, 1)
    return module.logits(made, registry.adapter_for(model))[0].softmax(-1)


@pytest.mark.parametrize("confidence_threshold", [0.0, 0.2])
def test_a_chain_is_what_training_says_and_ends_after_an_unsure_token(confidence_threshold):
    """In a batch of unlike rows: so a row also drafts what it drafts alone."""
    module, inputs, lengths = random_adapter("llama"), inputs_of("llama"), set()
    decoder = Decoder(Kangaroo(module, length=4, confidence_threshold=confidence_threshold), seed=7)
    call = lambda decoder: mmdecode.generate(  # noqa: E731
        model_of("llama"), decoder=decoder, **inputs, max_new_tokens=NEW, do_sample=False
    )
    for row, rounds in enumerate(rounds_of(decoder, call)):
        prompt = inputs["input_ids"][row][inputs["attention_mask"][row] > 0].tolist()
        for written, drafted in rounds:
            distribution = distribution_of_training(module, [*prompt, *written, *drafted])
            distribution = distribution[len(prompt) + len(written) - 1 :]
            assert drafted == distribution.argmax(-1)[: len(drafted)].tolist()
            unsure = (distribution.amax(-1) < confidence_threshold).tolist()[: len(drafted)]
            if len(written) + 4 < NEW:
                assert True not in unsure[:-1]
                assert len(drafted) == 4 or unsure[-1]
                lengths.add(len(drafted))
    assert (lengths == {4}) == (not confidence_threshold) and 4 in lengths


@torch.no_grad()
def test_a_row_is_asked_for_the_distribution_after_its_own_token():
    module, batch = random_adapter("llama"), batch_of()
    drafted = module.logits(unrolled(module, batch.rows, 1)[0], batch.adapter).log_softmax(-1)
    distribution, losses = batch.logits().softmax(-1), []
    for row, token in batch.asked[:, 1:].nonzero().tolist():  # what the row before it is to say
        losses.append(-(distribution[row, token] * drafted[row, token]).sum())
    found = RECIPES["kangaroo"].loss(module, batch, Options(kind="kangaroo"), torch.Generator())
    torch.testing.assert_close(found, torch.stack(losses).mean())


def test_positions_turn_in_training_as_in_the_target():
    model = model_of("qwen2_5_vl")
    positions = torch.tensor([[0, 1, 1, 1, 3], [0, 1, 2, 1, 3], [0, 1, 1, 2, 3]])[:, None]
    expected = model.get_decoder().rotary_emb(torch.zeros(1, 5, 4), positions)
    found = untrained("qwen2_5_vl").rotary(positions.transpose(0, 1), torch.float32)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
def test_guided_decoding_is_drafted_as_any(do_sample):
    expected, _ = decode("llava", guide=VCD(), do_sample=do_sample)
    draft = Kangaroo(random_adapter("llava"), length=3, confidence_threshold=0.0)
    found, decoder = decode("llava", draft, VCD(), do_sample=do_sample)
    assert found == expected
    assert decoder.stats.drafted > 0


def table_draft(vocabulary):
    """For a table model, which has no head for an adapter: its first layer alone."""

    class First(Kangaroo):
        def _view(self, adapter, own):
            return shallow(adapter, [0])

    sizes = {"hidden_size": 4, "target_hidden_size": 1, "num_attention_heads": 2}
    module = KangarooModel({**sizes, "vocab_size": vocabulary, "exit_layer": 1})
    return First(module, length=3, confidence_threshold=0.4)


def test_it_passes_the_public_check():
    check_draft(lambda: table_draft(5))


def test_the_model_is_left_as_it_was():
    model = model_of("llama")
    before = [id(module) for module in model.modules()]
    decode("llama", Kangaroo(random_adapter("llama")))
    assert [id(module) for module in model.modules()] == before


# What does not fit, and checkpoints


def test_what_does_not_fit_is_refused():
    with pytest.raises(IncompatibleError, match=r"layer 3.*2 layers"):
        decode("llama", Kangaroo(KangarooModel({**SIZES, "exit_layer": 3})))
    with pytest.raises(IncompatibleError, match="depth in layers of 9"):
        decode("llama", Kangaroo(KangarooModel({**SIZES, "target_num_layers": 9})))
    mistral = text_model("mistral")
    with pytest.raises(IncompatibleError, match="layer_skip"):
        decoder = Decoder(Kangaroo(KangarooModel({**SIZES, "exit_layer": 1})))
        mmdecode.generate(mistral, decoder=decoder, **inputs_of("llama"), max_new_tokens=4)
    with pytest.raises(IncompatibleError, match="layer_skip"):  # before it is trained, too
        options = Options(kind="kangaroo", exit_layer=1)
        RECIPES["kangaroo"].build(registry.adapter_for(mistral), [], options)
    for options in ({"confidence_threshold": 1.5}, {"length": -1}):
        with pytest.raises(OptionError):
            Kangaroo(KangarooModel(SIZES), **options)
    adapter = registry.adapter_for(model_of("llama"))
    for options in ({"exit_layer": 2}, {"exit_layer": 1, "passes": 2}):
        with pytest.raises(OptionError):
            RECIPES["kangaroo"].build(adapter, [], Options(kind="kangaroo", **options))


def test_a_saved_adapter_is_the_same_and_is_made_by_a_string(tmp_path):
    module = random_adapter("llama")
    for parameter in module.parameters():
        parameter.data = parameter.data.half().float()
    module.save_pretrained(tmp_path)
    draft = registry.create("draft", f"kangaroo:path={tmp_path},length=3,confidence_threshold=0.3")
    assert (draft.length, draft.confidence_threshold, draft.exit_layer) == (3, 0.3, 1)
    found, expected = draft.drafter.state_dict(), module.state_dict()
    assert {"layers.0.self_attn.q_proj.weight", "norm.weight"} <= {*found}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    text_model("llama").save_pretrained(tmp_path / "target")
    with pytest.raises(InputError):
        Kangaroo.from_pretrained(tmp_path / "target")

"""Drafters that read images as a few rows: ViSpec, DREAM, FLASH."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mmdecode import registry
from mmdecode.draft import features, growing
from mmdecode.draft.dream import Dream, DreamSession
from mmdecode.draft.eagle import Eagle
from mmdecode.draft.features import FeatureSession
from mmdecode.draft.flash import Flash
from mmdecode.draft.vispec import ViSpec
from mmdecode.engine.adapter import Prompt
from mmdecode.errors import IncompatibleError, InputError, OptionError
from mmdecode.guide.vcd import VCD
from mmdecode.models import dream, eagle, flash, vispec
from mmdecode.models.feature_drafter import Rows
from mmdecode.models.image_rows import at_last_rows, members_of, numbered
from mmdecode.testing import check_draft
from mmdecode.train.drafters.recipes import Unrolled
from tests.draft.test_eagle import SIZES, decode, inputs_of, model_of
from tests.golden.given import Given, begin, commit
from tests.support.sessions import noting
from tests.support.tiny import WIDTH
from tests.support.tiny_vlm import CONFIGS, IMAGE, pixels, vision_inputs

MODELS = {
    "vispec": lambda config, own: vispec.ViSpecModel({**config, "num_queries": 3}, own),
    "dream": lambda config, own: dream.DreamModel({"first_row": "zero", **config}, own),
    "flash": lambda config, own: flash.FlashModel({"k": 2, "compress_len": 2, **config}, own),
}
CLASSES = {"vispec": ViSpec, "dream": Dream, "flash": Flash}
kinds = pytest.mark.parametrize("kind", MODELS)


def random_model(kind, seed=0, own_embedding=False, **config):
    """Weights large enough that what is drafted does not settle on one token."""
    torch.manual_seed(seed)
    model = MODELS[kind]({**SIZES, **config}, own_embedding)
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=1.0 if "fc" in name or name == "A" else 0.3)
        elif "gate" in name:
            nn.init.constant_(weight, 0.7)
    return model


def random_draft(kind, depth=4, top_k=2, nodes=9, seed=0, **options):
    return CLASSES[kind](random_model(kind, seed), depth=depth, top_k=top_k, nodes=nodes, **options)


# Any of them


@pytest.mark.one_in(2)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("family", ["llama", "llava_next", "qwen2_5_vl"])
@kinds
def test_a_random_drafter_changes_no_token(family, kind, do_sample):
    expected, _ = decode(family, do_sample=do_sample)
    found, decoder = decode(family, random_draft(kind), do_sample=do_sample)
    assert found == expected
    assert decoder.stats.drafted > 0


@pytest.mark.one_in(5)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("family", ["llava_next", "qwen2_5_vl"])
@kinds
def test_guided_decoding_is_drafted_as_any(family, kind, do_sample):
    """Rows with images of other sizes, and one without any."""
    guide = VCD(beta=0.0)  # whose cut would leave a random drafter one token
    how = {"do_sample": do_sample, "max_new_tokens": 40}
    expected, _ = decode(family, guide=guide, **how)
    assert expected != decode(family, **how)[0]
    draft = random_draft(kind, top_k=4, nodes=40)
    found, decoder = decode(family, draft, guide, **how)
    assert found == expected
    assert decoder.stats.accepted > 0


@pytest.mark.parametrize(
    ("kind", "family"), [("vispec", "qwen2_5_vl"), ("dream", "llava_next"), ("flash", "llava_next")]
)
def test_a_row_drafts_in_a_batch_what_it_drafts_alone(kind, family):
    inputs = inputs_of(family, 4)
    names = ("pixel_values", "image_sizes", "image_grid_thw")
    raw = {name: inputs[name] for name in names if name in inputs}
    own = registry.adapter_for(model_of(family)).split(raw, inputs["input_ids"])
    options = {"share": 0.5} if kind == "dream" else {}
    _, batched = decode(family, random_draft(kind, **options), inputs=inputs, trace=True)
    for row, images in enumerate(own):
        width = int(inputs["attention_mask"][row].sum())
        rest = {k: v[row : row + 1, -width:] for k, v in inputs.items() if k not in raw}
        draft = random_draft(kind, **options)
        _, alone = decode(family, draft, inputs={**rest, **images}, trace=True)
        assert alone.trace[0] == batched.trace[row]
        assert any(r.drafted for r in alone.trace[0])


def given_prompt(own_gap=2):
    """Two rows whose images lie elsewhere; their states and embeddings are random."""
    generator = torch.Generator().manual_seed(3)
    images = torch.zeros(2, 14, dtype=torch.bool)
    images[0, 2:5] = images[0, 5 + own_gap : 11] = images[1, 3:9] = True
    ids = torch.randint(0, 60, images.shape, generator=generator)
    hidden, merged, more = torch.randn(3, 2, 14, WIDTH, generator=generator)
    weight, table = torch.randn(2, SIZES["vocab_size"], WIDTH, generator=generator)
    merged = torch.where(images[..., None], merged, table[ids])
    return Given(weight * 0.02, images, table), ids, hidden, merged, more


def rows_of(draft, adapter, ids, hidden, merged, tokens):
    """Rows of a prompt and committed tokens, as `begin` and `commit` give them to a drafter."""
    count = ids.shape[1] + tokens.shape[1]
    text = torch.zeros_like(tokens, dtype=torch.bool)
    images = numbered(torch.cat([adapter.images, text], 1))
    embeds = torch.cat([merged, adapter.table[tokens]], 1)
    first = draft.drafter.reads_first
    begin_at = 0 if first else 1
    rows = Rows(
        embeds=embeds[:, begin_at:],
        features=F.pad(hidden, (0, 0, 1, 0)) if first else hidden,
        positions=torch.arange(count - begin_at).expand(2, -1),
        kept=torch.ones(2, count - begin_at, dtype=torch.bool),
        images=images[:, begin_at:],
    )
    return draft.drafter.prepare(rows)


def one_row(rows, row):
    """A row of a batch by itself, packed."""
    own = {name: value[row : row + 1] for name, value in vars(rows).items() if value is not None}
    return Rows(**own).packed()[0]


def weight_of(drafter, adapter, rows, path):
    """Log-probability of a path, every pass over everything from the start and without a cache."""
    steps = getattr(drafter, "steps", 1)
    total, made = 0.0, None
    for level, token in enumerate(path):
        if level % steps == 0:
            length = rows.embeds.shape[1]
            hidden = ~torch.ones(length, length, dtype=torch.bool).tril()
            mask = (hidden * torch.finfo(torch.float32).min)[None, None]
            made = drafter(rows, mask, Unrolled())[0, -1].unflatten(-1, (steps, -1))
            new = []
        state = made[level % steps]
        total += adapter.head(state).log_softmax(-1)[token].item()
        new.append((adapter.table[token], state))
        if len(new) == steps:
            embeds, states = (torch.stack(part)[None] for part in zip(*new, strict=True))
            more = rows.positions[:, -1:] + 1 + torch.arange(steps)
            carried = rows.carried
            if carried is not None:
                carried = torch.cat([carried, carried[:, -1:].expand(-1, steps, -1)], 1)
            rows = replace(
                rows,
                embeds=torch.cat([rows.embeds, embeds], 1),
                features=torch.cat([rows.features, states], 1),
                positions=torch.cat([rows.positions, more], 1),
                kept=None,
                images=None if rows.images is None else F.pad(rows.images, (0, steps)),
                carried=carried,
            )
    return total


def assert_weights_are_those_of_paths_alone(kind, monkeypatch):
    grown = []
    grow = growing.grow
    monkeypatch.setattr(growing, "grow", lambda *a: grown.append(grow(*a)) or grown[-1])
    draft = random_draft(kind, depth=5, top_k=2, nodes=30)
    adapter, ids, hidden, merged, more = given_prompt()
    session = begin(draft, adapter, ids, hidden, merged)
    first, later = torch.tensor([[3], [4]]), torch.tensor([[5, 6, 7], [8, 9, 1]])
    commit(session, first, hidden[:, -1:], 0)
    commit(session, later, more[:, :3], 2)
    session.propose(9)
    tree = grown[-1]
    tokens = torch.cat([first, later], 1)
    states = torch.cat([hidden, more[:, :3]], 1)
    rows = rows_of(draft, adapter, ids, states, merged, tokens)
    for row in range(2):
        paths = {-1: ()}
        for node, parent in enumerate(tree.parents[row].tolist()):
            paths[node] = (*paths[parent], int(tree.tokens[row, node]))
        for node in (1, 3, 6, 9, 11, 15, 17):
            expected = weight_of(draft.drafter, adapter, one_row(rows, row), paths[node])
            assert tree.scores[row, node].item() == pytest.approx(expected, rel=1e-4, abs=2e-3)


@kinds
@torch.no_grad()
def test_a_path_weighs_what_the_drafter_says_of_it_alone(kind, monkeypatch):
    """Slots, positions, siblings, what is carried: all levels of a tree after two rounds."""
    assert_weights_are_those_of_paths_alone(kind, monkeypatch)


@kinds
@torch.no_grad()
def test_a_mask_that_shows_siblings_to_one_another_is_found(kind, monkeypatch):
    def shown(begin, pads, attended, *rest):
        return tree_mask(begin, pads, torch.ones_like(attended), *rest)

    tree_mask = features.tree_mask
    for module in ("features", "flash"):
        monkeypatch.setattr(f"mmdecode.draft.{module}.tree_mask", shown)
    with pytest.raises(AssertionError):
        assert_weights_are_those_of_paths_alone(kind, monkeypatch)


@kinds
@torch.no_grad()
def test_half_precision_drafts(kind):
    adapter, ids, hidden, merged, _ = given_prompt()
    hidden, merged = hidden.bfloat16(), merged.bfloat16()
    adapter.weight, adapter.table = adapter.weight.bfloat16(), adapter.table.bfloat16()
    draft = random_draft(kind, depth=5)
    session = begin(draft, adapter, ids, hidden, merged)
    commit(session, torch.tensor([[3], [4]]), hidden[:, -1:], 0)
    assert session.propose(9).size == 9
    assert session.state.dtype == torch.bfloat16
    assert next(draft.drafter.parameters()).dtype == torch.float32


@pytest.mark.one_in(3)
@kinds
def test_it_passes_the_public_check(kind):
    check_draft(lambda: table_draft(kind, 5))


def table_draft(kind, vocabulary):
    """For a table model, whose states are one number wide: what it reads is made wider."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 4, "target_hidden_size": 1, "vocab_size": vocabulary}
    model = MODELS[kind]({**sizes, "intermediate_size": 4, "num_attention_heads": 2}, False)
    head = torch.randn(vocabulary, 4)
    logits = model.logits
    model.fuse = lambda states: (states % 7 - 3).expand(*states.shape[:-1], 4)
    model.embed = lambda ids, adapter: torch.eye(8, 4)[ids].to(adapter.model.dtype)
    model.logits = lambda states, adapter: logits(states, Given(head.to(states), None))
    return CLASSES[kind](model, depth=4, top_k=2, nodes=5)


@kinds
def test_a_saved_drafter_is_the_same_and_is_made_by_a_string(kind, tmp_path):
    model = random_model(kind)
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    model.save_pretrained(tmp_path)
    more = ",share=0.5" if kind == "dream" else ""
    draft = registry.create("draft", f"{kind}:path={tmp_path},depth=3,top_k=2,nodes=5{more}")
    assert (draft.depth, draft.top_k, draft.nodes) == (3, 2, 5)
    assert getattr(draft, "share", 0.5) == 0.5
    found, expected = draft.drafter.state_dict(), model.state_dict()
    assert type(draft.drafter) is type(model) and found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    with pytest.raises(InputError):
        Eagle.from_pretrained(tmp_path)


def test_without_a_path_it_is_what_is_shipped_for_the_model():
    draft = registry.create("draft", "eagle:length=3", model_id="zoo:llava-scenes")
    assert draft.drafter.config["target_model_type"] == "llava"
    draft = registry.create("draft", "kangaroo:length=3", model_id="zoo:llava-scenes")
    assert draft.drafter.config["target_model_type"] == "llava"
    others = ("dream", None), ("flash", None), ("hydra", "zoo:lm-synth"), ("kangaroo", None)
    for kind, model in (("vispec", "zoo:llava-scenes"), ("eagle", "someone/else"), *others):
        pattern = f"{kind}.*path=.*{model or 'the model'}.*--kind {kind}"
        with pytest.raises(OptionError, match=pattern):
            registry.create("draft", kind, model_id=model)
    with pytest.raises(OptionError, match=r"draft 'eagle' .*eagle:path=zoo:llava-scenes-eagle"):
        registry.create("draft", "eagle")
    with pytest.raises(OptionError, match=r"draft 'medusa' .*medusa:path=zoo:llava-scenes-medusa"):
        registry.create("draft", "medusa")


@kinds
def test_a_drafter_for_another_target_is_refused_naming_both(kind):
    model = random_model(kind, vocab_size=90)
    with pytest.raises(IncompatibleError, match="vocabulary of 90, the model has 80"):
        decode("llama", CLASSES[kind](model))


# Which image a token belongs to


def test_images_are_separated_by_runs_or_by_their_sizes():
    images = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1, 0, 1]]).bool()
    assert numbered(images).tolist() == [[0, 1, 1, 0, 2, 2, 2, 0], [0, 0, 1, 1, 1, 1, 0, 2]]
    sizes = [2, 3, 1, 3, 1]
    assert numbered(images, sizes)[1].tolist() == [0, 0, 1, 2, 2, 2, 0, 3]
    assert numbered(images, sizes)[0].tolist() == numbered(images)[0].tolist()
    for sizes in ([5, 5, 5], [2, 4, 3, 1], [10]):  # the last two go over the end of a row
        assert torch.equal(numbered(images, sizes), numbered(images))
    assert not numbered(images & False, []).any()


@pytest.mark.parametrize("family", ["llava", "llava_next"])
@kinds
def test_images_side_by_side_are_two(family, kind, monkeypatch):
    """One by itself, then two with nothing between, of unlike sizes where they can be."""
    sizes = {"llava": [(8, 8)] * 3, "llava_next": [(8, 8), (8, 16), (8, 8)]}[family]
    counts = {"llava": [4, 4, 4], "llava_next": [10, 14, 10]}[family]
    ids = [3, *[IMAGE] * counts[0], 5, 6, 7, *[IMAGE] * (counts[1] + counts[2]), 9]
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
    inputs |= pixels(family, sizes, 1, [0, 0, 0])
    seen = {}

    visible = FeatureSession.visible_rows

    def noted(self, rows, prefill):
        seen["images"] = rows.images
        return visible(self, rows, prefill)

    monkeypatch.setattr(FeatureSession, "visible_rows", noted)
    expected, _ = decode(family, inputs=inputs)
    draft = CLASSES[kind](random_model(kind), depth=3, top_k=2, nodes=5)
    found, _ = decode(
        family,
        noting(draft, opened=lambda session: seen.update(slots=session._width)),
        inputs=inputs,
    )
    assert found == expected
    lengths = [int((seen["images"] == image).sum()) for image in (1, 2, 3)]
    assert lengths == counts and seen["images"].max() == 3
    text = len(ids) - 1 - sum(counts)
    # two summaries or latents an image, or all its tokens and the row of the first token
    assert seen["slots"] == (len(ids) if kind == "dream" else text + 3 * 2)


def test_hidden_images_leave_nothing():
    for kind in MODELS:
        widths = []

        def note(session):
            asked, adapter = session.call.request, session.call.plan.adapter
            words = asked.prompt_mask & ~adapter.spans("image", asked.prompt_ids)
            widths.append((session._width, int(words.sum(1).max())))  # noqa: B023
            assert session._carried is None

        inputs = vision_inputs("llava", 2)
        draft = CLASSES[kind](random_model(kind), depth=2, top_k=1, images="hidden")
        decode("llava", noting(draft, opened=note), inputs=inputs)
        assert widths[0][0] == widths[0][1] - (kind != "dream")
        draft = CLASSES[kind](random_model(kind), depth=2, top_k=1)
        carried = []
        decode(
            "llava",
            noting(draft, opened=lambda session: carried.append(session._carried)),  # noqa: B023
            inputs=inputs,
        )
        assert (carried[0] is not None) == (kind == "vispec"), "what is shown is carried"


def test_what_replaces_an_image_lies_at_its_last_rows():
    images = torch.tensor([[0, 1, 1, 1, 0, 2, 0], [0, 0, 1, 1, 2, 2, 0]])
    made = torch.arange(1.0, 9.0).view(2, 2, 2, 1)
    rows, replaced = at_last_rows(made, members_of(images), torch.zeros(2, 7, 1))
    # an image with one token keeps the last
    assert rows[..., 0].tolist() == [[0, 0, 1, 2, 0, 4, 0], [0, 0, 5, 6, 7, 8, 0]]
    assert torch.equal(replaced, rows[..., 0] > 0)


# ViSpec


@torch.no_grad()
def test_summaries_depend_on_what_is_in_an_image_and_not_on_its_order_or_number():
    adaptor = random_model("vispec").imadpt
    embeds = torch.randn(1, 9, WIDTH, generator=torch.Generator().manual_seed(0))
    members = torch.zeros(1, 1, 9, dtype=torch.bool)
    members[..., 2:7] = True
    made = adaptor(embeds, members)
    order = torch.tensor([0, 1, 5, 3, 6, 2, 4, 7, 8])
    torch.testing.assert_close(adaptor(embeds[:, order], members), made)
    twice = torch.tensor([0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 8])
    doubled = members[..., twice]
    torch.testing.assert_close(adaptor(embeds[:, twice], doubled), made)
    other = embeds.clone()
    other[:, 3] += 1
    assert (adaptor(other, members) - made).abs().max() > 0.1


def eagle_of(model):
    """EAGLE with the weights that a ViSpec model began with."""
    config = {key: value for key, value in model.config.items() if key != "num_queries"}
    weights = model.state_dict()
    mine = {k: v for k, v in weights.items() if not k.startswith(("imadpt.", "img_fc."))}
    return eagle.EagleModel.from_weights(config, mine, "")


def untrained_vispec():
    """Random but for the mixing of the global vector, which is as at first."""
    model, fresh = random_model("vispec"), MODELS["vispec"]({**SIZES}, False)
    model.img_fc.load_state_dict(fresh.img_fc.state_dict())
    return model


def passed(model, rows):
    length = rows.embeds.shape[1]
    hidden = ~torch.ones(length, length, dtype=torch.bool).tril()
    return model(rows, (hidden * torch.finfo(torch.float32).min)[None, None], Unrolled())


@torch.no_grad()
def test_at_first_it_is_eagle_with_summaries_for_images():
    model = untrained_vispec()
    draft = ViSpec(model)
    adapter, ids, hidden, merged, _ = given_prompt()
    rows = rows_of(draft, adapter, ids, hidden, merged, torch.tensor([[3], [4]]))
    packed = one_row(rows, 0)
    inputs = eagle_of(model)
    read = inputs.fc(torch.cat([packed.embeds, packed.features], -1))
    summaries = (packed.images > 0)[..., None]
    assert summaries.sum() == 4

    class Reference(eagle.EagleModel):
        def read(self, rows):
            return torch.where(summaries, packed.embeds, read)

    reference = Reference.from_weights(inputs.config, inputs.state_dict(), "")
    torch.testing.assert_close(passed(model, packed), passed(reference, packed))
    model.img_fc.weight[:, WIDTH:] = 0.1  # the vector counts once it is learned
    assert (passed(model, packed) - passed(reference, packed)).abs().max() > 0.1


@torch.no_grad()
def test_without_an_image_it_is_the_drafter_of_the_first_stage():
    model = untrained_vispec()
    expected, _ = decode("llama", Eagle(eagle_of(model), depth=3, top_k=2, nodes=7), trace=True)
    plain = decode("llama", Eagle(eagle_of(model), depth=3, top_k=2, nodes=7), trace=True)[1]
    found, decoder = decode("llama", ViSpec(model, depth=3, top_k=2, nodes=7), trace=True)
    assert found == expected and decoder.trace == plain.trace


@torch.no_grad()
def test_text_is_given_the_vector_of_the_latest_image():
    draft = random_draft("vispec")
    adapter, ids, hidden, merged, _ = given_prompt(own_gap=3)
    rows = rows_of(draft, adapter, ids, hidden, merged, torch.tensor([[3], [4]]))
    images = torch.zeros_like(rows.images)
    images[0, 1:4], images[0, 7:10], images[1, 2:8] = 1, 2, 1
    latest = images.cummax(1).values
    for row, number in ((0, 1), (0, 2), (1, 1)):
        vectors = rows.carried[row][latest[row] == number]
        assert vectors.any() and bool((vectors == vectors[0]).all())
    assert not torch.equal(rows.carried[0, 4], rows.carried[0, 10])
    assert not rows.carried[latest == 0].any()


# DREAM


def test_a_share_of_the_image_is_what_words_attend_to_most(monkeypatch):
    kept, visible = {}, DreamSession.visible_rows

    def noted(self, rows, prefill):
        shown = visible(self, rows, prefill)
        kept[self.draft.share] = (rows.kept & ~shown.kept, rows.images > 0, prefill)
        return shown

    monkeypatch.setattr(DreamSession, "visible_rows", noted)
    inputs = vision_inputs("llava", 3)
    expected, _ = decode("llava", inputs=inputs)
    compared = set()
    for share in (1.0, 0.5, 0.1):
        draft = Dream(random_model("dream"), share=share, depth=3, top_k=2, nodes=5)
        assert decode("llava", draft, inputs=inputs)[0] == expected
        left_out, images, prefill = kept[share]
        count = images.sum(1)
        stay = (count.double() * share).long().clamp_min(1).where(count > 0, count)
        assert torch.equal(left_out.sum(1), count - stay)
        assert not (left_out & ~images).any()
        assert bool(prefill.text_attention) == (share < 1)
        if share == 1:
            continue
        weights = prefill.text_attention[1].mean(1)
        for row in range(3):
            if 0 < stay[row] < count[row]:
                stays = images[row] & ~left_out[row]
                assert weights[row][stays].min() >= weights[row][left_out[row]].max()
                compared.add(share)
    assert compared == {0.5, 0.1}


def test_options_out_of_range_are_refused():
    for share in (0.0, 1.5):
        with pytest.raises(OptionError, match="share"):
            Dream(random_model("dream"), share=share)
    with pytest.raises(InputError, match="first_row"):
        random_model("dream", first_row="mean")


# FLASH


@torch.no_grad()
def test_equal_rows_of_a_make_equal_latents_and_no_image_changes_nothing():
    model = random_model("flash")
    model.A.copy_(model.A[:1].expand_as(model.A))
    draft = Flash(model)
    adapter, ids, hidden, merged, _ = given_prompt()
    rows = rows_of(draft, adapter, ids, hidden, merged, torch.tensor([[3], [4]]))
    for row, spans in ((0, ((2, 4), (8, 10))), (1, ((6, 8),))):
        for first, last in spans:
            latents = rows.embeds[row, first:last]
            assert torch.equal(latents[0], latents[1])
            assert bool(rows.kept[row, first:last].all())
    # the mean over rows of the image, weighed by A
    inside = hidden[1, 2:8]
    expected = (inside @ model.A[0]).softmax(0) @ inside
    torch.testing.assert_close(rows.embeds[1, 6], expected)
    adapter.images = torch.zeros_like(adapter.images)
    plain = rows_of(draft, adapter, ids, hidden, merged, torch.tensor([[3], [4]]))
    assert bool(plain.kept.all()) and plain.positions[0].tolist() == list(range(14))
    assert torch.equal(plain.embeds[:, :13], merged[:, 1:])


@pytest.mark.parametrize(("steps", "passes"), [(1, 5), (2, 3), (3, 2), (8, 1)])
def test_a_pass_makes_as_many_levels_as_it_was_built_for(steps, passes):
    model = random_model("flash", k=steps)
    counted = []
    model.layers.register_forward_hook(lambda *_: counted.append(1))
    adapter, ids, hidden, merged, _ = given_prompt()
    draft = Flash(model, depth=5, top_k=2, nodes=9)
    with torch.no_grad():
        session = begin(draft, adapter, ids, hidden, merged)
        commit(session, torch.tensor([[3], [4]]), hidden[:, -1:], 0)
        before = len(counted) - 1  # what was committed is read in a pass of its own
        assert session.propose(9).structure()[1].max() <= 5
    assert len(counted) - before == passes


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_tells_images_apart(family, monkeypatch):
    """The last of three rows has two images; random drafters change no token."""
    inputs, seen, visible = vision_inputs(family), {}, FeatureSession.visible_rows

    def noted(self, rows, prefill):
        seen["images"] = rows.images
        return visible(self, rows, prefill)

    monkeypatch.setattr(FeatureSession, "visible_rows", noted)
    draft = ViSpec(random_model("vispec"), depth=2, top_k=1)
    found, _ = decode(family, draft, inputs=inputs)
    assert found == decode(family, inputs=inputs)[0]
    assert seen["images"].amax(1).tolist() == [1, 0, 2]


def test_sizes_of_images_are_known_without_encoded_ones():
    """As older releases of transformers hand them on."""
    for family, sizes in (("llava", [4, 4, 4]), ("qwen2_5_vl", [4, 6, 4]), ("llava_next", None)):
        adapter = registry.adapter_for(model_of(family))
        inputs = vision_inputs(family)
        ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
        prompt = Prompt(ids=ids, mask=mask, inputs=inputs)
        assert adapter.span_sizes("image", prompt) == sizes

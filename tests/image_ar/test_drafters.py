"""Drafters over the states of image models: guided like their target, exact, and trained."""

import functools
import json
from dataclasses import replace

import pytest
import torch

from mmdecode import registry
from mmdecode.accept.rejection import Rejection
from mmdecode.adapters.images.llamagen import LlamaGenPast
from mmdecode.decoder import Decoder
from mmdecode.draft import features
from mmdecode.draft.eagle import Eagle
from mmdecode.draft.features import FeatureDraft, FeatureSession
from mmdecode.draft.target import TargetDistribution
from mmdecode.engine.adapter import Prompt
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.image_ar.loading import load
from mmdecode.image_ar.raster import generate
from mmdecode.image_ar.sampling import Sampling, guided
from mmdecode.models.feature_drafter import FeatureDrafter
from mmdecode.testing.checks import LEVEL, p_value
from mmdecode.train.drafters.recipes import RECIPES, Options, Sample, sizes_of, unrolled
from mmdecode.train.drafters.targets import Drawing, Images, requests_for
from mmdecode.train.drafters.trainer import collect, train
from tests.image_ar.conftest import tiny_llamagen, with_random_weights
from tests.support.commands import invoke
from tests.support.tiny_images import (
    GUIDED,
    SHAPES,
    draw,
    eagle_of,
    feature_drafter,
    image_model,
)
from tests.support.traced import Traced
from tests.train.test_drafter import SMALL


class Itself(FeatureDrafter):
    """The target as its own drafter: it reads the condition too, and no states."""

    kind, marker, reads_first = "itself", "itself.", True

    def __init__(self, adapter):
        super().__init__(sizes_of(adapter))
        self.adapter, self.cache_layers = adapter, adapter.num_layers
        self.where = torch.nn.Parameter(torch.zeros(()))

    def levels(self, num_layers):
        return ("last",)

    def forward(self, rows, mask, past):
        past = LlamaGenPast(past, torch.zeros(len(mask), 1, dtype=torch.long))
        positions = rows.positions[:, 1:].sum(1) if rows.positions.ndim == 3 else rows.positions
        ids = torch.zeros_like(positions)
        prompt = Prompt(ids=ids, mask=ids == 0, inputs={"inputs_embeds": rows.embeds})
        return self.adapter.prefill(prompt, mask, positions, past)


SCALE = 2.0


@functools.cache
def small():
    """256 images."""
    return registry.image_adapter_for(
        with_random_weights(tiny_llamagen(vocab_size=4, grid_size=2), 1, std=0.15)
    )


def sampled(adapter, draft, accept, rows=6, scale=SCALE, seed=0, decoder=None, **options):
    """Codes ``(rows, cells)`` of one class."""
    return generate(
        adapter.model,
        decoder=decoder or Decoder(draft, accept=accept),
        adapter=adapter,
        guidance=scale,
        classes=[1] * rows,
        seed=seed,
        **options,
    ).tokens


def on_a_line(drafter):
    """The same sizes without a grid: `Itself` reads plain positions."""
    drafter.rotary.sections = None
    return drafter


# Guided like the target


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, SCALE])
def test_every_sampled_token_of_a_drafter_that_is_the_target_is_accepted(shape, scale):
    adapter = registry.image_adapter_for(tiny_llamagen())
    draft = FeatureDraft(on_a_line(Itself(adapter)), **SHAPES[shape], sampled=True)
    decoder = Traced(draft, accept="rejection")
    sampled(adapter, None, None, scale=scale, decoder=decoder, sampling=Sampling(top_p=0.9))
    assert decoder.stats.acceptance_length > 3
    assert all(round.bonus for row in decoder.trace for round in row)


def test_a_drafter_that_follows_the_condition_alone_is_not_the_target(monkeypatch):
    adapter = registry.image_adapter_for(tiny_llamagen())
    draft = FeatureDraft(on_a_line(Itself(adapter)), **SHAPES["chain"], sampled=True)
    monkeypatch.setattr(
        TargetDistribution, "__call__", lambda self, logits, *_: logits[: self.call.batch]
    )
    decoder = Decoder(draft, accept="rejection")
    sampled(adapter, None, None, decoder=decoder)
    assert decoder.stats.by_depth[0] < 0.9


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", GUIDED)
def test_a_random_drafter_changes_no_image(family, shape):
    plain = draw(family, do_sample=True)
    for with_sampling in (False, True):
        decoder = Decoder(eagle_of(image_model(family), shape, sampled=with_sampling))
        assert torch.equal(draw(family, decoder, do_sample=True), plain)
        assert decoder.stats.drafted
    greedy = Decoder(eagle_of(image_model(family), shape))
    assert torch.equal(draw(family, greedy), draw(family))


@pytest.mark.parametrize("accept", ["coupled", "rejection"])
def test_an_image_does_not_depend_on_its_batch(accept):
    adapter = registry.image_adapter_for(tiny_llamagen())
    make = functools.partial(Eagle, feature_drafter(adapter), **SHAPES["tree"], sampled=True)
    both = {"adapter": adapter, "guidance": SCALE, "seed": 3}
    together = generate(
        adapter.model,
        decoder=Decoder(make(), accept=accept),
        classes=[0, 1, 2],
        request=["a", "b", "c"],
        **both,
    ).tokens
    alone = [
        generate(
            adapter.model,
            decoder=Decoder(make(), accept=accept),
            classes=[label],
            request=[name],
            **both,
        ).tokens
        for label, name in enumerate("abc")
    ]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("accept", ["coupled", "rejection"])
@pytest.mark.parametrize("shape", SHAPES)
def test_captured_rounds_draw_the_same(shape, accept, taped):
    adapter = registry.image_adapter_for(tiny_llamagen())
    draft = Eagle(feature_drafter(adapter), **SHAPES[shape], sampled=True)
    expected, captured = (
        sampled(adapter, None, None, decoder=Decoder(draft, accept=accept, compile=fixed))
        for fixed in (False, True)
    )
    assert torch.equal(captured, expected)
    assert taped


# The distribution


@functools.cache
def joint(scale, top_p=1.0):
    """Probability of each image of class 1, by enumeration."""
    adapter = small()
    codes = torch.cartesian_prod(*[torch.arange(4)] * 4)
    label = torch.full((len(codes),), 1)
    with torch.no_grad():
        conditional = adapter.model.code_logits(label, codes)
        nothing = adapter.model.code_logits(adapter.model.unconditional(label), codes)
    distribution = (
        Sampling(top_p=top_p).warp(guided(conditional, nothing, scale)).double().softmax(-1)
    )
    return distribution.gather(2, codes[..., None]).prod(1)[:, 0]


def counted(draft, accept="rejection", rows=4000, top_p=0.95):
    tokens = sampled(small(), draft, accept, rows, sampling=Sampling(top_p=top_p))
    number = (tokens * torch.tensor([64, 16, 4, 1])).sum(1)
    return torch.bincount(number, minlength=256)


@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_drafts_keep_the_distribution(shape):
    draft = Eagle(feature_drafter(small()), **SHAPES[shape], sampled=True)
    assert p_value(counted(draft), joint(SCALE, 0.95)) > LEVEL


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mutant_that_reports_another_distribution_than_it_samples_from_is_caught(
    shape, monkeypatch
):
    propose = FeatureSession.propose

    def wrong(self, budget):
        proposal = propose(self, budget)
        if proposal.log_q is None:
            return proposal
        return replace(proposal, log_q=proposal.log_q * 0.2)

    monkeypatch.setattr(FeatureSession, "propose", wrong)
    draft = Eagle(feature_drafter(small()), **SHAPES[shape], sampled=True)
    assert p_value(counted(draft), joint(SCALE, 0.95)) < LEVEL


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rule", ["lantern:delta=0,k=3", "lantern:lambda_=1", "cool_sd:delta=1"])
def test_a_neutral_relaxed_rule_draws_what_rejection_does(classes, rule):
    adapter = load(str(classes), "cpu").adapter
    make = functools.partial(Eagle, feature_drafter(adapter), **SHAPES["chain"])
    one, two = (sampled(adapter, make(), accept) for accept in (rule, Rejection()))
    assert torch.equal(one, two)
    relaxed = Decoder(make(), accept=rule.replace("delta=0", "delta=1").replace("_=1", "_=9"))
    sampled(adapter, None, None, decoder=relaxed)
    exact = Decoder(make(), accept="rejection")
    sampled(adapter, None, None, decoder=exact)
    if "lantern" in rule:
        assert relaxed.stats.acceptance_rate > exact.stats.acceptance_rate


def test_sampled_trees_have_to_be_kept_whole():
    drafter = feature_drafter(small())
    with pytest.raises(OptionError, match="a sampled tree of depth 5 and top_k 8 has 264 nodes"):
        Eagle(drafter, sampled=True)
    assert "without_replacement" not in Eagle(drafter).kinds
    assert "iid" in Eagle(drafter, depth=4, top_k=1, nodes=4).kinds
    assert "iid" not in Eagle(drafter, depth=4, top_k=1, nodes=4, sampled=False).kinds
    with pytest.raises(IncompatibleError, match=r"takes proposals.*length=4.*depth=2,top_k=3"):
        Decoder(Eagle(drafter), accept="rejection")
    for advised in ({"depth": 4, "top_k": 1, "nodes": 4}, {"depth": 2, "top_k": 3}):
        Decoder(Eagle(drafter, sampled=True, **advised), accept="rejection")


def test_a_reduced_vocabulary_reports_its_distribution_by_the_targets_ids():
    adapter = small()
    drafter = feature_drafter(adapter, "eagle3", draft_vocab_size=2)
    drafter.d2t.copy_(torch.tensor([1, 2]))  # codes 1 and 3
    draft = Eagle(drafter, **SHAPES["chain"])
    assert p_value(counted(draft), joint(SCALE, 0.95)) > LEVEL


# Places on the grid


def test_rows_of_a_class_lie_where_their_codes_do():
    adapter = registry.image_adapter_for(tiny_llamagen())
    coordinates = adapter.grid_positions(torch.arange(8)[None])
    assert coordinates[0].tolist() == [[0] * 8, [0, 0, 0, 0, 0, 0, 1, 1], [0, 0, 1, 2, 3, 4, 0, 1]]
    assert feature_drafter(adapter).rotary.sections == (0, 1, 1) * 4
    captions = registry.image_adapter_for(image_model("llamagen_captions"))
    assert "rope_parameters" not in sizes_of(captions)


# Training


def target_of(classes):
    return Images(load(str(classes), "cpu"))


def test_states_are_those_of_a_plain_pass_under_each_condition(classes):
    target = target_of(classes)
    requests = requests_for(target, "zoo:scenes", 3)
    assert [request.condition for request in requests] == [0, 1, 2]
    samples = [Sample(r, a) for r, a in zip(requests, target.answers(requests, SMALL), strict=True)]
    batch = collect(target, feature_drafter(target.adapter), samples)
    codes = torch.tensor([sample.answer for sample in samples])
    labels, model = torch.arange(3), target.model
    with torch.no_grad():
        conditional = model.code_logits(labels, codes)
        nothing = model.code_logits(model.unconditional(labels), codes)
    distribution = guided(conditional, nothing, target.raster.preset.guidance)
    close = {"atol": 1e-3, "rtol": 1e-4}
    torch.testing.assert_close(
        batch.logits()[:, :-1], torch.cat([distribution, distribution]), **close
    )
    torch.testing.assert_close(model.lm_head(batch.last[:3, :-1]), conditional, **close)
    assert batch.ids[:, 1:].tolist() == codes.tolist() * 2
    assert batch.asked.tolist() == [[False] + [True] * 25] * 6
    assert torch.equal(batch.rows.embeds[:3], model.get_input_embeddings()(codes))
    assert torch.equal(batch.rows.features, batch.last[:, :-1])


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_what_is_learnt_is_what_is_drafted(kind, classes, monkeypatch):
    """Every pass of a training makes the distribution that drafting meets there."""
    target = target_of(classes)
    requests = requests_for(target, "zoo:scenes", 4)
    samples = [Sample(r, a) for r, a in zip(requests, target.answers(requests, SMALL), strict=True)]
    drafter = feature_drafter(target.adapter, kind)
    batch = collect(target, drafter, samples)
    rows = replace(batch.rows, features=drafter.fuse(batch.rows.features))
    with torch.no_grad():
        passes = unrolled(drafter, drafter.prepare(rows), 3)
        distributions = [
            batch.guided(drafter.logits(s, target.adapter)).softmax(-1) for s in passes
        ]
    rounds = []

    def propose(self, budget):
        """Drafts what the samples hold, and notes its distributions."""
        call, own, found = self.call, self.drafter.target_ids(), []
        logits, step = self.reader(levels := min(3, budget))
        for level in range(levels):
            found.append(self.target(logits, (call.rows.length + level)[:, None], own))
            tokens = codes[:, int(call.rows.length[0]) + level, None]
            if level < levels - 1:
                logits = step(level, tokens, torch.zeros_like(tokens))
        rounds.append((int(call.rows.length[0]), found))
        return features.Proposal.empty(call.batch, call.device)

    monkeypatch.setattr(FeatureSession, "propose", propose)
    codes = torch.tensor([sample.answer for sample in samples])
    draft = Eagle(drafter, depth=3, top_k=1, nodes=3)
    out = generate(
        target.model,
        decoder=Decoder(draft, seed=SMALL.fit.seed),
        adapter=target.adapter,
        guidance=target.raster.preset.guidance,
        classes=[r.condition for r in requests],
        request=[r.id for r in requests],
        sampling=Sampling(),
    )
    assert torch.equal(out.tokens, codes)
    for length, found in rounds:
        for level, distribution in enumerate(found):
            wanted = distributions[level][:4, length - 1]
            torch.testing.assert_close(distribution[:, 0].softmax(-1), wanted, atol=1e-4, rtol=1e-3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_drafter_of_images_is_trained_and_goes_on(kind, classes, tmp_path, monkeypatch):
    target = target_of(classes)
    pace = replace(SMALL.fit, steps=4, every=2)
    options = replace(SMALL, kind=kind, passes=2, fit=pace, tested=2)
    requests = requests_for(target, "zoo:scenes", 12)
    card = train(target, requests, options, tmp_path / "one" / "state", tmp_path / "one")
    assert card["requests"] == {"learnt": 6, "held_out": 4, "tested": 2}
    assert 1 <= card["tokens_per_pass"] <= 3
    loss, calls = type(RECIPES[kind]).loss, []

    def interrupted(self, *given):
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return loss(self, *given)

    monkeypatch.setattr(type(RECIPES[kind]), "loss", interrupted)
    paths = tmp_path / "two" / "state", tmp_path / "two"
    with pytest.raises(KeyboardInterrupt):
        train(target, requests, options, *paths)
    monkeypatch.undo()
    again = train(target, requests, options, *paths)
    assert {**again, "minutes": 0} == {**card, "minutes": 0}
    draft = registry.create("draft", f"eagle:path={tmp_path / 'two'},length=3")
    assert "iid" in draft.kinds
    plain, drafted = (sampled(target.adapter, d, "auto") for d in (None, draft))
    assert torch.equal(plain, drafted)


def test_what_cannot_be_trained_for_images_is_refused(classes, captions, tmp_path):
    target = target_of(classes)
    with pytest.raises(OptionError, match="expected eagle or eagle3"):
        options = replace(SMALL, kind="vispec")
        train(target, [Drawing(str(i), 0) for i in range(9)], options, tmp_path, tmp_path)
    with pytest.raises(OptionError, match="images of classes"):
        requests_for(target, "table.jsonl", None)
    with pytest.raises(OptionError, match="images from prompts"):
        requests_for(target_of(captions), "zoo:scenes", None)


def test_the_command_trains_for_an_image_model(classes, tmp_path):
    given = f"drafter --model {classes} --steps 1 --batch-size 2 --held-out 2 --tested 1 --limit 5"
    found = invoke("train", *given.split(), "--out", tmp_path, "--json")
    assert found.exit_code == 0, found.output
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["options"]["kind"] == Options().kind

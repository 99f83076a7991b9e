"""Drafters that follow the guided distribution, and models that they cannot draft for."""

import functools
from dataclasses import replace
from threading import Thread

import pytest
import torch

import mmdecode
from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.draft.adaptive import Adaptive
from mmdecode.draft.amateur import Amateur
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.eagle import Eagle
from mmdecode.draft.features import FeatureDraft
from mmdecode.draft.first_of import FirstOf
from mmdecode.draft.hydra import Hydra
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.medusa import Medusa
from mmdecode.draft.medusa_heads import MedusaHeads
from mmdecode.draft.target import why_unguided
from mmdecode.engine.adapter import BranchSpec
from mmdecode.errors import IncompatibleError
from mmdecode.guide.adaptvis import AdaptVis
from mmdecode.guide.cfg_image import CFGImage
from mmdecode.guide.dola import DoLa
from mmdecode.guide.linear import Contrast, Linear
from mmdecode.guide.pai import PAI
from mmdecode.guide.vcd import VCD
from mmdecode.models.hydra import HydraHeads
from tests.draft import test_hydra
from tests.draft.test_eagle import Oracle, decode, inputs_of, random_drafter, with_first
from tests.draft.test_seeing import CLASSES, random_model
from tests.support import tiny
from tests.support.sessions import noting, warped
from tests.support.tiny import TREE, WIDTH, model_of, random_heads
from tests.support.tiny_vlm import vision_model

GUIDES = {
    "vcd": lambda: VCD(alpha=1.5),
    "cfg_image": lambda: CFGImage(gamma=4.0),
    "pai": lambda: PAI(gamma=3.0, beta=0.0),
}
UNTRAINED = {
    "medusa": lambda: Medusa(MedusaHeads(2, 1, WIDTH)),
    "medusa_tree": lambda: Medusa(MedusaHeads(3, 1, WIDTH), paths=TREE),
    "hydra": lambda: Hydra(HydraHeads(test_hydra.CONFIG), top_k=1),
    "hydra_tree": lambda: Hydra(HydraHeads(test_hydra.CONFIG), top_k=2, nodes=6),
}
guides = pytest.mark.parametrize("guide", GUIDES)


def repeated(draft, guide, guided):
    """How often untrained heads draft the token again that their state decided, and of how many."""
    counts = []

    def note(session, proposal):
        again = proposal.tokens[:, :1] == session.call.last(1)
        counts.append((again & session.call.rows.active[:, None]).sum())
        counts.append(session.call.rows.active.sum())

    decode("llava", noting(draft, proposed=note), guide, draft_guided=guided)
    return int(sum(counts[::2])), int(sum(counts[1::2]))


@pytest.mark.one_in(2)
@guides
@pytest.mark.parametrize("heads", UNTRAINED)
def test_untrained_heads_predict_the_guided_distribution_of_the_same_states(heads, guide):
    """The states of all branches at the end of any path, and the guide on what heads make of."""
    guide = GUIDES[guide]()
    found, rounds = repeated(UNTRAINED[heads](), guide, True)
    assert found == rounds > 5
    for guided in (None, False):  # drafts of text are not guided by default
        found, rounds = repeated(UNTRAINED[heads](), guide, guided)
        assert found < rounds


@pytest.mark.parametrize("guide", ["vcd", "cfg_image"])  # another edits what the model does
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_drafter_that_is_the_target_is_right_under_a_guide(family, guide):
    """In every branch it reads the prompt of that branch, at its positions."""
    inputs, guide = with_first(inputs_of(family)), GUIDES[guide]()
    expected, _ = decode(family, guide=guide, inputs=inputs)
    assert expected != decode(family, inputs=inputs)[0]
    draft = FeatureDraft(Oracle(vision_model(family), 1), depth=3, top_k=1)
    found, decoder = decode(family, draft, guide, inputs=inputs, draft_guided=True)
    assert found == expected
    assert decoder.stats.acceptance_rate > 0.9
    _, unguided = decode(family, draft, guide, inputs=inputs)
    assert unguided.stats.acceptance_rate < 0.9


def test_what_draws_on_more_than_logits_is_not_followed():
    adapter = registry.adapter_for(vision_model("llava"))
    assert all(why_unguided(make(), adapter) is None for make in GUIDES.values())
    assert why_unguided(None, adapter) is None
    assert "AdaptVis has branches of its own" in why_unguided(AdaptVis(), adapter)
    assert "DoLa reads more than logits" in why_unguided(DoLa(), adapter)


SHORT = {"max_new_tokens": 6, "draft_guided": True}
DRAFTS = {**UNTRAINED, "eagle": lambda: FeatureDraft(Oracle(vision_model("llava"), 1), depth=2)}


@pytest.mark.parametrize("name", DRAFTS)
def test_stats_say_why_a_drafter_does_not_follow_a_guide(name):
    reasons = {}
    for guide in (DoLa(), VCD(), None):
        _, decoder = decode("llava", DRAFTS[name](), guide, **SHORT)
        reasons[type(guide)] = decoder.stats.unguided
    assert reasons == {DoLa: {"guide DoLa reads more than logits"}, VCD: set(), type(None): set()}


def test_stats_say_why_a_composite_and_a_drafter_with_one_branch_do_not_follow():
    for draft in (Adaptive(DRAFTS["medusa"]()), FirstOf(PromptLookup(), DRAFTS["medusa"]())):
        _, decoder = decode("llava", draft, DoLa(), **SHORT)
        assert decoder.stats.unguided == {"guide DoLa reads more than logits"}
    _, decoder = decode("llava", Amateur(), VCD(), **SHORT)
    assert decoder.stats.unguided == {"the drafter has one branch"}


def test_no_warning_for_a_drafter_that_need_not_follow_the_guide():
    decoder = Decoder(DRAFTS["medusa"](), DoLa(), draft_guided=False)
    options = {**inputs_of("llava"), "max_new_tokens": 6}
    mmdecode.generate(vision_model("llava"), decoder=decoder, **options)
    assert decoder.stats.rounds and not decoder.stats.unguided


RUNNING = {**DRAFTS, "assistant": lambda: Assistant(vision_model("llava"), 2), "amateur": Amateur}


@pytest.mark.parametrize("name", RUNNING)
def test_a_guide_warns_once_whatever_drafts(name):
    same = {"change": lambda values, draw: values}
    with pytest.warns(UserWarning) as warned:
        guide = Contrast(transform="pixels")
        guide.branches = [replace(guide.branches[0], transform_options=same)]
        decode("llava", RUNNING[name](), guide, **SHORT)
    assert ["inactive" in str(one.message) for one in warned] == [True]


@pytest.mark.parametrize("name", DRAFTS)
def test_the_images_of_a_branch_are_encoded_once_for_the_model_and_its_draft(name):
    changed = []

    def dimmed(features, draw):
        changed.append(len(features))
        return features / 2

    branch = BranchSpec(name="dim", transform="features", transform_options={"change": dimmed})
    decode("llava", DRAFTS[name](), Linear([branch], [2, -1]), **SHORT)
    drafted = len(changed)
    decode("llava", None, Linear([branch], [2, -1]), **SHORT)
    assert drafted == len(changed) - drafted > 0


def test_a_warp_reaches_the_heads():
    """One that reverses the order of the tokens makes heads say the least likely."""
    seen = {}
    for warp in (None, torch.neg):
        draft = warped(Medusa(random_heads()), warp)
        note = lambda s, p, warp=warp: seen.setdefault(warp, (s.state.clone(), p.tokens))  # noqa: E731
        decode("llama", noting(draft, proposed=note))
    logits = random_heads().logits(seen[None][0], registry.adapter_for(model_of("llama")))
    assert torch.equal(seen[None][1], logits.argmax(-1).T)
    assert torch.equal(seen[torch.neg][1], logits.argmin(-1).T)


# Drafters of several calls

SHARED = {
    "eagle": lambda: Eagle(random_drafter(), depth=3, top_k=2, nodes=6),
    "hydra": lambda: Hydra(test_hydra.random_heads(), top_k=2, nodes=6),
    "medusa": lambda: Medusa(random_heads(), paths=TREE),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_drafter_serves_two_threads_as_two_would(name):
    make = functools.partial(decode, "llama", do_sample=True, trace=True)
    expected, alone = make(SHARED[name]())
    draft, results = SHARED[name](), []
    threads = [Thread(target=lambda: results.append(make(draft))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ids for ids, _ in results] == [expected] * 2
    assert [decoder.trace for _, decoder in results] == [alone.trace] * 2


# Models that they cannot draft for

WHISPER = {"vocab_size": 100}
FOREIGN = {
    "eagle": lambda: Eagle(random_drafter(**WHISPER)),
    "eagle3": lambda: Eagle(random_drafter("eagle3", **WHISPER)),
    "hydra": lambda: Hydra(test_hydra.random_heads(**WHISPER)),
    **{kind: lambda kind=kind: CLASSES[kind](random_model(kind, **WHISPER)) for kind in CLASSES},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_drafter_of_decoder_only_models_names_what_to_use_with_whisper(kind):
    with pytest.raises(IncompatibleError, match=r"does not fit Whisper.*use medusa"):
        tiny.ours(Decoder(FOREIGN[kind]()), "whisper")


def test_medusa_heads_of_another_model_are_refused():
    with pytest.raises(IncompatibleError, match="one more decoder layer"):
        tiny.ours(Decoder(Medusa(random_heads(), tiny.random_block())), "llama")
    with pytest.raises(IncompatibleError, match="a vocabulary of 9"):
        tiny.ours(Decoder(Medusa(random_heads(own_outputs=True, vocab=9))), "llama")

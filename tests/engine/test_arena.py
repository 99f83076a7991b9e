"""Storage and graphs that outlive a call, on a tape: later calls have their own tokens."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from transformers.generation import logits_process as lp
from transformers.modeling_outputs import BaseModelOutput

import mmdecode
from mmdecode.decoder import Decoder
from mmdecode.draft.eagle import Eagle
from mmdecode.draft.medusa import Medusa
from mmdecode.draft.mirror import CacheCopyDrafter
from mmdecode.draft.sparse import Sparse
from mmdecode.engine import arena
from mmdecode.engine.arena import SHAPES, State
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.guide.cfg import CFG
from mmdecode.guide.vcd import VCD
from mmdecode.testing import drafts
from mmdecode.testing.checks import PROMPTS, SEED
from mmdecode.testing.table import decode, left_pad
from tests.engine.test_prefill import eagle
from tests.exactness.test_capture import DRAFTS, MODEL
from tests.support import tiny, tiny_vlm
from tests.support.tiny import random_heads, text_model

OTHER = [[2, 2, 1, 0], [3], [1, 0], [0, 3, 3, 1, 2, 2]]
"""As many as `PROMPTS`, and as wide."""


def rows(decoder, prompts=PROMPTS, new=20, request=None, **options):
    ids, mask = left_pad(prompts)
    settings = {"mask": mask, "eos": 4, "max_new_tokens": new, "request": request}
    found = decode(MODEL, ids, decoder, **settings, **options)
    return found.tolist()


def counted(decoder):
    return {
        key: n for key, n in decoder.stats.paths.items() if key.startswith(("graph", "storage"))
    }


@pytest.mark.one_in(6)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("guide", [None, "cfg"], ids=["plain", "guided"])
@pytest.mark.parametrize("name", DRAFTS)
def test_later_calls_of_a_shape_allocate_and_capture_nothing(name, guide, do_sample, taped):
    make = (lambda: CFG(2.0)) if guide else (lambda: None)
    plain = Decoder(DRAFTS[name](), make(), seed=SEED)
    kept = Decoder(DRAFTS[name](), make(), seed=SEED, compile=True)
    assert rows(kept, do_sample=do_sample) == rows(plain, do_sample=do_sample)
    first = counted(kept)
    assert first["storage allocated"]
    assert rows(kept, do_sample=do_sample) == rows(plain, do_sample=do_sample)
    assert counted(kept) == first | {"storage reused": 1}
    # other prompts, whose nodes may be of other shapes
    for prompts, request in ((OTHER, None), (PROMPTS, [5, 6, 7, 8]), (OTHER, [1, 2, 3, 4])):
        options = {"prompts": prompts, "request": request, "do_sample": do_sample}
        assert rows(kept, **options) == rows(plain, **options)
    assert counted(kept)["storage allocated"] == first["storage allocated"]
    assert counted(kept)["storage reused"] == 4


def generated(family, decoder, seed):
    """Of inputs that have the same shape for every seed."""
    call = {"max_new_tokens": 10, "do_sample": False}
    dice = torch.Generator().manual_seed(seed)
    if family == "llava":
        model = tiny_vlm.vision_model(family)
        inputs = tiny_vlm.vision_inputs(family, 2, seed=seed)
    elif family == "llama":
        model, inputs = text_model(family), tiny.prompts(3)
        random = torch.randint(1, tiny.VOCAB, inputs["input_ids"].shape, generator=dice)
        inputs = inputs | {"input_ids": random * inputs["attention_mask"]}
    else:
        model = tiny.whisper_model()
        states = torch.randn(2, 50, model.config.d_model, generator=dice)
        inputs = {"encoder_outputs": BaseModelOutput(last_hidden_state=states)}
        ids = torch.tensor([[61, 62, 64], [61, 63, 64]]) - seed
        found = decode(model, ids, decoder, inputs=inputs, max_new_tokens=10)
        return found, inputs | {"ids": ids}
    return mmdecode.generate(model, **call, **inputs, decoder=decoder), inputs


def tensors(inputs):
    return [part for part in arena.tree_leaves(inputs) if isinstance(part, torch.Tensor)]


CALLS = {
    "llama, eagle": ("llama", lambda: Decoder(Eagle(eagle(), depth=3, top_k=2, nodes=6))),
    "llama, medusa": ("llama", lambda: Decoder(Medusa(random_heads()))),
    "llama, mirror": ("llama", lambda: Decoder(CacheCopyDrafter(length=3))),
    "llava, sparse": ("llava", lambda: Decoder(Sparse(2, length=3))),
    "llava, mirror": ("llava", lambda: Decoder(CacheCopyDrafter(length=3))),
    "llava, vcd": ("llava", lambda: Decoder(drafts.RandomTrees(), VCD(0.7), seed=2)),
    "whisper": ("whisper", Decoder),
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", CALLS)
def test_inputs_and_results_of_earlier_calls_stay_as_they_were(name, taped):
    family, make = CALLS[name]
    plain, kept = make(), compiled(make())
    if isinstance(kept.draft, drafts.TestDrafter):
        kept.draft.capabilities = DrafterCapabilities(graph_safe=True)
    alive = []
    for seed in (1, 2, 1, 3):
        expected, _ = generated(family, plain, seed)
        found, inputs = generated(family, kept, seed)
        assert found.tolist() == expected.tolist()
        alive.append((found, found.clone(), inputs, [one.clone() for one in tensors(inputs)]))
    assert taped and counted(kept)["storage reused"] == 3
    for found, before, inputs, copies in alive:
        assert torch.equal(found, before)
        assert all(map(torch.equal, tensors(inputs), copies))


def compiled(decoder):
    return Decoder(decoder.draft, decoder.guide, seed=decoder.seed, compile=True)


def test_shapes_do_not_disturb_each_other_and_the_last_ones_are_kept(taped):
    plain, kept = Decoder("recycling"), Decoder("recycling", compile=True)
    lengths = range(10, 11 + SHAPES)
    for _ in range(2):
        for new in lengths:
            assert rows(kept, new=new) == rows(plain, new=new)
    assert "storage reused" not in counted(kept)  # one shape more than are kept, in turn
    for new in [*lengths[-2:], *lengths[-2:]]:
        assert rows(kept, new=new) == rows(plain, new=new)
    assert counted(kept)["storage reused"] == 4


def test_memory_is_bounded_but_for_the_last_shape(taped, monkeypatch):
    monkeypatch.setattr(arena, "MOST_BYTES", 0)
    kept = Decoder(compile=True)
    for new in (10, 11, 11, 10):
        rows(kept, new=new)
    assert counted(kept)["storage reused"] == 1
    assert len(kept._arena) == 1


def test_sampling_and_greedy_calls_have_shapes_of_their_own(taped):
    plain, kept = Decoder(seed=SEED), Decoder(seed=SEED, compile=True)
    for do_sample in (False, True, False, True):
        assert rows(kept, do_sample=do_sample) == rows(plain, do_sample=do_sample)
    assert counted(kept)["storage reused"] == 2


def test_calls_in_threads_do_not_share_a_shape(taped):
    plain, kept = Decoder(), Decoder(compile=True)
    expected = {name: rows(plain, prompts) for name, prompts in (("a", PROMPTS), ("b", OTHER))}
    wrong = []

    def work(name, prompts):
        for _ in range(3):
            if rows(kept, prompts) != expected[name]:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=pair) for pair in (("a", PROMPTS), ("b", OTHER))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_call_that_failed_is_forgotten(taped):
    class Broken(drafts.Random):
        fails = False
        capabilities = DrafterCapabilities(graph_safe=True)

        def draft(self, call, budget):
            if self.fails:
                raise RuntimeError("out of memory")
            return super().draft(call, budget)

    kept = Decoder(Broken(drafts.Tree((-1, 0))), compile=True)
    expected = rows(kept)
    Broken.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        rows(kept, new=21)
    Broken.fails = False
    assert rows(kept) == expected
    assert len(kept._arena) == 1


class Lazy(drafts.Random):
    """Makes a tensor in its first round, and counts in it."""

    capabilities = DrafterCapabilities(graph_safe=True)

    def begin(self, call, prefill):
        session = super().begin(call, prefill)
        propose, session.rounds, session.counts = session.propose, 0, []

        def counting(budget):
            if session.rounds == 1:
                session.counts.append(torch.zeros((), dtype=torch.long))
            session.rounds += 1
            for count in session.counts:
                count += 1
            return propose(budget)

        session.propose = counting
        return session


def test_state_that_a_part_makes_in_its_first_round_is_not_taken_over(taped):
    kept = Decoder(Lazy(drafts.Tree((-1, 0))), compile=True)
    for _ in range(2):
        assert rows(kept) == rows(Decoder())
    assert "storage reused" not in counted(kept)


def test_a_changed_option_is_another_shape(taped):
    draft = DRAFTS["recycling"]()
    kept = Decoder(draft, compile=True)
    expected = rows(kept)
    draft.nodes = 3
    assert rows(kept) == expected
    assert "storage reused" not in counted(kept)


def penalised():
    return [lp.RepetitionPenaltyLogitsProcessor(1.4), lp.NoRepeatNGramLogitsProcessor(3)]


@pytest.mark.parametrize("make", [penalised, lambda: [lp.ForcedEOSTokenLogitsProcessor(26, 4)]])
def test_processors_of_each_call_are_of_one_shape_if_their_tables_are(make, taped):
    plain, kept = Decoder("recycling"), Decoder("recycling", compile=True)
    for prompts in (PROMPTS, OTHER, PROMPTS):
        options = {"prompts": prompts, "new": 20}
        assert rows(kept, processors=make(), **options) == rows(plain, processors=make(), **options)
    assert counted(kept)["storage reused"] == 2
    warper = [lp.RepetitionPenaltyLogitsProcessor(1.1)]
    assert rows(kept, processors=warper) == rows(plain, processors=warper)


def test_options_that_alternate_keep_their_graphs_in_one_storage(taped):
    plain, kept = Decoder(seed=1), Decoder(seed=1, compile=True)
    for temperature in (0.7, 1.3, 0.7, 1.3):
        options = {"do_sample": True, "processors": [lp.TemperatureLogitsWarper(temperature)]}
        assert rows(kept, **options) == rows(plain, **options)
    assert counted(kept)["storage reused"] == 2
    assert counted(kept)["storage allocated"] == 4


def change_a_hook(model):
    model.register_forward_hook(lambda module, args, output: None)


def change_an_option(model):
    model.scale = 2.0


def move_a_weight(model):
    parameter = next(model.parameters())
    parameter.data = parameter.data.clone()


@pytest.mark.parametrize("change", [change_a_hook, change_an_option, move_a_weight])
def test_a_changed_model_is_captured_again(change, taped):
    model = copy.deepcopy(text_model("llama"))
    ids = tiny.prompts(3)
    kept = Decoder(compile=True)
    for _ in range(2):
        mmdecode.generate(model, **ids, max_new_tokens=8, decoder=kept)
    before = counted(kept)
    assert before["storage reused"] == 1
    change(model)
    mmdecode.generate(model, **ids, max_new_tokens=8, decoder=kept)
    assert counted(kept)["graph captured"] > before["graph captured"]


def test_numbers_that_overflowed_in_one_call_are_not_read_by_the_next(taped):
    plain, kept = Decoder(), Decoder(compile=True)
    rows(kept)
    for storage in kept._arena._kept[0].storage.tensors:
        storage.fill_(torch.nan)
    assert rows(kept, OTHER) == rows(plain, OTHER)
    assert counted(kept)["storage reused"] == 1


def test_a_decoder_that_is_gone_frees_its_storage(taped):
    kept = Decoder("recycling", compile=True)
    rows(kept)
    storage = [weakref.ref(tensor) for tensor in kept._arena._kept[0].storage.tensors]
    assert all(one() is not None for one in storage)
    gc.collect()
    gc.disable()
    try:
        del kept
        assert all(one() is None for one in storage)
    finally:
        gc.enable()


# mutants


def left_out(index):
    """One of the call's tensors is not copied."""

    def move_to(self, other):
        for at, (mine, kept) in enumerate(zip(self.own, other.own, strict=True)):
            if at != index and mine.data_ptr() != kept.data_ptr():
                arena._whole(kept).copy_(arena._whole(mine))
            mine.set_(kept)

    return move_to


def without_copies(patch):
    patch.setattr(State, "part_from", lambda self, given: None)


def the_callers_own(patch):
    without_copies(patch)
    patch.setattr("mmdecode.decoder.aliases", lambda tree: tree)


def test_a_tensor_that_is_not_copied_is_found(taped, monkeypatch):
    """Most of them: some are the same in every call, or written before they are read."""
    found = []
    for index in range(30):
        kept = Decoder("recycling", compile=True, seed=SEED)
        rows(kept, do_sample=True)
        with monkeypatch.context() as patch:
            patch.setattr(State, "move_to", left_out(index))
            options = {"prompts": OTHER, "do_sample": True}
            try:
                wrong = rows(kept, **options) != rows(Decoder("recycling", seed=SEED), **options)
            except Exception:
                wrong = True
        found.append(wrong)
    assert sum(found) >= 5


@pytest.mark.parametrize("mutant", [without_copies, the_callers_own])
def test_storage_shared_with_the_caller_is_found(mutant, taped, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        test_inputs_and_results_of_earlier_calls_stay_as_they_were("whisper", taped)

"""Tier A: whatever is drafted, every row is byte for byte what a plain loop generates for it."""

import itertools

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation import logits_process as lp

from mmdecode.accept.ensemble import Ensemble
from mmdecode.accept.exact import Coupled, GreedyMatch, SampleMatch
from mmdecode.accept.rejection import Rejection
from mmdecode.accept.relative_threshold import RelativeThreshold
from mmdecode.accept.typical import Typical
from mmdecode.adapters.audio.whisper_timestamps import NODE_PROCESSORS
from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.jacobi import Jacobi
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.none import NoDraft
from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.processors import Processors
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.engine.target_logits import TargetLogits
from mmdecode.errors import IncompatibleError
from mmdecode.guide.cfg import CFG
from mmdecode.guide.linear import Linear, plausible
from mmdecode.testing import check_accept, check_adapter, check_draft, check_guide, drafts
from mmdecode.testing.checks import (
    PROMPTS,
    SEED,
    assert_lossless,
    bigram,
    distribution_of,
    run_rows,
)
from mmdecode.testing.table import Table, TableAdapter, decode, left_pad, new_tokens
from tests.exactness.windows import window

EOS = 4
MODEL = Table(5, seed=3, bias={0: 1.0, EOS: -0.5})
OTHER = Table(5, seed=8)
TREE = Tree((-1, -1, 0, 0, 1, 2, 5))
modes = pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])

DRAFTS = {
    "none": NoDraft,
    "empty": drafts.TestDrafter,
    "random_chain": drafts.Random,
    "ragged_chain": lambda: drafts.Random(ragged=True),
    "zeros": lambda: drafts.Constant(0),
    "all_eos": lambda: drafts.Constant(EOS),
    "static_tree": lambda: drafts.Random(TREE),
    "ragged_tree": lambda: drafts.Random(TREE, ragged=True),
    "equal_siblings": lambda: drafts.Random(Tree((-1,) * 8)),
    "random_trees": drafts.RandomTrees,
    "full_tree": lambda: drafts.FullTree(2),
    "argmax_chain": lambda: drafts.Bigram(bigram(5), kinds=("deterministic",)),
    "iid_chain": lambda: drafts.Bigram(bigram(5), kinds=("iid",)),
    "coupled_chain": lambda: drafts.Bigram(bigram(5), kinds=("coupled",), ragged=True),
    "jacobi_coupled": lambda: window(4, "coupled"),
    "jacobi_redraw": lambda: window(4, "redraw"),
    "jacobi_tree": lambda: Jacobi(5, siblings=2, levels=2),
    "lookup": PromptLookup,
    "assistant": lambda: Assistant(OTHER, length=3),
    "assistant_is_target": lambda: Assistant(MODEL),
}


def cfg_distribution(prompt, new):
    conditional = MODEL.target_logits([*prompt, *new]).log_softmax(-1)
    unconditional = MODEL.target_logits([prompt[-1], *new]).log_softmax(-1)
    return 2.0 * (conditional - unconditional) + unconditional


def negative_distribution(prompt, new):
    conditional = MODEL.target_logits([*prompt, *new]).log_softmax(-1)
    unconditional = MODEL.target_logits([2, 0, 0, 1, 3, 3, 1, *new]).log_softmax(-1)
    return 1.5 * (conditional - unconditional) + unconditional


def contrast_distribution(prompt, new):
    main = MODEL.target_logits([*prompt, *new])
    combined = 2.0 * main
    combined = combined + -1.0 * MODEL.target_logits([*prompt, *new], salt=77)
    return plausible(combined, main, 0.2)


def two_branch_distribution(prompt, new):
    combined = 1.5 * MODEL.target_logits([*prompt, *new])
    combined = combined + -0.75 * MODEL.target_logits([prompt[-1], *new], salt=5)
    return combined + 0.25 * OTHER.target_logits([*prompt, *new])


def two_branches():
    other = BranchSpec(name="a", prompt="last_token", transform="salt", transform_options={"by": 5})
    other_model = BranchSpec(name="b", model=OTHER)
    return Linear([other, other_model], [1.5, -0.75, 0.25])


GUIDES = {
    "none": (lambda: None, distribution_of(MODEL)),
    "cfg": (lambda: CFG(2.0), cfg_distribution),
    "cfg_negative_ids": (
        lambda: CFG(1.5, torch.tensor([[2, 0, 0, 1, 3, 3, 1]])),
        negative_distribution,
    ),
    "linear_with_cut": (
        lambda: Linear.contrast(
            BranchSpec(name="far", transform="salt", transform_options={"by": 77}), 1.0, 0.2
        ),
        contrast_distribution,
    ),
    "two_branches": (two_branches, two_branch_distribution),
}


class Penalty(LogitsProcessor):
    """Of a type the engine does not know: halves what occurred before, by count."""

    def __call__(self, input_ids, scores):
        counts = torch.zeros_like(scores)
        counts.scatter_add_(1, input_ids.clamp(0, 4), torch.ones_like(input_ids).to(scores))
        return scores - 0.25 * counts


class StopOnSum(StoppingCriteria):
    """Of a type the engine does not know: ends a row whose ids add up to a multiple of seven."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.sum(1) % 7 == 0


class StopOnPair(StoppingCriteria):
    """Ends a row whose last two tokens are equal."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == input_ids[:, -2]


def whisper_processor(begin_index):
    config = GenerationConfig(eos_token_id=1)
    config.no_timestamps_token_id = 2  # ids 3 and 4 are timestamps
    config.max_initial_timestamp_index = 1
    return lp.WhisperTimeStampLogitsProcessor(config, begin_index)


WIDTH = max(map(len, PROMPTS))
PROCESSORS = {
    "warpers": lambda: [lp.TemperatureLogitsWarper(0.7), lp.TopKLogitsWarper(3)],
    "top_p": lambda: [lp.TopPLogitsWarper(0.8), lp.TemperatureLogitsWarper(1.3)],
    "min_new": lambda: [lp.MinNewTokensLengthLogitsProcessor(WIDTH, 5, EOS)],
    "min_length": lambda: [lp.MinLengthLogitsProcessor(WIDTH + 4, EOS)],
    "suppress_at_begin": lambda: [lp.SuppressTokensAtBeginLogitsProcessor([0, 2], WIDTH)],
    "whisper": lambda: [whisper_processor(WIDTH)],
    "unknown": lambda: [Penalty()],
    "no_repeat": lambda: [lp.NoRepeatNGramLogitsProcessor(2)],
    "mixed": lambda: [lp.TemperatureLogitsWarper(0.7), Penalty(), lp.TopKLogitsWarper(2)],
}


@pytest.mark.one_in(9)
@modes
@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_no_draft_changes_a_token_under_any_guide(draft, guide, do_sample):
    make, distribution = GUIDES[guide]
    decoder = Decoder(DRAFTS[draft](), make(), seed=SEED)
    rows = assert_lossless(decoder, MODEL, distribution, do_sample=do_sample, eos=[EOS])
    assert len({t for row in rows for t in row}) > 2  # the case says something


@pytest.mark.one_in(6)
@modes
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize(
    "draft", ["none", "random_chain", "random_trees", "full_tree", "lookup", "assistant_is_target"]
)
def test_processors_see_the_prefix_of_each_node(draft, processors, do_sample):
    decoder = Decoder(DRAFTS[draft](), seed=SEED)
    options = {"do_sample": do_sample, "eos": [EOS], "processors": PROCESSORS[processors]}
    assert_lossless(decoder, MODEL, distribution_of(MODEL), **options)


@modes
@pytest.mark.parametrize("draft", ["random_chain", "static_tree", "full_tree", "assistant"])
def test_processors_run_on_the_guided_distribution(draft, do_sample):
    decoder = Decoder(DRAFTS[draft](), CFG(2.0), seed=SEED)
    for processors in (PROCESSORS["mixed"], PROCESSORS["warpers"]):
        assert_lossless(
            decoder, MODEL, cfg_distribution, do_sample=do_sample, processors=processors
        )


@pytest.mark.one_in(3)
@modes
@pytest.mark.parametrize("draft", ["ragged_chain", "random_trees", "full_tree", "lookup"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_do_not_depend_on_their_batch(size, draft, do_sample):
    for order in itertools.islice(itertools.permutations(PROMPTS, size), 0, None, 7):
        decoder = Decoder(DRAFTS[draft](), seed=SEED)
        assert_lossless(
            decoder, MODEL, distribution_of(MODEL), order, do_sample=do_sample, eos=[EOS]
        )


@modes
def test_rows_that_are_right_and_rows_that_are_wrong_share_a_batch(do_sample):
    distribution = distribution_of(MODEL)
    right = run_rows(Decoder(seed=SEED), MODEL, PROMPTS, do_sample=do_sample, eos=[EOS])
    for wrong_at in ([], [0], [1, 2], [4], [11]):
        for length in (1, 2, 5, 40):
            decoder = Decoder(drafts.Known(right, length, wrong_at), seed=SEED)
            assert_lossless(decoder, MODEL, distribution, do_sample=do_sample, eos=[EOS])


def test_a_right_draft_is_accepted_whole():
    right = run_rows(Decoder(), MODEL, PROMPTS)
    decoder = Decoder(drafts.Known(right, length=5))
    assert run_rows(decoder, MODEL, PROMPTS) == right
    # 12 tokens: one at prefill, then 5 drafted and 1 more, then the last 5
    assert decoder.stats.passes == 2
    assert decoder.stats.histogram == [0, 0, 0, 0, 4, 4]


@modes
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8])
def test_the_length_cap_truncates_a_block(limit, do_sample):
    for draft in ("full_tree", "assistant_is_target", "random_trees", "jacobi_coupled"):
        decoder = Decoder(DRAFTS[draft](), seed=SEED)
        rows = assert_lossless(
            decoder, MODEL, distribution_of(MODEL), do_sample=do_sample, max_new_tokens=limit
        )
        assert {len(row) for row in rows} == {limit}


@modes
@pytest.mark.parametrize("eos", [[0], [1, 3], [2]])
def test_an_end_of_sequence_truncates_a_block(eos, do_sample):
    free = run_rows(Decoder(seed=SEED), MODEL, PROMPTS, do_sample=do_sample)
    for length in (3, 8):
        decoder = Decoder(drafts.Known(free, length), seed=SEED)  # drafts on after the end
        assert_lossless(decoder, MODEL, distribution_of(MODEL), do_sample=do_sample, eos=eos)


@modes
@pytest.mark.parametrize("criteria", [StopOnSum, StopOnPair], ids=["sum", "pair"])
def test_a_stop_criterion_of_unknown_type_truncates_a_block(criteria, do_sample):
    free = run_rows(Decoder(seed=SEED), MODEL, PROMPTS, do_sample=do_sample)
    for draft in (drafts.Known(free, 6), drafts.FullTree(2), drafts.Random(), PromptLookup()):
        decoder = Decoder(draft, seed=SEED)
        rows = assert_lossless(
            decoder,
            MODEL,
            distribution_of(MODEL),
            do_sample=do_sample,
            criteria=lambda: [criteria()],
        )
        assert {len(row) for row in rows} != {12}


@modes
def test_rows_that_differ_in_an_input_alone_are_kept_apart(do_sample):
    salts = torch.tensor([3, 1, 2])
    prompts = [[1, 2]] * 3
    for draft in ("none", "random_trees", "full_tree", "assistant_is_target"):
        decoder = Decoder(DRAFTS[draft](), CFG(2.0), seed=SEED)
        options = {"inputs": {"salt": salts}, "do_sample": do_sample, "request": list("abc")}
        rows = run_rows(decoder, MODEL, prompts, **options)
        assert len({tuple(row) for row in rows}) == 3
        for row, salt, name in zip(rows, salts, "abc", strict=True):
            options = {"inputs": {"salt": salt[None]}, "do_sample": do_sample, "request": [name]}
            assert run_rows(Decoder(None, CFG(2.0), seed=SEED), MODEL, [[1, 2]], **options) == [row]


def test_a_long_output_crosses_cache_buckets():
    model = Table(5, seed=21)
    for draft in (drafts.FullTree(2), drafts.RandomTrees(9), Assistant(model), PromptLookup()):
        for do_sample in (False, True):
            assert_lossless(
                Decoder(draft, seed=SEED),
                model,
                distribution_of(model),
                PROMPTS[:2],
                do_sample=do_sample,
                max_new_tokens=80,
            )


def test_equal_logits_go_to_the_lowest_id():
    model = Table(5, sharpness=0.0)  # all logits are zero
    rows = run_rows(Decoder(drafts.FullTree(2)), model, PROMPTS)
    assert rows == [[0] * 12] * 4


@modes
def test_recorded_scores_are_those_of_the_committed_tokens(do_sample):
    config = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    ids, mask = left_pad(PROMPTS)
    options = {"mask": mask, "do_sample": do_sample, "eos": EOS, "request": list("abcd"), **config}
    for name in ("mixed", "warpers"):
        plain, drafted = (
            decode(MODEL, ids, Decoder(d, seed=SEED), processors=PROCESSORS[name](), **options)
            for d in (None, drafts.RandomTrees())
        )
        for field in ("scores", "logits"):
            pairs = zip(getattr(plain, field), getattr(drafted, field), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


# Known processors at all nodes at once are the stock ones, one prefix at a time


@pytest.mark.parametrize("begin_index", [3, 4, 6])
def test_the_vectorised_timestamp_rules_are_the_stock_ones(begin_index):
    generator = torch.Generator().manual_seed(begin_index)
    vocab, prompt = 9, 3  # text 0..3, eos 4, no_timestamps 5, timestamps 6..8
    config = GenerationConfig(eos_token_id=4)
    config.no_timestamps_token_id = 5
    for cap in (None, 1):
        config.max_initial_timestamp_index = cap
        stock = lp.WhisperTimeStampLogitsProcessor(config, begin_index)
        for length in (0, 1, 2, 4):
            decoder_rows = 40
            nodes = 12
            ids = torch.randint(vocab, (decoder_rows, prompt + length), generator=generator)
            limits = torch.arange(nodes) + 1
            parents = torch.rand(decoder_rows, nodes, generator=generator) * limits
            parents = parents.long() - 1
            tokens = torch.randint(vocab, (decoder_rows, nodes), generator=generator)
            proposal = Proposal(tokens=tokens, kind="deterministic", parents=parents)
            logits = torch.randn(decoder_rows, nodes + 1, vocab, generator=generator) * 3
            call = context(ids, prompt)
            found = TargetLogits(logits, call, proposal, Processors([stock], NODE_PROCESSORS)).all()
            for b in range(decoder_rows):
                for row in range(nodes + 1):
                    path, node = [], row - 1
                    while node >= 0:
                        path.insert(0, int(tokens[b, node]))
                        node = int(parents[b, node])
                    if prompt + length + len(path) < begin_index:
                        continue  # generate never asks there
                    prefix = torch.cat([ids[b], torch.tensor(path, dtype=torch.long)])[None]
                    expected = stock(prefix, logits[b, row][None])[0]
                    assert torch.equal(found[b, row], expected), (prefix, found[b, row], expected)


def context(ids, prompt):
    """A context whose rows have generated what stands after ``prompt`` columns."""
    from mmdecode.engine.call import Call

    # what stands after the end is not to be read
    return Call.of(ids[:, :prompt], generated=ids[:, prompt:], max_new_tokens=40, pad_id=8)


# Refusals, neutral settings, and the public checks on our own parts


@pytest.mark.parametrize("rule", [SampleMatch, Rejection, Coupled])
def test_a_sampling_rule_is_refused_in_greedy_generation(rule):
    draft = drafts.Bigram(bigram(5), kinds=("iid",))
    decoder = Decoder(draft, accept=rule())
    with pytest.raises(IncompatibleError, match=rule.__name__) as caught:
        run_rows(decoder, MODEL, PROMPTS, do_sample=False)
    assert "do_sample=False" in str(caught.value)


def test_the_greedy_rule_is_refused_when_sampling():
    with pytest.raises(IncompatibleError, match=r"GreedyMatch.*do_sample=True"):
        run_rows(Decoder(accept=GreedyMatch()), MODEL, PROMPTS, do_sample=True)


@pytest.mark.parametrize("kind", ["deterministic", "coupled"])
def test_rejection_is_refused_for_drafts_without_a_distribution(kind):
    draft = drafts.Bigram(bigram(5), kinds=(kind,))
    with pytest.raises(IncompatibleError, match=r"Rejection.*Bigram"):
        Decoder(draft, accept=Rejection())


def test_fastest_takes_the_exact_rule_for_the_kind():
    run = {"deterministic": SampleMatch, "iid": Rejection}
    for kind, expected in run.items():
        decoder = Decoder(drafts.Bigram(bigram(5), kinds=(kind,)), accept="fastest")
        rule, chosen = decoder.resolve_rule(do_sample=True)
        assert (type(rule), chosen) == (expected, kind)
        assert type(decoder.resolve_rule(do_sample=False)[0]) is GreedyMatch
    decoder = Decoder(drafts.Siblings(bigram(5)), accept="fastest")
    rule, chosen = decoder.resolve_rule(do_sample=True)
    assert (type(rule), chosen) == (Rejection, "without_replacement")


@modes
def test_neutral_guides_leave_every_byte(do_sample):
    spec = BranchSpec(name="x", prompt="last_token")
    plain = run_rows(Decoder(seed=SEED), MODEL, PROMPTS, do_sample=do_sample)
    for guide in (CFG(1.0), Linear.contrast(spec, 0.0, 0.0), Linear([spec], [1.0, 0.0])):
        assert guide.neutral
        found = run_rows(Decoder(None, guide, seed=SEED), MODEL, PROMPTS, do_sample=do_sample)
        assert found == plain


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["jacobi_coupled", "lookup", "assistant", "random_trees"])
def test_our_drafts_pass_the_public_check(name):
    check_draft(DRAFTS[name], learns=name == "random_trees")  # its generator goes on


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "rule", [GreedyMatch, Coupled, SampleMatch, Rejection, Typical, RelativeThreshold, Ensemble]
)
def test_our_rules_pass_the_public_check(rule):
    check_accept(rule)


def test_our_guides_pass_the_public_check():
    check_guide(lambda: CFG(2.0), lambda: CFG(1.0))
    check_guide(two_branches)


def test_the_table_adapter_passes_the_public_check():
    ids, mask = left_pad(PROMPTS)
    inputs = {"salt": torch.arange(4)}
    check_adapter(TableAdapter, MODEL, ids, mask, inputs, tolerance=0.0)


def test_generated_rows_are_read_without_their_padding():
    assert new_tokens(torch.tensor([[9, 1, 0, 5], [9, 1, 0, 0]]), 1, 5) == [[1, 0], [1, 0, 0]]

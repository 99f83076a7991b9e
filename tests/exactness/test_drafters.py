"""Drafters that need no training: what each proposes, next to its output that never changes."""

import math
import random

import pytest
import torch
from torch import nn

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.draft.adaptive import Adaptive
from mmdecode.draft.layer_skip import LayerSkip, shallow
from mmdecode.draft.lookup import PromptLookup, suffix_matches
from mmdecode.draft.none import NoDraft
from mmdecode.draft.recycling import Recycling
from mmdecode.draft.source import Source
from mmdecode.engine.contracts import BranchOutput
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.errors import IncompatibleError, InputError, OptionError
from mmdecode.testing import check_draft, drafts
from mmdecode.testing.checks import (
    PROMPTS,
    SEED,
    assert_lossless,
    bigram,
    distribution_of,
    run_rows,
)
from mmdecode.testing.table import Table, TableAdapter, call_of
from tests.support.clock import call_after
from tests.support.sessions import Wrapped

MODEL = Table(5, seed=3, bias={0: 1.0, 4: -0.5})
SOURCE = [0, 1, 2, 3, 1, 1, 0, 2, 4, 4, 1, 2]
DRAFTS = {
    "recycling": Recycling,
    "recycling_kept": lambda: Recycling(keep=True),
    "source": lambda: Source(ids=[SOURCE]),
    "sources": lambda: Source(ids=[[SOURCE[::-1], SOURCE, [], SOURCE[2:]]]),
    "layer_skip": lambda: LayerSkip(exit_layer=1),
    "adaptive": lambda: Adaptive(Recycling(), (1,)),
}
modes = pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])


@pytest.mark.one_in(20)
@pytest.mark.parametrize("name", DRAFTS)
def test_they_pass_the_public_check(name):
    check_draft(DRAFTS[name], learns=name == "recycling_kept")


# Token recycling


def recycled(draft, tokens, tree, logits, root):
    """The session after one round in which ``tokens`` were scored below ``root``."""
    call = call_of([[0]] * len(tokens))
    vocab = logits.shape[-1]
    session = draft.begin(call, BranchOutput(logits=torch.zeros(len(tokens), 1, vocab)))
    call.rows.ids[:, 1] = torch.tensor(root)
    call.rows.length.fill_(1)
    session.propose(9)
    proposal = Proposal(tokens=torch.tensor(tokens), kind="deterministic", tree=tree)
    session.observe(proposal, BranchOutput(logits=logits), None)
    return session


def test_the_table_holds_the_best_of_each_scored_node_and_the_deepest_of_equals():
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    draft = Recycling(ranks=3)
    tree = Tree((-1, -1, 0, 1))
    session = recycled(draft, [[3, 5, 3, -1], [1, 2, 6, 1]], tree, logits, [4, 1])
    best = logits.topk(3, dim=-1).indices.tolist()
    rows = session.table[:, :7].tolist()
    none = [-1] * 3
    wanted = {3: best[0][3], 4: best[0][0], 5: best[0][2]}  # 3 was scored twice, -1 not at all
    assert rows[0] == [wanted.get(token, none) for token in range(7)]
    wanted = {1: best[1][4], 2: best[1][2], 6: best[1][3]}
    assert rows[1] == [wanted.get(token, none) for token in range(7)]


def test_a_kept_table_is_one_for_all_rows():
    logits = torch.randn(2, 2, 7, generator=torch.Generator().manual_seed(0))
    draft = Recycling(ranks=2, keep=True)
    session = recycled(draft, [[3], [3]], Tree((-1,)), logits, [1, 2])
    best = logits.topk(2, dim=-1).indices.tolist()
    wanted = {1: best[0][0], 2: best[1][0], 3: best[1][1]}  # of equals the last row decides
    assert session.table[:, :7].tolist() == [[wanted.get(t, [-1, -1]) for t in range(7)]]


def test_a_tree_is_read_off_the_table():
    paths = [(0,), (1,), (0, 0), (0, 2), (1, 1), (0, 2, 0), (3,)]
    draft = Recycling(ranks=4, paths=paths)
    logits = torch.full((1, 3, 3), -9.0)  # three tokens: rank 3 never exists
    for row, order in enumerate([[1, 2, 0], [2, 0, 1], [0, 1, 2]]):  # after 0, 1 and 2
        logits[0, row, order] = torch.tensor([3.0, 2.0, 1.0])
    session = recycled(draft, [[1, 2]], Tree((-1, -1)), logits, [0])
    proposal = session.propose(9)
    after = {0: [1, 2, 0, -1], 1: [2, 0, 1, -1], 2: [0, 1, 2, -1]}
    tree, order = Tree.from_paths(paths)
    assert proposal.tree == tree
    for node, path in enumerate(order):
        token = 0
        for rank in path:
            token = after[token][rank]
        assert int(proposal.tokens[0, node]) == token


@modes
def test_a_kept_table_changes_no_token_of_a_later_call(do_sample):
    draft = Recycling(keep=True)
    decoder = Decoder(draft, seed=SEED)
    first = assert_lossless(decoder, MODEL, distribution_of(MODEL), do_sample=do_sample)
    cold = decoder.stats.as_dict()
    other = Table(5, seed=77)
    assert_lossless(decoder, other, distribution_of(other), do_sample=do_sample)
    decoder.stats.reset()
    assert first == assert_lossless(decoder, MODEL, distribution_of(MODEL), do_sample=do_sample)
    assert decoder.stats.as_dict() != cold


def test_a_table_that_is_not_kept_is_forgotten():
    decoder, accepted = Decoder(Recycling()), []
    for model in (MODEL, Table(5, seed=77), MODEL):
        run_rows(decoder, model, PROMPTS)
        accepted.append(decoder.stats.accepted)
        decoder.stats.reset()
    assert accepted[0] == accepted[2] > 0


def test_what_repeats_by_the_last_token_is_recycled_whole():
    model = Table(5, sharpness=0.0, bias={2: 1.0})  # always 2
    decoder = Decoder(Recycling(paths=[(0,), (0, 0), (0, 0, 0)]))
    [row] = run_rows(decoder, model, [[1]], max_new_tokens=20)
    assert row == [2] * 20
    assert decoder.stats.passes == 1 + 5  # a round to see what follows 2, then 4 tokens a pass


@modes
def test_a_prompt_may_end_with_an_id_that_is_never_generated(do_sample):
    prompts, options = [[1, 7], [9]], {"do_sample": do_sample, "max_new_tokens": 20}
    expected = run_rows(Decoder(seed=SEED), MODEL, prompts, **options)
    assert run_rows(Decoder(Recycling(), seed=SEED), MODEL, prompts, **options) == expected


# Lookup in a text


def test_suffix_matches_counts_equal_tokens_before_a_column():
    ids = torch.tensor([[1, 2, 3, 1, 2, 4, 2]])
    real = torch.ones_like(ids).bool()
    found = suffix_matches(ids, real, torch.tensor([[3, 1, 2]]))
    assert found.tolist() == [[0, 0, 2, 0, 0, 3, 0]]
    real[0, 0] = False
    assert suffix_matches(ids, real, torch.tensor([[3, 1, 2]])).tolist() == [[0, 0, 1, 0, 0, 3, 0]]


LONG = run_rows(Decoder(), Table(40, seed=5), PROMPTS, max_new_tokens=60)


def source_rounds(texts, **options):
    model = Table(40, seed=5)
    decoder = Decoder(Source(**options))
    ids = {"mm_inputs": {"source_ids": texts}}
    assert run_rows(decoder, model, PROMPTS, max_new_tokens=60, **ids) == LONG
    return decoder.stats.rounds / len(PROMPTS)


EDITS = {
    # what the output is made from, and the most rounds of a row; 59 tokens in blocks of 17 are 4
    "same": (lambda row: row, 4),
    "replaced": (lambda row: [*row[:20], (row[20] + 1) % 40, *row[21:]], 6),
    "missing": (lambda row: [*row[:20], *row[22:]], 8),
    "superfluous": (lambda row: [*row[:20], 7, 7, *row[20:]], 8),
    "later": (lambda row: [39, 38, 37, *row], 5),
    "none": (lambda row: [], 59),
}


@pytest.mark.parametrize("edit", EDITS)
def test_the_source_is_found_again_after_an_edit(edit):
    change, most = EDITS[edit]
    assert source_rounds([change(row) for row in LONG], length=16) <= most


def test_a_row_reads_its_own_source():
    assert source_rounds(LONG) < source_rounds(LONG[::-1]) / 3
    texts = [torch.tensor(row) for row in LONG]
    assert source_rounds(texts) == source_rounds(LONG)


def changed(row, *at):
    return [token if number not in at else (token + 1) % 40 for number, token in enumerate(row)]


def test_the_text_that_matches_best_is_copied_from():
    # no text is right to the end, but one of them always is
    texts = [[changed(row, *range(20, 40)), changed(row, 9), []] for row in LONG]
    assert source_rounds(texts, length=16) <= 6
    assert source_rounds([row[:1] for row in texts], length=16) > 15
    tensors = [[torch.tensor(text) for text in row] for row in texts]
    assert source_rounds(tensors, length=16) == source_rounds(texts, length=16)


def test_of_texts_that_match_alike_the_one_that_was_right_is_copied_from():
    # both match after a common stretch; only the second was right before it
    texts = [[changed(row, 3, 30, 50), row] for row in LONG]
    assert source_rounds(texts, length=16) <= 5
    assert source_rounds([row[::-1] for row in texts], length=16) <= 4
    own = source_rounds([[changed(row, 30), changed(row, 3, 50)] for row in LONG], length=16)
    assert own <= 7


def test_each_text_has_a_slot_of_its_own():
    # the second one begins later, and is wrong again and again
    wrong = range(6, 60, 7)
    texts = [[[row[0]], [*row[40:52], *changed(row, *wrong)]] for row in LONG]
    alone = [row[1:] for row in texts]
    assert source_rounds(texts, length=16) <= source_rounds(alone, length=16) + 2


def test_no_texts_and_many_change_no_token():
    dice = random.Random(0)
    for _ in range(5):
        texts = [
            [[dice.randrange(40) for _ in range(dice.randint(0, 70))] for _ in range(count)]
            for count in (0, 1, 3, 5)
        ]
        source_rounds(texts, length=7, ngram=2, least=dice.randint(0, 2))


def test_of_equal_matches_the_nearest_is_taken():
    model = Table(3, seed=5)  # every token occurs everywhere
    right = run_rows(Decoder(), model, [[1], [2]], max_new_tokens=61)
    decoder = Decoder(Source(length=4, ngram=1, ids=right))
    assert run_rows(decoder, model, [[1], [2]], max_new_tokens=61) == right
    assert decoder.stats.rounds == 2 * 60 // 5


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (None, "mm_inputs"),
        ([[1], [2], [3]], "3 source texts for 4 rows"),
        ([[1, 40]], "id 40"),
        ([[[1, 2], [3, 41]]], "id 41"),
        ([[[1, 2], 3]], "one sequence of ids per row"),
        ([1, 2, 3], "one sequence of ids per row"),
        (torch.tensor([1, 2, 3]), "one sequence of ids per row"),
        (4, "one sequence of ids per row"),
    ],
)
def test_a_source_that_does_not_fit_is_refused(texts, says):
    with pytest.raises(InputError, match=says):
        if texts is None:
            run_rows(Decoder(Source()), MODEL, PROMPTS)
        else:
            source_rounds(None, ids=texts)


# Layers of the model's own


@modes
@pytest.mark.parametrize("options", [{"exit_layer": 2}, {"skip": ()}], ids=["exit", "skip"])
def test_the_whole_model_accepts_all_that_it_drafts(options, do_sample):
    decoder = Decoder(LayerSkip(**options, length=3), seed=SEED)
    assert_lossless(decoder, MODEL, distribution_of(MODEL), do_sample=do_sample)
    assert decoder.stats.accepted == decoder.stats.drafted > 0


class Layer(nn.Module):
    def forward(self, x):
        return [*x, self.index]


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Layer() for _ in range(4))
        for index, layer in enumerate(self.parts):
            layer.index = index

    def forward(self):
        x = []
        for layer in self.parts:
            x = layer(x)
        return x


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Stack()

    def forward(self):
        return self.body()


class StackAdapter:
    def __init__(self, model, layers):
        self.model, self._layers = model, layers

    def layers(self):
        return self._layers


def test_a_view_runs_its_layers_and_leaves_the_model_alone():
    model = Whole()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    view = shallow(StackAdapter(model, model.body.parts), [0, 2])
    assert view() == [0, 2] and model() == [0, 1, 2, 3]
    assert view.body.parts[1] is model.body.parts[2]
    assert before == {name: dict(vars(module)) for name, module in model.named_modules()}


def test_a_view_of_a_wrapped_module_does_not_run_the_whole_of_it():
    model = Whole()
    for module in (model, model.body):  # as accelerate wraps: an attribute, bound to the original
        module._old_forward, module._hf_hook = module.forward, object()
        module.forward = lambda module=module: type(module).forward(module)
    assert shallow(StackAdapter(model, model.body.parts), [1])() == [1]
    assert model() == [0, 1, 2, 3]


def test_hooks_of_a_view_are_its_own():
    model, called = Whole(), []
    model.body.register_forward_hook(lambda *_: called.append("model"))
    view = shallow(StackAdapter(model, model.body.parts), [0])
    view.body.register_forward_pre_hook(lambda *_: called.append("view"))
    model()
    assert called == ["model"]
    view()
    assert called == ["model", "view"]


def test_layers_that_are_in_no_list_are_refused():
    model = Whole()
    with pytest.raises(IncompatibleError, match=r"LayerSkip.*StackAdapter"):
        shallow(StackAdapter(model, list(model.body.parts)[:3]), [0])


def test_layers_that_do_not_exist_are_refused():
    for options in ({"exit_layer": 3}, {"exit_layer": 0}, {"skip": [2]}, {"skip": [0, 1]}):
        with pytest.raises(OptionError, match="2 layers"):
            run_rows(Decoder(LayerSkip(**options)), MODEL, PROMPTS)
    for options in ({}, {"exit_layer": 1, "skip": [0]}, {"exit_layer": 1, "length": -1}):
        with pytest.raises(OptionError):
            LayerSkip(**options)
    assert LayerSkip.from_options(skip="3/5").skip == [3, 5]


def test_skipping_is_refused_where_layers_differ_by_index():
    adapter = TableAdapter(MODEL)
    adapter.windows = {"full_attention": None, "sliding_attention": 4}
    call = call_of(PROMPTS, adapter)
    with pytest.raises(IncompatibleError, match=r"LayerSkip with skip.*TableAdapter"):
        LayerSkip(skip=[0]).begin(call, BranchOutput(logits=torch.zeros(4, 1, 5)))


# Draft-length control


class Clock:
    """A clock that advances only on request."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)


class Costly(drafts.Known):
    """A right draft that takes its time, for each token and once per call."""

    def __init__(self, rows, clock, cost, once=0.0):
        super().__init__(rows, length=5)
        self.clock, self.cost, self.once, self.opened = clock, cost, once, 0

    def begin(self, call, prefill):
        self.clock.now += self.once
        self.opened += 1
        return super().begin(call, prefill)

    def draft(self, call, budget):
        self.clock.now += self.cost * min(budget, self.length)
        return super().draft(call, budget)


class Timed(Adaptive):
    """Notes the depths it used; a pass takes a second."""

    def __init__(self, draft, clock, depths, **options):
        super().__init__(draft, depths, **options)
        self.clock, self.used = clock, []

    def begin(self, call, prefill):
        session = super().begin(call, prefill)
        self.used.append(session.depth.levels)
        return Ticking(session, self.clock)


class Ticking(Wrapped):
    def __init__(self, inner, clock):
        super().__init__(inner)
        self.clock = clock

    def observe(self, proposal, output, block):
        self.clock.now += float(self.call.rows.rounds.max() > 1)  # the prompt's costs no pass
        super().observe(proposal, output, block)


@pytest.mark.parametrize(("cost", "once", "levels"), [(0.1, 0, None), (3.0, 0, 0), (0.1, 30.0, 0)])
def test_the_depth_that_measures_fastest_is_used(cost, once, levels, monkeypatch):
    right = run_rows(Decoder(), MODEL, PROMPTS, max_new_tokens=31)
    clock = Clock(monkeypatch)
    draft = Costly(right, clock, cost, once)
    adaptive = Timed(draft, clock, (None, 2, 0))
    decoder = Decoder(adaptive)
    for _ in range(9):
        assert run_rows(decoder, MODEL, PROMPTS, max_new_tokens=31) == right
    assert adaptive.used == [None, None, 2, 0] + 5 * [levels]  # the first call warms up
    assert draft.opened == 9 - adaptive.used.count(0)  # where it is off, it is not even opened
    speeds = {depth.levels: depth.speed for depth in adaptive.measured}
    assert speeds[0] == pytest.approx(1.0)  # a token a pass
    # five proposals for five passes: none follows the last token
    assert speeds[None] == pytest.approx(30 / (5 + 5 * 5 * cost + once))


class World:
    """Calls of 20 rounds on a clock; the speed of each depth is given, tokens per second."""

    def __init__(self, monkeypatch, **options):
        self.clock, self.draws = Clock(monkeypatch), random.Random(0)
        self.adaptive = Adaptive(NoDraft(), **options)
        self.rows = call_after(21)

    def call(self, speeds, noise=0.0, stall=0.0):
        """Seconds of a call, and the depth it used."""
        began = self.clock.now
        session = self.adaptive.begin(self.rows, None)
        levels = session.depth.levels
        pace = math.exp(self.draws.gauss(0, noise)) / speeds[levels]
        for _ in range(20):
            session.observe(None, None, None)
            self.clock.now += pace
        self.clock.now += stall
        session.observe(None, None, None)
        session.close()
        return self.clock.now - began, levels


LOSING = {None: 0.6, 3: 0.75, 1: 0.9, 0: 1.0}


def test_a_losing_draft_costs_its_trials_and_little_more(monkeypatch):
    world = World(monkeypatch)
    calls = [world.call(LOSING, noise=0.15) for _ in range(600)]
    plain = 600 * 20 * math.exp(0.15**2 / 2)
    assert sum(seconds for seconds, _ in calls) < 1.04 * plain
    assert {levels for _, levels in calls[300:]} == {None, 3, 1, 0}  # none is given up for good
    winning = LOSING | {None: 1.5}
    later = [world.call(winning, noise=0.15)[1] for _ in range(300)]
    assert later[-50:].count(None) > 40


def test_a_round_that_was_held_up_says_nothing_of_a_depth(monkeypatch):
    world = World(monkeypatch)
    winning = {None: 1.4, 3: 1.2, 1: 1.1, 0: 1.0}
    used = [world.call(winning, stall=1000.0 * (index in (0, 1, 9)))[1] for index in range(40)]
    assert used[5:].count(None) > 30


def test_a_depth_limits_chains_and_trees():
    for draft in (drafts.Random(), drafts.FullTree(2), drafts.RandomTrees(7), PromptLookup()):
        for levels in (1, 2):
            adaptive = Adaptive(draft, (levels,))
            decoder = Decoder(adaptive, seed=SEED)
            assert_lossless(decoder, MODEL, distribution_of(MODEL), do_sample=True)
            assert len(decoder.stats.histogram) <= levels + 1
            assert decoder.stats.accepted > 0


def test_a_sampled_draft_keeps_its_length_unless_asked():
    for any_rule, levels in ((False, 3), (True, 1)):
        draft = drafts.Bigram(bigram(5), 3, ("iid",))
        decoder = Decoder(Adaptive(draft, (1,), any_rule=any_rule), accept="rejection", seed=1)
        run_rows(decoder, MODEL, PROMPTS, do_sample=True, max_new_tokens=40)
        assert len(decoder.stats.histogram) == levels + 1


CONTROLLED = {  # by whether measured times could change a token
    ("auto", False): True,
    ("auto", True): True,
    ("fastest", True): False,
    ("sample_match", True): False,
    ("typical", False): False,
    ("relative_threshold", False): False,
}


@pytest.mark.parametrize(("accept", "do_sample"), CONTROLLED)
def test_times_change_no_token_of_a_seed(accept, do_sample):
    decoder = Decoder(Adaptive(drafts.FullTree(2), (1,)), accept=accept, seed=1)
    run_rows(decoder, MODEL, PROMPTS, do_sample=do_sample, max_new_tokens=40)
    cut = len(decoder.stats.histogram) == 2
    assert cut == CONTROLLED[accept, do_sample]


def test_what_its_draft_says_of_itself_is_handed_on():
    assert not Adaptive(LayerSkip(exit_layer=1)).capabilities.composable
    assert Adaptive(Recycling()).capabilities.composable


def test_short_calls_do_not_hold_the_choice_up():
    adaptive = Adaptive(drafts.Constant(3), (None, 2, 0))
    for tokens, measured in ((1, 0), (2, 3)):
        for _ in range(4):
            run_rows(Decoder(adaptive), MODEL, PROMPTS, max_new_tokens=tokens)
        assert sum(depth.speed > 0 for depth in adaptive.measured) == measured


def test_a_draft_in_a_string_is_given_what_is_at_hand(monkeypatch):
    assert registry.create("draft", "adaptive:draft=lookup:length=8").draft.length == 8
    with pytest.raises(OptionError, match="in Python"):
        registry.create("draft", "adaptive:draft=lookup:length=8,ngram=2")
    given = {}
    monkeypatch.setattr(
        registry, "create", lambda kind, spec, **more: given.update(more) or drafts.Random()
    )
    Adaptive.from_options("any", model_id="name", target="model", tokenizer="words")
    assert given == {"model_id": "name", "target": "model", "tokenizer": "words"}

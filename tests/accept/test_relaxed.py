"""Relaxed rules: exact at their neutral setting, and where they are not, by the closed form."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from mmdecode import registry
from mmdecode.accept import lantern as lantern_rule
from mmdecode.accept import rejection as rejection_rule
from mmdecode.accept.cool_sd import CoolSD
from mmdecode.accept.gsd import GSD
from mmdecode.accept.lantern import LANTERN, borrowed, nearest
from mmdecode.accept.rejection import Candidate, Rejection, residual
from mmdecode.decoder import Decoder
from mmdecode.draft.jacobi import Jacobi
from mmdecode.engine import window
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.image_ar.grammar import Grammar
from mmdecode.image_ar.sampling import Sampling
from mmdecode.models.image_layout import Layout
from mmdecode.testing import drafts
from mmdecode.testing.checks import (
    LEVEL,
    PROMPTS,
    SEED,
    assert_distribution,
    bigram,
    check_accept,
    distribution_of,
    p_value,
    run_rows,
)
from mmdecode.testing.table import Table, TableAdapter, decode
from tests.exactness.test_syncs import most_syncs
from tests.support.relaxed import one_token
from tests.support.sessions import Wrapped
from tests.support.tiny_images import GRID as EMU3_GRID
from tests.support.tiny_images import draw, image_model

V = 4
GRID = Layout(rows=2, columns=2, ids=torch.arange(V))
MODEL = Table(V, seed=11, sharpness=1.5, layout=GRID)
Q = bigram(V)
PROMPT = [1, 0, 2]
NEAR = torch.tensor([[2, 1, 3], [0, 3, 2], [0, 3, 1], [1, 2, 0]])

RULES = {
    "lantern": lambda delta=0.4: LANTERN(delta=delta, k=2, neighbours=NEAR),
    "lantern++": lambda lambda_=3: LANTERN(lambda_=lambda_, neighbours=NEAR),
    "cool_sd": lambda delta=1.8: CoolSD(delta),
    "gsd": lambda size=3: GSD(size, gap=0.5, distance=None),
}
NEUTRAL = {"lantern": 0, "lantern++": 1, "cool_sd": 1, "gsd": 1}
DRAFTS = {
    "chain": lambda: drafts.Bigram(Q, kinds=("iid",)),
    "ragged chain": lambda: drafts.Bigram(Q, kinds=("iid",), ragged=True),
    "siblings": lambda: drafts.Siblings(Q, kinds=("without_replacement",)),
    "independent siblings": lambda: drafts.Siblings(Q, kinds=("iid",)),
    "window": lambda: Jacobi(4),
    "window with siblings": lambda: Jacobi(4, siblings=2),
}


# Neutral


@pytest.mark.one_in(2)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", RULES)
def test_a_neutral_rule_gives_the_tokens_of_the_rejection_rule(name, draft):
    neutral, plain = (
        run_rows(
            Decoder(DRAFTS[draft](), accept=rule, seed=SEED),
            MODEL,
            PROMPTS,
            do_sample=True,
            max_new_tokens=4 if "window" in draft else 12,
        )
        for rule in (RULES[name](NEUTRAL[name]), Rejection())
    )
    assert neutral == plain


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_what_is_not_neutral_gives_others(make):
    tokens = [
        run_rows(Decoder(DRAFTS["chain"](), None, rule, SEED), MODEL, PROMPTS, do_sample=True)
        for rule in (make(), Rejection())
    ]
    assert tokens[0] != tokens[1]


NOT_SAMPLED = {
    "chain": lambda: drafts.Bigram(Q, kinds=("deterministic",)),
    "most likely siblings": lambda: drafts.Siblings(Q, kinds=("deterministic",)),
    "siblings that repeat": lambda: drafts.Random(drafts.Tree((-1, -1, 0, 0))),
    "trees of their own": lambda: drafts.RandomTrees(4),
}


@pytest.mark.parametrize("draft", NOT_SAMPLED)
def test_tokens_that_were_not_sampled_are_judged_by_a_one_hot_distribution(draft):
    make = lambda: Decoder(NOT_SAMPLED[draft](), accept=CoolSD(delta=1))  # noqa: E731
    assert_distribution(make, MODEL, distribution_of(MODEL), samples=10_000, length=3)


@pytest.mark.parametrize("name", RULES)
def test_a_neutral_rule_has_the_distribution_of_the_model(name):
    make = lambda: Decoder(DRAFTS["chain"](), accept=RULES[name](NEUTRAL[name]))  # noqa: E731
    assert_distribution(make, MODEL, distribution_of(MODEL), samples=10_000, length=3)


@pytest.mark.parametrize("make", RULES.values(), ids=RULES)
def test_relaxed_rules_say_so_and_pass_the_public_check(make):
    assert make().guarantee == "lossy" and make().modes == {"sample"}
    check_accept(make)


# The closed form is what the loop draws


def p_at(*prefix):
    return MODEL.target_logits([*PROMPT, *prefix]).double().softmax(-1)


def q_at(token, kind):
    distribution = Q[token].double()
    if kind == "deterministic":
        distribution = torch.full_like(distribution, -torch.inf).index_fill(
            0, distribution.argmax(), 0.0
        )
    return distribution.softmax(-1) if kind != "window" else torch.full((V,), 1 / V).double()


def joint_of_three(second):
    """The first token and the last are never drafted; the second follows ``second(a)``."""
    return torch.stack(
        [torch.stack([p_at()[a] * second(a)[b] * p_at(a, b) for b in range(V)]) for a in range(V)]
    )


ONE = {
    "iid": lambda: drafts.Bigram(Q, 1, ("iid",)),
    "deterministic": lambda: drafts.Bigram(Q, 1, ("deterministic",)),
    "window": lambda: Jacobi(2),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ONE)
@pytest.mark.parametrize("name", RULES)
def test_one_draft_has_the_distribution_of_the_closed_form(name, kind):
    found = [one_token(RULES[name](), p_at(a), q_at(a, kind)) for a in range(V)]
    if kind != "deterministic":  # two of the rules keep a token that is likely enough for all
        assert max(float(token.distance) for token in found) > 0.04
    make = lambda: Decoder(ONE[kind](), accept=RULES[name]())  # noqa: E731
    joint = joint_of_three(lambda a: found[a].distribution)
    assert_distribution(make, MODEL, distribution_of(MODEL), length=3, samples=10_000, joint=joint)


@pytest.mark.parametrize("kind", ["without_replacement", "iid"])
@pytest.mark.parametrize("name", RULES)
def test_two_siblings_have_the_distribution_of_the_closed_form(name, kind):
    rule = RULES[name]()

    def second(a):
        p, q = p_at(a), q_at(a, kind)
        elder = one_token(rule, p, q)
        distribution = q * elder.keeps
        for x in range(V):
            rest = q.clone()
            if kind == "without_replacement":
                rest[x] = 0
            younger = one_token(rule, residual(p, q), rest / rest.sum())
            distribution = distribution + q[x] * (1 - elder.keeps[x]) * younger.distribution
        return distribution

    make = lambda: Decoder(drafts.Siblings(Q, (2,), (kind,)), accept=RULES[name]())  # noqa: E731
    joint = joint_of_three(second)
    assert_distribution(make, MODEL, distribution_of(MODEL), length=3, samples=10_000, joint=joint)


def test_the_factor_of_cool_depends_on_the_depth_of_a_draft():
    rule = CoolSD(delta=2.0, nu=0.4)

    def at(depth, *prefix):
        return one_token(rule, p_at(*prefix), q_at(prefix[-1], "iid"), depth=depth)

    joint = torch.zeros(V, V, V, V, dtype=torch.double)
    for a in range(V):
        for b in range(V):
            kept = q_at(a, "iid")[b] * at(0, a).keeps[b]
            redrawn = at(0, a).distribution[b] - kept
            # a third token is drafted after a kept one, or again in the next round
            third = kept * at(1, a, b).distribution + redrawn * at(0, a, b).distribution
            for c in range(V):
                joint[a, b, c] = p_at()[a] * third[c] * p_at(a, b, c)
    make = lambda: Decoder(drafts.Bigram(Q, 2, ("iid",)), accept=rule)  # noqa: E731
    assert_distribution(make, MODEL, distribution_of(MODEL), joint=joint)


# What the closed form says


def distributions(count=200, vocab=12):
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(2, count, vocab, generator=generator) * 1.5).double().softmax(-1)
    p[: count // 2, vocab // 2 :] = 0  # as top-k leaves it
    return p / p.sum(-1, keepdim=True), q


LARGE = nearest(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), 11)
GROWING = {
    "delta": [LANTERN(delta=d, k=5, neighbours=LARGE) for d in (0, 0.01, 0.1, 0.3, 1)],
    "lambda": [LANTERN(lambda_=x, k=5, neighbours=LARGE) for x in (1, 2, 5, 50)],
    "neighbours": [LANTERN(delta=0.2, k=k, neighbours=LARGE) for k in (1, 2, 5, 11)],
    "factor": [CoolSD(delta) for delta in (1, 1.1, 2, 10)],
    "heat": [CoolSD(2.0, nu) for nu in (3, 0.5, 0.2, 0)],
}


@pytest.mark.parametrize("parameter", GROWING)
def test_more_is_kept_and_the_distribution_moves_further_as_a_parameter_grows(parameter):
    p, q = distributions()
    depth = 1 if parameter == "heat" else 0
    found = [one_token(rule, p, q, depth=depth) for rule in GROWING[parameter]]
    for less, more in itertools.pairwise(found):
        assert bool((less.keeps <= more.keeps).all()) and float(more.kept.mean()) > less.kept.mean()
        assert bool((less.distance <= more.distance + 1e-12).all())


@pytest.mark.parametrize("name", RULES)
def test_the_distance_is_the_excess_of_what_is_kept(name):
    p, q = distributions(vocab=V)
    exact = one_token(Rejection(), p, q)
    assert float(exact.distance.max()) < 1e-12
    torch.testing.assert_close(exact.kept, torch.minimum(p, q).sum(-1))
    neutral, found = one_token(RULES[name](NEUTRAL[name]), p, q), one_token(RULES[name](), p, q)
    assert torch.equal(neutral.distribution, exact.distribution)
    assert bool((found.keeps >= exact.keeps).all())
    torch.testing.assert_close(found.distribution.sum(-1), torch.ones(len(p)).double())
    torch.testing.assert_close(found.distance, (q * found.keeps - p).clamp_min(0).sum(-1))
    # the best residual for this test is that of the exact one
    best = residual(p, q * found.keeps)
    rest = (1 - found.kept)[:, None]
    torch.testing.assert_close(rest * best, rest * residual(p, q))


def test_what_is_borrowed_is_the_longest_prefix_within_the_budget():
    generator = torch.Generator().manual_seed(3)
    near = torch.rand(300, 6, generator=generator) * (torch.rand(300, 6, generator=generator) > 0.4)
    budget = torch.rand(300, generator=generator)
    budget[:20] = 0
    for row, limit, found in zip(near, budget, borrowed(near, budget), strict=True):
        total = torch.zeros(())
        for p in row:
            if total + p > limit:
                break
            total = total + p
        torch.testing.assert_close(found, total)
        assert found <= limit
    # a code that does not fit ends the prefix, although a later one would fit
    assert float(borrowed(torch.tensor([0.2, 0.5, 0.05]), torch.tensor(0.3))) == pytest.approx(0.2)


def test_neighbours_are_the_nearest_others():
    codes = torch.randn(700, 3, generator=torch.Generator().manual_seed(0))
    codes[650] = codes[3]  # a twin is a neighbour
    found = nearest(codes, 5)
    assert found.dtype == torch.int32 and int(found[3, 0]) == 650 and int(found[650, 0]) == 3
    for code in (0, 3, 511, 512, 699):
        apart = (codes - codes[code]).norm(dim=-1)
        apart[code] = torch.inf
        torch.testing.assert_close(apart[found[code].long()], apart.sort().values[:5])
    assert nearest(codes[:4], 1000).shape == (4, 3)


def test_a_group_is_next_to_its_token_in_order_close_in_probability_and_close_in_code():
    codes = torch.tensor([[0.0], [0.1], [5.0], [0.2], [0.3], [0.4]])
    coded = SimpleNamespace(codebook=lambda: codes, model=None, layout=None)
    p = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1, 0.0])
    q = torch.tensor([0.05, 0.5, 0.1, 0.2, 0.05, 0.1])

    def odds(token, adapter=None, **options):
        first = torch.tensor(0)
        candidate = Candidate(
            p=p, q=q, token=torch.tensor(token), depth=first, position=first, adapter=adapter
        )
        first, second = GSD(**options).odds(candidate)
        return round(float(first), 6), round(float(second), 6)

    wide = {"gap": 1.0, "distance": None}
    assert odds(1, size=3, **wide) == (0.75, 0.65)  # 0, 1, 2
    assert odds(1, size=5, **wide) == (0.9, 0.85)  # 0, 1, 2, 3: nothing stands before 0
    assert odds(1, size=5, gap=0.06, distance=None) == (0.75, 0.65)
    assert odds(1, coded, size=5, gap=1.0, distance=1.0) == (0.7, 0.75)  # 2 has another code
    assert odds(0, size=5, **wide) == (0.3, 0.05)  # alone it is better off
    assert odds(5, size=5, **wide) == (0.0, 0.1)  # what has no probability has no group
    assert odds(4, size=3, **wide) == (0.1, 0.05)  # and is in none


# Codes, grammar and refusals


class Coded(TableAdapter):
    """A table model whose tokens are codes in another order, or none."""

    def __init__(self, model, codes):
        super().__init__(model)
        self.codes, self.asked = codes, 0

    def codebook(self):
        self.asked += 1
        return self.codes


LINES = Layout(rows=2, columns=2, ids=torch.tensor([2, 0, 3]), newline=1)


def test_codes_are_found_by_the_ids_of_the_layout_and_sorted_once_for_a_model():
    model = Table(V, seed=11, sharpness=1.5, layout=LINES)
    adapter = Coded(model, torch.tensor([[0.0], [1.0], [3.0]]))  # tokens 2, 0, 3
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    q = torch.full((V,), 0.25)
    for _ in range(2):
        rule = LANTERN(delta=0.9, k=1)
        free = one_token(rule, p, q, position=0, adapter=adapter)
        # 2 borrows of 0, 0 of 2, 3 of 0; the newline of nobody
        torch.testing.assert_close(free.keeps, torch.tensor([1.6, 0.8, 1.6, 2.0]).clamp_max(1))
        forced = one_token(rule, p, q, position=2, adapter=adapter)
        assert torch.equal(forced.keeps, one_token(Rejection(), p, q).keeps)
    assert adapter.asked == 1
    assert one_token(LANTERN(delta=0.9, k=2), p, q, adapter=adapter) and adapter.asked == 2


class Ignorant(drafts.Bigram):
    """Knows nothing of newlines, and puts one where it pleases."""

    def __init__(self):
        super().__init__(torch.zeros(V, V), kinds=("iid",))


def sampled_under_the_grammar(rows=200):
    model = Table(V, seed=11, sharpness=1.5, layout=LINES)
    decoder = Decoder(Ignorant(), accept=LANTERN(delta=1, k=2), seed=3)
    return decode(
        model,
        torch.zeros(rows, 0, dtype=torch.long),
        decoder,
        processors=[Grammar(LINES)],
        max_new_tokens=6,
        do_sample=True,
        request=range(rows),
        inputs={"mm_adapter": Prompted(model), "codes": None},
    )


class Prompted(Coded):
    """In image mode: ids hold generated tokens alone, and the prompt is the adapter's."""

    def __init__(self, model):
        super().__init__(model, torch.tensor([[0.0], [1.0], [3.0]]))

    def prompt(self, call, spec):
        made = super().prompt(call, spec)
        ids = torch.tensor(PROMPT).expand(call.batch, -1)
        return type(made)(ids=ids, mask=torch.ones_like(ids).bool(), inputs=made.inputs)


def follows_the_grammar(tokens):
    forced = torch.tensor([False, False, True, False, False, True])
    return bool(((tokens == 1) == forced).all())


def test_what_the_grammar_forbids_is_never_kept(monkeypatch):
    assert follows_the_grammar(sampled_under_the_grammar())
    sound = lantern_rule.codes_at
    monkeypatch.setattr(
        lantern_rule, "codes_at", lambda asked: (*sound(asked)[:2], torch.tensor(True))
    )
    assert not follows_the_grammar(sampled_under_the_grammar())


def test_a_draft_without_probability_may_be_kept_where_the_rule_lends_it_some():
    p, q = torch.tensor([[1.0, 0, 0, 0]]), torch.tensor([[0.0, 0, 1, 0]])
    kept = {name: float(one_token(make(), p, q).kept) for name, make in RULES.items()}
    assert kept == {"lantern": 0, "lantern++": 0, "cool_sd": 0, "gsd": 0}
    assert float(one_token(LANTERN(delta=1, neighbours=NEAR), p, q).kept) == 1


@pytest.mark.parametrize(
    "rule", [LANTERN(delta=0.1), LANTERN(lambda_=2), GSD()], ids=["delta", "lambda", "gsd"]
)
@pytest.mark.parametrize("adapter", [None, Coded(MODEL, None)], ids=["no_method", "none"])
def test_a_model_without_a_codebook_is_refused(rule, adapter):
    decoder = Decoder(DRAFTS["chain"](), accept=rule)
    inputs = {"mm_adapter": adapter} if adapter else {}
    with pytest.raises(
        IncompatibleError, match=f"{type(rule).__name__}.*Table.*no codebook.*cool_sd"
    ):
        decode(MODEL, torch.tensor([PROMPT]), decoder, do_sample=True, inputs=inputs)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (LANTERN, "give one of them"),
        (lambda: LANTERN(delta=0.1, lambda_=2), "give one of them"),
        (lambda: LANTERN(delta=1.5), "a factor is lambda_"),
        (lambda: LANTERN(lambda_=0.5), "1 .neutral. or more"),
        (lambda: LANTERN(delta=0.1, k=0), "k must be 1 or more"),
        (lambda: CoolSD(0.9), "delta of 1 .neutral. or more"),
        (lambda: CoolSD(nu=-1), "nu and mu of 0"),
        (lambda: GSD(0), "a size of 1 .neutral. or more"),
        (lambda: GSD(gap=0), "a gap above 0"),
        (lambda: GSD(distance=0), "a distance above 0 or none"),
    ],
)
def test_a_parameter_out_of_range_is_refused(make, says):
    with pytest.raises(OptionError, match=says):
        make()


# Over a model of image tokens


STRONG = (
    "lantern:delta=1",
    "lantern:lambda_=99",
    "cool_sd:delta=9,nu=0",
    "gsd:size=64,gap=1,distance=9",
)


@pytest.mark.parametrize("rule", STRONG)
@pytest.mark.parametrize("family", ["emu3", "janus"])
def test_images_of_a_relaxed_window_are_whole(family, rule):
    grid = {"grid": EMU3_GRID} if family == "emu3" else {}
    layout = registry.image_adapter_for(image_model(family), **grid).layout
    tokens, exact = (
        draw(family, Decoder(Jacobi(5), accept=name), do_sample=True, sampling=Sampling(4.0))
        for name in (rule, "rejection")
    )
    assert not torch.equal(tokens, exact)
    forced = layout.forced(torch.arange(layout.length))
    assert torch.equal(tokens[:, forced >= 0], forced[forced >= 0].expand(len(tokens), -1))
    assert layout.codes(tokens).shape == (3, layout.rows, layout.columns)


def test_a_model_whose_tokenizer_is_not_at_hand_is_refused():
    with pytest.raises(IncompatibleError, match=r"LANTERN does not fit LlamaGen.*no codebook"):
        draw("llamagen", Decoder(Jacobi(4), accept="lantern:delta=0.1"), do_sample=True)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("draft", ["window", "window with siblings"])
def test_a_round_waits_for_the_device_once(name, draft, monkeypatch):
    small = {"window": Jacobi(5), "window with siblings": Jacobi(5, siblings=2)}
    rule = RULES[name]()
    rule.neighbours = nearest(torch.arange(5.0)[:, None], 4)
    assert most_syncs(small[draft], monkeypatch, accept=rule) == ["tolist"]


# Windows: what the tail keeps stays exact


def tail_fits_its_distribution():
    """Whether tokens after a first rejection have the distribution that is recorded for them."""
    blind = Table(
        V, seed=3, sharpness=1.5, blind=True
    )  # one distribution per position, whatever was sampled
    seen = []

    class Spy(Jacobi):
        def begin(self, call, prefill):
            return Watching(super().begin(call, prefill))

    class Watching(Wrapped):
        def observe(self, proposal, output, block):
            super().observe(proposal, output, block)
            if proposal.size and not seen:
                first = block.num_accepted == 0
                seen.append((block.window.tokens[first, 0], block.window.logits[first, 0]))

    decode(
        blind,
        torch.tensor([PROMPT]).repeat(10_000, 1),
        Decoder(Spy(4), accept=CoolSD(1.2), seed=1),
        do_sample=True,
        max_new_tokens=5,
        request=range(10_000),
    )
    tokens, recorded = seen[0]
    assert len(tokens) > 500 and bool((recorded == recorded[0]).all())
    return p_value(torch.bincount(tokens, minlength=V), recorded[0].double().softmax(-1)) > LEVEL


def test_after_a_rejection_a_window_is_tested_exactly(monkeypatch):
    assert tail_fits_its_distribution()
    sound = window.passes
    monkeypatch.setattr(window, "passes", lambda gumbel, p, q: sound(gumbel, 5 * p, q))
    assert not tail_fits_its_distribution()


# Mutants of the published kind


def test_a_residual_without_the_neighbours_is_caught(monkeypatch):
    def wiped(p, q):
        left = residual(p, q).scatter(-1, NEAR[q.argmax(-1)][..., :2], 0.0)
        return torch.where(left.sum(-1, keepdim=True) > 0, left, p)  # Gumbel-max normalises

    monkeypatch.setattr(rejection_rule, "residual", wiped)
    with pytest.raises(AssertionError, match="have another distribution"):
        test_one_draft_has_the_distribution_of_the_closed_form("lantern", "deterministic")

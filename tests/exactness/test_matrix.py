"""Every registered draft, rule and guide together: lawful, or refused with both sides named.

Then one draft of each kind under every rule and one guide of each class: a method that is yet to be
written is one of these to the loop.
"""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from mmdecode import registry
from mmdecode.accept.exact import GreedyMatch, SampleMatch
from mmdecode.accept.rejection import Rejection
from mmdecode.decoder import Decoder
from mmdecode.draft.adaptive import Adaptive
from mmdecode.draft.amateur import Amateur
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.eagle import Eagle
from mmdecode.draft.first_of import FirstOf
from mmdecode.draft.jacobi import Jacobi
from mmdecode.draft.layer_search import Clasp
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.draft.lookahead import Lookahead
from mmdecode.draft.medusa import Medusa
from mmdecode.draft.medusa_heads import MedusaHeads
from mmdecode.draft.quantized import Quantized
from mmdecode.draft.recycling import Recycling
from mmdecode.draft.source import Source
from mmdecode.draft.sparse import Sparse
from mmdecode.engine.adapter import BranchSpec
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.guide.controls.margin_shift import MarginShift
from mmdecode.guide.controls.near_ties import NearTies
from mmdecode.guide.guidance import Guidance
from mmdecode.guide.linear import Linear
from mmdecode.models.eagle import Eagle3Model
from mmdecode.testing import drafts
from mmdecode.testing.checks import (
    LEVEL,
    PROMPTS,
    SEED,
    bigram,
    exact_joint,
    p_value,
    run_rows,
)
from mmdecode.testing.table import Table, decode
from tests.draft.test_ctc import Known as KnownText
from tests.draft.test_hydra import table_draft as hydra_draft
from tests.draft.test_kangaroo import table_draft as kangaroo_draft
from tests.draft.test_seeing import CLASSES as SEEING
from tests.draft.test_seeing import table_draft
from tests.exactness import guides

V = 4
MODEL = Table(V, seed=11, sharpness=1.5)
OTHER = Table(V, seed=2, sharpness=1.0)
PROMPT = [1, 0, 2]
CELLS = V**3


def medusa():
    heads = MedusaHeads(2, 1, 1, vocab=V)
    torch.nn.init.normal_(heads.out, generator=torch.Generator().manual_seed(0))
    return Medusa(heads, paths=[(0,), (1,), (0, 0), (1, 2)])


def eagle():
    sizes = {"hidden_size": 4, "target_hidden_size": 1, "vocab_size": V, "intermediate_size": 4}
    torch.manual_seed(0)
    drafter = Eagle3Model({**sizes, "num_attention_heads": 2}, own_embedding=True)
    return Eagle(drafter, depth=2, top_k=2, nodes=4)


EXAMPLES = {
    # a part that cannot be made without options, or says nothing on a table model without them
    "draft": {
        "assistant": lambda: Assistant(OTHER, length=2),
        "medusa": medusa,
        "eagle": eagle,
        **{kind: functools.partial(table_draft, kind, V) for kind in SEEING},
        "recycling": lambda: Recycling(nodes=6),
        "source": lambda: Source(length=3, ids=[[[0, 1, 2, 3, 0, 2, 1], [0, 2, 1, 3, 3, 1]]]),
        "ctc": lambda: KnownText([[0, 1, 2, 3, 0, 2, 1]], length=3, rows=10_000),
        "amateur": lambda: Amateur(2, transform=None, prompt="last_token"),
        "hydra": lambda: hydra_draft(V),
        "kangaroo": lambda: kangaroo_draft(V),
        "layer_skip": lambda: LayerSkip(exit_layer=1, length=2),
        "quantized": lambda: Quantized(bits=32, length=2),  # a table has nothing to round
        "clasp": lambda: Clasp(share=0.5, length=2, every=2),
        "sparse": lambda: Sparse(length=2),
        "lookahead": lambda: Lookahead(window=2, ngram=3, guesses=2),
        "adaptive": lambda: Adaptive(Assistant(OTHER, length=3), (2,), any_rule=True),
        "first_of": lambda: FirstOf(
            Source(length=3, ids=[[0, 1, 2, 3, 0, 2, 1, 3, 3, 1]], least=2), Recycling(nodes=6)
        ),
        "jacobi": lambda: Jacobi(4),
        "siblings": lambda: drafts.Siblings(bigram(V), kinds=("without_replacement",)),
    },
    "accept": {  # lossy rules: at their neutral setting they follow the model
        "typical": lambda: registry.create("accept", "typical:epsilon=1,delta=1e9"),
        "relative_threshold": lambda: registry.create("accept", "relative_threshold:share=1"),
        "ensemble": lambda: registry.create("accept", "ensemble:weight=1"),
        "lantern": lambda: registry.create("accept", "lantern:delta=0"),
        "cool_sd": lambda: registry.create("accept", "cool_sd:delta=1"),
        "gsd": lambda: registry.create("accept", "gsd:size=1"),
    },
    "guide": {
        "contrast": lambda: Linear.contrast(
            BranchSpec(name="far", transform="salt", transform_options={"by": 77}), 1.0, 0.2
        ),
        "guidance": lambda: Guidance(1.5, until=1),
        "whisper_cd": guides.Unheard,
        "ctc": guides.HeardFrames,
        "margin_shift": lambda: MarginShift(1.5, yes=1, no=[2, 3]),
        "near_ties": lambda: NearTies(1.1, 0.0, yes=1, no=[2, 3]),
        "bias": guides.bias,
        **guides.EXACT_GUIDES,
    },
}
# a chain, a tree, a sampled chain, a sampled tree, the model's own layers, a Jacobi window
KINDS = ("lookup", "recycling", "assistant", "siblings", "layer_skip", "jacobi")
RULES = registry.names("accept")
# a table model sees no images: guides about them are put to a matrix of their own in tests/guide
GUIDES = [
    name
    for name in registry.names("guide")
    if "image" not in registry.resolve("guide", name)[0].requires_inputs
]


def triples(drafts, guides, step):
    """All of them; one in ``step`` runs by default: with ten, each pair of parts."""
    for (i, draft), (j, rule), (k, guide) in itertools.product(
        *map(enumerate, (drafts, RULES, guides))
    ):
        quick = (i + j + k) % step == 0
        yield pytest.param(draft, rule, guide, marks=() if quick else pytest.mark.slow)


TRIPLES = [
    *triples(registry.names("draft"), [None, *GUIDES], 10),
    *triples(KINDS, guides.EXACT_GUIDES, 5),
]


def make(kind, name):
    """A part by its name; ``None`` for no guide."""
    if name is None:
        return None
    example = EXAMPLES[kind].get(name)
    try:
        return example() if example else registry.create(kind, name)
    except OptionError as error:
        raise AssertionError(f"{kind} {name!r} needs an example in this test: {error}") from error


@functools.cache
def undrafted(guide, do_sample):
    return run_rows(
        Decoder(None, make("guide", guide), seed=SEED), MODEL, PROMPTS, **mode(do_sample)
    )


@functools.cache
def undrafted_cells(guide):
    """Counts of the undrafted loop's first three tokens."""
    return cells(Decoder(None, make("guide", guide)), 20_000, seed=1)


@functools.cache
def joint_of(guide):
    return exact_joint(guides.EXACT_GUIDES[guide].target_logits(MODEL), PROMPT, 3)


def p_of_samples(guide, counts):
    """The p-value of counts under the undrafted loop's distribution of three tokens.

    Exact where there is a formula, else a test of two samples.
    """
    if guide in guides.EXACT_GUIDES:
        return p_value(counts, joint_of(guide))
    return p_value_of_two(counts, undrafted_cells(guide))


def p_value_of_two(counts, others):
    """The p-value of a G-test that two samples are of one distribution; pools rare cells."""
    table = torch.stack([counts, others]).double()
    expected = table.sum(0) * table.sum(1, keepdim=True) / table.sum()
    rare = expected[0] < 5
    if bool(rare.any()):
        table, expected = (
            torch.cat([part[:, ~rare], part[:, rare].sum(1, keepdim=True)], 1)
            for part in (table, expected)
        )
    statistic = 2 * torch.xlogy(table, table / expected.clamp_min(1e-9)).sum()
    freedom = torch.tensor((table.shape[1] - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def cells(decoder, rows, seed):
    decoder = replace(decoder, seed=seed)
    ids = torch.tensor([PROMPT]).repeat(rows, 1)
    options = {"do_sample": True, "max_new_tokens": 3, "request": range(rows)}
    new = decode(MODEL, ids, decoder, **options)[:, 3:]
    return torch.bincount((new * V ** torch.arange(3).flip(0)).sum(1), minlength=CELLS)


def mode(do_sample):
    return {"do_sample": do_sample, "eos": [V - 1]}


def refusal(call, *sides):
    """Asserts that ``call`` is refused and that the message names both sides."""
    with pytest.raises(IncompatibleError) as caught:
        call()
    for side in sides:
        assert side in str(caught.value), f"the refusal does not name {side}: {caught.value}"


def exact(draft, rule, guide):
    """Asserts that the three decode with the distribution of the undrafted loop, or are refused.

    Args:
        draft: Makes a draft.
        rule: Makes a rule.
        guide: Name of a guide, or ``None``.
    """
    names = type(draft()).__name__, type(rule()).__name__

    def decoder():
        return Decoder(draft(), make("guide", guide), rule(), seed=SEED, draft_guided=True)

    if not set(draft().kinds) & set(rule().kinds):
        return refusal(decoder, *names)
    for do_sample in (False, True):
        asked = "sample" if do_sample else "greedy"
        run = lambda: run_rows(decoder(), MODEL, PROMPTS, **mode(do_sample))  # noqa: B023, E731
        if asked not in rule().modes:
            refusal(run, names[1], f"do_sample={do_sample}")
        elif not do_sample or not isinstance(rule(), (SampleMatch, Rejection)):
            assert run() == undrafted(guide, do_sample), "other tokens than the undrafted loop's"
        else:
            assert all(0 <= token < V for row in run() for token in row)
            p = p_of_samples(guide, cells(decoder(), 4_000, seed=2))
            assert p > LEVEL, f"another distribution than the undrafted loop's: p = {p:.2g}"
    return None


@pytest.mark.filterwarnings("ignore:.*is inert in greedy generation:UserWarning")
@pytest.mark.parametrize(("draft", "rule", "guide"), TRIPLES)
def test_a_triple_is_exact_or_refused(draft, rule, guide):
    exact(lambda: make("draft", draft), lambda: make("accept", rule), guide)


# The walk itself must notice what is wrong


class TakesAnything(Rejection):
    kinds = ("deterministic", "iid")


class Trusting(GreedyMatch):
    def __call__(self, proposal, target, call):
        outcome = super().__call__(proposal, target, call)
        if not proposal.size:
            return outcome
        kept = (proposal.tokens[:, :1] >= 0) & call.rows.active[:, None]
        path = torch.where(kept, 0, -1)
        return type(outcome)(
            path=path, num_accepted=kept[:, 0].long(), next_token=outcome.next_token
        )


class Hot(Rejection):
    def followed(self, p, q):
        return (1.5 * p.log()).softmax(-1)


class Selfish(drafts.Bigram):
    def draft(self, call, budget):
        if call.plan.kind == "iid":
            raise IncompatibleError("this does not fit")
        return super().draft(call, budget)


def chain(*kinds, cls=drafts.Bigram):
    return lambda: cls(bigram(V), kinds=kinds)


PLANTED = {
    "a rule that trusts the draft": (chain("deterministic"), Trusting, "other tokens"),
    "a rule of another temperature": (chain("iid"), Hot, "another distribution"),
    "a rule that takes what it cannot judge": (chain("deterministic"), TakesAnything, None),
    "a draft that refuses what it offers": (chain("iid", cls=Selfish), Rejection, "does not fit"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_walk_finds(name):
    draft, rule, says = PLANTED[name]
    with pytest.raises((AssertionError, IncompatibleError), match=says):
        exact(draft, rule, None)


def test_a_refusal_that_names_one_side_is_found():
    with pytest.raises(AssertionError, match="does not name Bigram"):
        refusal(lambda: run_rows(Decoder(chain("iid", cls=Selfish)()), MODEL, PROMPTS), "Bigram")

"""Two drafts, one before the other: row by row, in any shape, and lossless."""

import pytest
import torch

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.first_of import FirstOf
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.recycling import Recycling
from mmdecode.draft.source import Source
from mmdecode.engine.contracts import BranchOutput
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.testing import check_draft, drafts
from mmdecode.testing.checks import PROMPTS, SEED, run_rows
from mmdecode.testing.table import Table, call_of

MODEL = Table(5, seed=3, bias={0: 1.0, 4: -0.5})
SOURCE = [0, 1, 2, 3, 1, 1, 0, 2, 4, 4, 1, 2]


class Fixed(drafts.TestDrafter):
    """Proposes what it was given, whatever the round."""

    def __init__(self, tokens, tree=None):
        self.tokens, self.tree, self.seen = torch.tensor(tokens), tree, []

    def draft(self, call, budget):
        return Proposal(tokens=self.tokens, kind="deterministic", tree=self.tree)

    def learn(self, call, proposal, output, block):
        self.seen.append(proposal)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("draft", "learns"),
    [
        (lambda: FirstOf(Source(ids=[SOURCE], least=2), Recycling()), False),
        (lambda: FirstOf(Source(ids=[SOURCE]), PromptLookup()), False),
        # these draw from a generator of their own, which goes on from call to call
        (lambda: FirstOf(drafts.RandomTrees(), drafts.Random(ragged=True)), True),
    ],
    ids=["source, recycling", "source, lookup", "trees, chains"],
)
def test_it_passes_the_public_check(draft, learns):
    check_draft(draft, learns=learns)


def rows_of(proposal):
    """Each row as its set of paths."""
    parents, _, _ = proposal.structure()
    parents = parents.expand(len(proposal.tokens), -1)
    found = []
    for tokens, above in zip(proposal.tokens.tolist(), parents.tolist(), strict=True):
        paths = {}
        for node, token in enumerate(tokens):
            if token >= 0:
                paths[node] = (*paths.get(above[node], ()), token)
        found.append(sorted(paths.values()))
    return found


def test_each_row_has_the_first_proposal_there_is():
    call = call_of([[0], [1], [2]])
    chain = [[1, 2, 3, 4], [-1] * 4, [-1] * 4]
    tree = Tree((-1, -1, 0))
    leaves = [[5, 6, 7], [5, 6, 7], [-1] * 3]

    def proposed(first, second):
        prefill = BranchOutput(logits=torch.zeros(3, 1, 12))
        return FirstOf(first, second).begin(call, prefill).propose(9)

    branch = [(5,), (5, 7), (6,)]
    run = [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]
    assert rows_of(proposed(Fixed(chain), Fixed(leaves, tree))) == [run, branch, []]
    assert rows_of(proposed(Fixed(leaves, tree), Fixed(chain))) == [
        branch,
        branch,
        [],
    ]
    short = [[9], [-1], [8]]
    joined = proposed(Fixed(short), Fixed(chain))
    assert joined.is_chain and joined.tokens.tolist() == [
        [9, -1, -1, -1],
        [-1] * 4,
        [8, -1, -1, -1],
    ]
    for pair in ((drafts.TestDrafter(), Fixed(chain)), (Fixed(chain), drafts.TestDrafter())):
        assert proposed(*pair).tokens.tolist() == chain


def test_both_learn_from_every_round():
    first, second = Fixed([[1]] * len(PROMPTS)), Fixed([[2]] * len(PROMPTS))
    run_rows(Decoder(FirstOf(first, second), seed=SEED), MODEL, PROMPTS)
    assert len(first.seen) == len(second.seen) > 1


def test_a_source_that_is_right_comes_before_a_useless_draft():
    expected = run_rows(Decoder(), MODEL, PROMPTS)
    draft = FirstOf(Source(ids=expected, least=1), drafts.Constant(4))
    decoder = Decoder(draft)
    assert run_rows(decoder, MODEL, PROMPTS) == expected
    assert decoder.stats.acceptance_length > 4


def test_a_source_with_a_least_match_is_silent_until_it_matches():
    def proposed(least, committed):
        call = call_of([[0]])
        draft = Source(length=3, ids=[[1, 2, 3, 4, 1, 9]], least=least)
        session = draft.begin(call, BranchOutput(logits=torch.zeros(1, 1, 12)))
        call.rows.ids[0, 1 : 1 + len(committed)] = torch.tensor(committed)
        call.rows.length = torch.tensor([len(committed)])
        return session.propose(9).tokens.tolist()[0]

    assert proposed(2, [7]) == proposed(2, [7, 1]) == proposed(2, [7, 8, 9, 1]) == [-1] * 3
    assert proposed(2, [1]) == [2, 3, 4]  # all there is matches
    assert proposed(2, [7, 2, 3]) == proposed(1, [7, 3]) == [4, 1, 9]
    assert proposed(2, [4, 1]) == [9, -1, -1]
    assert proposed(0, [7]) != [-1] * 3  # goes on as if a token had been replaced
    with pytest.raises(OptionError, match="least from 0 to ngram"):
        Source(ngram=2, least=3)


@pytest.mark.parametrize(
    "part", [Assistant(MODEL), LayerSkip(exit_layer=1)], ids=["assistant", "layer_skip"]
)
def test_a_draft_that_remembers_its_own_tokens_alone_is_refused(part):
    with pytest.raises(IncompatibleError, match="cannot continue after tokens that another"):
        FirstOf(Source(ids=[SOURCE]), part)


def test_a_string_puts_a_source_before_a_draft():
    draft = registry.create("draft", "first_of:second=recycling,length=7")
    assert isinstance(draft.first, Source) and isinstance(draft.second, Recycling)
    assert (draft.first.length, draft.first.least) == (7, 2)
    assert draft.capabilities.graph_safe

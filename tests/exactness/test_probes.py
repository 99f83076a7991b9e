"""The contracts under parts that no built-in method has yet: probes of what others may write."""

import pytest
import torch

from mmdecode.adapters.text import DecoderOnlyAdapter
from mmdecode.decoder import Decoder
from mmdecode.draft.jacobi import Jacobi
from mmdecode.engine.adapter import MAIN, BranchSpec
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.contracts import BranchOutput, BranchRunner, Guide, Requirements
from mmdecode.engine.noise import Role
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.testing import check_adapter, check_guide, drafts
from mmdecode.testing.checks import (
    PROMPTS,
    SEED,
    assert_lossless,
    distribution_of,
    run_rows,
)
from mmdecode.testing.table import Table, TableAdapter, call_of, left_pad
from tests.exactness.windows import window
from tests.support import tiny_models
from tests.support.sessions import Wrapped

MODEL = Table(5, seed=3, bias={0: 1.0, 4: -0.5})
modes = pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])


# A Jacobi draft that keeps its tail


class Watched(Jacobi):
    """Checks each tail against the promise of `Outcome`."""

    seen = 0

    def begin(self, call, prefill):
        return Watching(super().begin(call, prefill), self)


class Watching(Wrapped):
    def __init__(self, inner, drafter):
        super().__init__(inner)
        self.drafter = drafter

    def observe(self, proposal, output, block):
        super().observe(proposal, output, block)
        call, outcome = self.call, block
        tail, distribution = outcome.window.tokens, outcome.window.logits
        assert tail.shape == proposal.tokens.shape and distribution.shape == (
            *tail.shape,
            MODEL.vocab,
        )
        used = tail >= 0
        assert bool((used.long().diff(dim=1) <= 0).all()), "left-aligned, -1 behind"
        was_open = outcome.next_token >= 0
        room = (proposal.tokens >= 0).sum(1) - outcome.num_accepted
        assert torch.equal(used.sum(1), torch.where(was_open, room, 0))
        # the round and the start as they were when the rule ran: observe comes after the commit
        begin = self.before_length if proposal.size else call.rows.length * 0
        positions = begin[:, None] + outcome.num_accepted[:, None] + 1
        positions = positions + torch.arange(tail.shape[1])
        noise = 0
        if call.request.do_sample and call.plan.window_mode == "coupled":
            noise = call.request.noise.gumbel(positions, Role.TARGET, MODEL.vocab)
        elif call.request.do_sample:
            count = proposal.size + 1
            rounds = call.rows.rounds - was_open.long()
            noise = call.request.noise.gumbel(positions, Role.WINDOW, MODEL.vocab, trial=rounds)
            assert count > 0
        sampled = (distribution + noise).argmax(-1)
        assert torch.equal(sampled[used], tail[used]), (
            "the distribution is the one each was drawn from"
        )
        self.drafter.seen += int(used.sum())

    def propose(self, budget):
        self.before_length = self.call.rows.length.clone()
        return super().propose(budget)


@modes
@pytest.mark.parametrize("tail", ["redraw", "coupled"])
def test_a_jacobi_tail_is_left_aligned_and_sampled_from_its_distribution(tail, do_sample):
    draft = window(4, tail, make=Watched)
    decoder = Decoder(draft, seed=SEED)
    assert_lossless(decoder, MODEL, distribution_of(MODEL), do_sample=do_sample, eos=[4])
    assert draft.seen > 10


@modes
def test_a_jacobi_window_converges_at_once_where_tokens_do_not_matter(do_sample):
    blind = Table(5, seed=3, blind=True)
    decoder = Decoder(window(4, "coupled"), seed=SEED)
    rows = assert_lossless(
        decoder, blind, distribution_of(blind), do_sample=do_sample, max_new_tokens=40
    )
    # a refilled window is right at once, so of two rounds at least one keeps its tail whole
    assert decoder.stats.tokens == sum(map(len, rows)) == 160
    assert decoder.stats.acceptance_length > 2.5
    useless = Decoder(window(4, "redraw"), seed=SEED)
    run_rows(useless, blind, PROMPTS, do_sample=True, max_new_tokens=40)
    assert useless.stats.acceptance_length < decoder.stats.acceptance_length


def test_a_window_takes_at_most_a_round_per_token():
    decoder = Decoder(window(4, "coupled"), seed=SEED)
    rows = run_rows(decoder, MODEL, PROMPTS, do_sample=True, max_new_tokens=24)
    assert decoder.stats.rounds <= sum(map(len, rows)) - len(rows)


# A second stage with a tokenizer of its own


TEXT = ["a", "bc", "d", " ", "abc"]
CHARACTERS = "abcd "


class TextScorer(BranchRunner):
    """Scores the candidates of stage 1 as text: pairs of letters are its tokens."""

    stage = 2

    def __init__(self, call, top):
        self.call, self.top = call, top

    def value(self, text):
        pairs = [text[i : i + 2] for i in range(0, len(text), 2)]  # from the start, always
        ids = [sum((CHARACTERS.index(c) + 1) * 7**i for i, c in enumerate(p)) for p in pairs]
        return float(MODEL.target_logits([i % 50 for i in ids])[0])

    def answer(self, proposal, earlier):
        candidates = earlier["main"].logits.topk(self.top, dim=-1).indices
        parents, _, _ = proposal.structure()
        parents = parents.expand(len(candidates), -1)
        scores = torch.zeros(candidates.shape)
        for b in range(len(candidates)):
            end = int(self.call.end()[b])
            prompt = self.call.request.prompt_ids[b][self.call.request.prompt_mask[b]].tolist()
            base = prompt + self.call.rows.ids[b, self.call.prompt_length : end].tolist()
            for row in range(proposal.size + 1):
                path, node = [], row - 1
                while node >= 0:
                    path.insert(0, int(proposal.tokens[b, node].clamp_min(0)))
                    node = int(parents[b, node])
                text = "".join(TEXT[min(t, 4)] for t in base + path)
                for k, token in enumerate(candidates[b, row].tolist()):
                    scores[b, row, k] = self.value(text + TEXT[token])
        return {"text": BranchOutput(logits=scores, candidates=candidates)}

    def prefill(self, call, earlier):
        return self.answer(Proposal.empty(call.batch, call.device), earlier)

    def score(self, call, proposal, earlier):
        return self.answer(proposal, earlier)

    def commit(self, path, count, chain):
        """Its prefix is the text of the context."""

    def select_rows(self, rows):
        """The context has them already."""


class TextFusion(Guide):
    """Log-linear fusion over the candidates; other tokens are excluded."""

    neutral = False
    branches = (BranchSpec(name="text", stage=2, build=lambda call: TextScorer(call, 3)),)

    def begin(self, call, prefill):
        return None

    def apply(self, constants, call, proposal, outputs):
        main, text = outputs["main"].logits, outputs["text"]
        fused = main.gather(-1, text.candidates) + text.logits
        return torch.full_like(main, -torch.inf).scatter(-1, text.candidates, fused)


def test_a_second_stage_with_another_tokenizer_is_a_guide_like_any_other():
    plain = run_rows(Decoder(None, TextFusion()), MODEL, PROMPTS[:2])
    assert plain != run_rows(Decoder(), MODEL, PROMPTS[:2])
    check_guide(TextFusion)


class PiecewiseScorer(TextScorer):
    """The mistake to avoid: tokenises again after each committed block."""

    def value(self, text):
        tail = text[-3:] if int(self.call.rows.rounds.max()) % 2 else text
        return super().value(tail)


def test_a_second_stage_that_depends_on_the_block_cut_is_found():
    class Piecewise(TextFusion):
        branches = (BranchSpec(name="text", stage=2, build=lambda call: PiecewiseScorer(call, 3)),)

    with pytest.raises(AssertionError, match="undrafted"):
        check_guide(Piecewise)


# Forks and reordering


ROWS = torch.tensor([2, 0, 0, 3])


def commit(call, tokens):
    """Appends ``tokens (B, n)`` to every row."""
    columns = call.end()[:, None] + torch.arange(tokens.shape[1])
    call.rows.ids.scatter_(1, columns, tokens)
    call.rows.length = call.rows.length + tokens.shape[1]
    call.rows.rounds = call.rows.rounds + 1


def branches_after_a_round(call, specs):
    branches = ModelRunner(TableAdapter(MODEL), specs)
    branches.prefill(call, {})
    commit(call, call.request.prompt_ids[:, -1:])
    call.rows.cur_len = int(call.rows.length.max())
    tree = Tree((-1, -1, 0, 1))
    tokens = (call.request.prompt_ids[:, -1:] + torch.arange(4)) % 5
    branches.score(call, Proposal(tokens=tokens, kind="deterministic", tree=tree), {})
    path = torch.tensor([[1, 3]]).expand(call.batch, -1)
    branches.commit(path, torch.full((call.batch,), 3), False)
    commit(call, torch.cat([tokens.gather(1, path), tokens[:, :1]], 1))
    return branches


def context_of(prompts, salts):
    return call_of(prompts, TableAdapter(MODEL), model_kwargs={"salt": torch.tensor(salts)})


def test_reordered_branches_go_on_as_if_the_rows_had_always_stood_so():
    specs = [
        MAIN,
        BranchSpec(name="u", prompt="last_token", transform="salt", transform_options={"by": 4}),
    ]
    call = context_of(PROMPTS, [4, 5, 6, 7])
    branches = branches_after_a_round(call, specs)
    branches.select_rows(ROWS)
    call = context_of([PROMPTS[i] for i in ROWS.tolist()], [[4, 5, 6, 7][i] for i in ROWS.tolist()])
    fresh = branches_after_a_round(call, specs)
    tokens = torch.tensor([[1, 2], [3, 4], [0, 0], [2, 1]])  # the forks part here
    for _ in range(2):
        proposal = Proposal(tokens=tokens, kind="deterministic")
        found, expected = branches.score(call, proposal, {}), fresh.score(call, proposal, {})
        for name in ("main", "u"):
            assert torch.equal(found[name].logits, expected[name].logits)
        for scorer in (branches, fresh):
            scorer.commit(torch.tensor([[0, 1]]).expand(4, -1), torch.full((4,), 3), True)
        commit(call, torch.cat([tokens, tokens[:, :1]], 1))


# A draft that is fed by hidden states


class Listener(drafts.Random):
    """Keeps the states of every round next to what they belong to."""

    def needs(self, adapter):
        return Requirements(hidden=frozenset({0, "last"}), prompt_hidden=True)

    def begin(self, call, prefill):
        self.prompt, self.rounds, self.root = prefill, [], None
        return super().begin(call, prefill)

    def learn(self, call, proposal, output, block):
        if self.root is not None:
            self.rounds.append((self.root, proposal, output))
        self.root = [
            call.request.prompt_ids[b][call.request.prompt_mask[b]].tolist()
            + call.rows.ids[b, call.prompt_length : int(call.end()[b])].tolist()
            for b in range(call.batch)
        ]


def tiny_llama():
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32}
    return tiny_models.llama(**sizes, num_key_value_heads=1, initializer_range=0.5)


def test_hidden_states_are_those_of_each_nodes_own_prefix():
    model, draft = tiny_llama(), Listener(Tree((-1, -1, 0, 1, 1)))
    prompts = [[5, 6, 7], [1, 2, 3, 4, 5, 6], [9]]
    run_rows(Decoder(draft), model, prompts, max_new_tokens=6)
    embed = model.get_input_embeddings().weight
    assert draft.prompt.prompt_hidden[0].shape == (3, 6, 16)
    assert len(draft.rounds) >= 3
    with torch.no_grad():
        for b, prompt in enumerate(prompts):
            alone = model.model(torch.tensor([prompt])).last_hidden_state[0]
            found = draft.prompt.prompt_hidden["last"][b, -len(prompt) :]
            torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-4)
            assert torch.equal(draft.prompt.prompt_hidden[0][b, -len(prompt) :], embed[prompt])
        for roots, proposal, scores in draft.rounds:
            nodes = proposal.size
            assert scores.hidden[0].shape == scores.hidden["last"].shape == (3, nodes + 1, 16)
            head = model.lm_head(scores.hidden["last"])
            torch.testing.assert_close(head, scores.logits, atol=1e-5, rtol=1e-5)
            for b, root in enumerate(roots):
                for row in range(nodes + 1):
                    path, node = [], row - 1
                    while node >= 0:
                        path.insert(0, int(proposal.tokens[b, node]))
                        node = proposal.tree.parents[node]
                    if -1 in path or root[-1] == 40 or len(root) == len(prompts[b]) + 6:
                        continue
                    assert torch.equal(scores.hidden[0][b, row], embed[[*root, *path][-1]])
                    alone = model.model(torch.tensor([[*root, *path]])).last_hidden_state[0, -1]
                    torch.testing.assert_close(
                        scores.hidden["last"][b, row], alone, atol=1e-4, rtol=1e-4
                    )


def test_the_text_adapter_passes_the_public_check():
    ids, mask = left_pad([[5, 6, 7], [1, 2, 3, 4, 5, 6], [9]])
    check_adapter(DecoderOnlyAdapter, tiny_llama(), ids, mask)

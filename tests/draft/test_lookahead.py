"""Lookahead: what its window guesses, what its pool holds, and that nothing else changes."""

import itertools

import pytest

from mmdecode.decoder import Decoder
from mmdecode.draft.lookahead import POOL, Lookahead, LookaheadSession
from mmdecode.errors import OptionError
from mmdecode.testing import check_draft
from mmdecode.testing.checks import PROMPTS, run_rows
from mmdecode.testing.table import Table
from tests.support.sessions import noting

MODEL = Table(5, seed=3, bias={0: 1.0, 4: -0.5})


def watching(draft):
    """Notes its window, its pool and the prefix of every round."""
    rounds = []

    def note(session, proposal):
        call = session.call
        prefix = call.rows.ids[0, : int(call.end()[0])].tolist()
        window = [row[0].tolist() for row in session.rows]
        rounds.append((prefix, window, session.pool[0].clone(), proposal.tokens[0].tolist()))

    return noting(draft, proposed=note), rounds


@pytest.mark.slow
def test_the_public_check():
    check_draft(lambda: Lookahead(window=2, ngram=3, guesses=2))


def watched(window=3, ngram=4, guesses=2):
    draft, rounds = watching(Lookahead(window, ngram, guesses))
    expected = run_rows(Decoder(), MODEL, PROMPTS[:1], max_new_tokens=60)
    assert run_rows(Decoder(draft), MODEL, PROMPTS[:1], max_new_tokens=60) == expected
    return [r for r in rounds if len(r[0]) < 3 + 60 - 8]  # the end is cut short


def assert_window_is_guessed():
    rounds = watched()
    assert len(rounds) > 20
    for (prefix, rows, _, _), (_, after, _, _) in itertools.pairwise(rounds):
        guesses = []
        for column in range(3):
            path = [*rows[0][: column + 1], *(row[column] for row in rows[1:])]
            guesses.append(int(MODEL.target_logits([*prefix, *path]).argmax()))
        kept = rows[1:] if len(rows) == 3 else rows
        assert after == [*kept, guesses]


def test_each_column_goes_on_as_the_model_does():
    assert_window_is_guessed()


def test_a_window_that_reads_other_scores_is_found(monkeypatch):
    sound = LookaheadSession.observe

    def shifted(self, proposal, scores, block):
        rolled = type(scores)(logits=scores.logits.roll(1, 1))
        sound(self, proposal, rolled, block)

    monkeypatch.setattr(LookaheadSession, "observe", shifted)
    with pytest.raises(AssertionError):
        assert_window_is_guessed()


def test_the_pool_holds_the_columns_once_and_drafts_the_newest():
    rounds = watched()
    known = []
    for index, (prefix, rows, pool, tokens) in enumerate(rounds):
        if index and len(rounds[index - 1][1]) == 3:
            before = rounds[index - 1][1]
            fresh = [[*(row[c] for row in before), rows[-1][c]] for c in range(3)]
            known = [gram for gram in known if gram not in fresh] + fresh
        held = [gram for gram in pool.tolist() if gram[0] >= 0]
        assert {tuple(gram) for gram in held} == {tuple(gram) for gram in known}
        fitting = [gram[1:] for gram in reversed(known) if gram[0] == prefix[-1]]
        drafted = [tokens[:3], tokens[3:6]]
        assert [gram for gram in drafted if gram[0] >= 0] == fitting[:2]
    assert any(tokens[0] >= 0 for _, _, _, tokens in rounds)
    assert len(known) < POOL


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
def test_a_row_alone_drafts_what_it_drafts_in_a_batch(do_sample):
    options = {"do_sample": do_sample, "max_new_tokens": 40}
    batch = Decoder(Lookahead(), seed=5)
    rows = run_rows(batch, MODEL, PROMPTS, **options)
    accepted = 0
    for prompt, row in zip(PROMPTS, rows, strict=True):
        alone = Decoder(Lookahead(), seed=5)
        assert run_rows(alone, MODEL, [prompt], **options) == [row]
        accepted += alone.stats.accepted
    assert accepted == batch.stats.accepted > 0


def test_what_repeats_is_drafted_whole():
    model = Table(5, sharpness=0.0, bias={2: 1.0})  # always 2
    decoder = Decoder(Lookahead(window=2, ngram=4, guesses=1))
    [row] = run_rows(decoder, model, [[1]], max_new_tokens=61)
    assert row == [2] * 61
    assert decoder.stats.rounds < 20  # four tokens a round, once the window is full


def test_settings_are_checked_and_without_a_window_nothing_is_drafted():
    for options in ({"window": -1}, {"ngram": 1}, {"guesses": -1}):
        with pytest.raises(OptionError, match="window"):
            Lookahead(**options)
    decoder = Decoder(Lookahead(window=0))
    assert run_rows(decoder, MODEL, PROMPTS) == run_rows(Decoder(), MODEL, PROMPTS)
    assert decoder.stats.drafted == 0


def test_a_window_is_as_wide_as_asked_in_a_small_vocabulary():
    draft = Lookahead(window=9, ngram=2, guesses=1)
    rows = run_rows(Decoder(draft), MODEL, PROMPTS)
    assert rows == run_rows(Decoder(), MODEL, PROMPTS)

"""The stability rule against a loop that follows its words, with and without drafts."""

import pytest
import torch

from mmdecode.asr.alignment.words import Token
from mmdecode.decoder import Decoder
from mmdecode.errors import OptionError
from mmdecode.guide import stability as ours
from mmdecode.guide.stability import Stability
from mmdecode.testing.table import Table, decode, new_tokens

VOCAB, END = 6, 5


def by_the_words(model, prompt, last, m, most):
    """Continues the last hypothesis token by token."""
    tokens, kept = list(prompt), []
    for index, token in enumerate(last):
        logits = model.target_logits(tokens)
        older = index < len(last) - m
        if not older and logits[token] < token.evidence and int(logits.argmax()) != token:
            break
        kept.append(int(token))
        tokens.append(int(token))
        if token == END:
            return kept
    while len(kept) < most:
        kept.append(int(model.target_logits(tokens).argmax()))
        tokens.append(kept[-1])
        if kept[-1] == END:
            break
    return kept[:most]


def run(guide, model, prompts, rows, draft=None, most=8):
    ids = torch.tensor(prompts)
    found = decode(
        model,
        ids,
        Decoder(draft, guide=guide),
        eos=END,
        max_new_tokens=most,
        mm_inputs={"source_ids": rows},
    )
    return new_tokens(found, ids.shape[1], VOCAB)


def hypotheses(model, prompt, seed):
    """Tokens that the model would write, some replaced, with other logits than now."""
    random = torch.Generator().manual_seed(seed)
    tokens, text = [], list(prompt)
    for _ in range(int(torch.randint(0, 7, (1,), generator=random))):
        logits = model.target_logits(text)
        token = int(logits.argmax())
        if torch.rand(1, generator=random) < 0.4:
            token = int(torch.randint(0, VOCAB - 1, (1,), generator=random))
        offset = float(torch.randn(1, generator=random))
        tokens.append(Token.weighed(token, float(logits[token]) + offset))
        text.append(token)
        if token == END:
            break
    return tokens


PROMPTS = [[1, 2, 3], [4, 0, 1], [2, 2, 2]]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("m", [0, 1, 2, 5])
@pytest.mark.parametrize("draft", [None, "lookup", "source"])
def test_texts_are_those_of_the_rule(m, draft):
    changed = 0
    for seed in range(20):
        model = Table(VOCAB, seed=seed)
        rows = [hypotheses(model, prompt, 100 * seed + i) for i, prompt in enumerate(PROMPTS)]
        found = run(Stability(m), model, PROMPTS, rows, draft)
        expected = [
            by_the_words(model, prompt, row, m, 8)
            for prompt, row in zip(PROMPTS, rows, strict=True)
        ]
        assert found == expected
        plain = [by_the_words(model, prompt, [], 0, 8) for prompt in PROMPTS]
        changed += found != plain
    assert changed > 5


MISTAKES = {
    "the last tokens are always kept": lambda m: Stability(0),
    "one token more is decided again": lambda m: Stability(m + 1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake):
    wrong = 0
    for seed in range(20):
        model = Table(VOCAB, seed=seed)
        rows = [hypotheses(model, prompt, 100 * seed + i) for i, prompt in enumerate(PROMPTS)]
        expected = [
            by_the_words(model, prompt, row, 2, 8)
            for prompt, row in zip(PROMPTS, rows, strict=True)
        ]
        wrong += run(MISTAKES[mistake](2), model, PROMPTS, rows) != expected
    assert wrong > 1


class TimestampRule:
    """Excludes text where all timestamps together are more likely than any of it, as Whisper's."""

    def __init__(self, first):
        self.first = first

    def __call__(self, ids, scores):
        stamps = scores[:, self.first : END].logsumexp(-1, keepdim=True)
        text = scores[:, : self.first].amax(-1, keepdim=True)
        order = torch.arange(scores.shape[-1])
        return scores.masked_fill((stamps > text) & (order < self.first), -torch.inf)


@pytest.mark.parametrize("lift", [ours.LIFT, 1.0])
def test_a_kept_token_outweighs_all_timestamps_together(lift, monkeypatch):
    monkeypatch.setattr(ours, "LIFT", lift)
    model = Table(VOCAB, sharpness=0.1)  # nearly uniform: timestamps are ids 1 to 4
    rows = [[Token.weighed(0, 0.0), Token.weighed(0, 0.0), Token.weighed(0, 0.0)]] * 3
    found = decode(
        model, torch.tensor(PROMPTS), Decoder(guide=Stability(0)), eos=END, max_new_tokens=3,
        mm_inputs={"source_ids": rows}, processors=[TimestampRule(1)],
    )  # fmt: skip
    kept = new_tokens(found, len(PROMPTS[0]), VOCAB) == [[0, 0, 0]] * 3
    assert kept == (lift > 1.0)


def test_ids_without_logits_only_draft():
    model = Table(VOCAB, seed=3)
    rows = [[0, 1, 2, 3]] * 3
    plain = [by_the_words(model, prompt, [], 0, 8) for prompt in PROMPTS]
    assert run(Stability(2), model, PROMPTS, rows) == plain


def test_a_negative_number_is_refused():
    with pytest.raises(OptionError, match="m=-1; expected a number of tokens"):
        ours.Stability(-1)

"""CTC prefix scores against enumeration, and the guide that adds them."""

import itertools
import math

import pytest
import torch

from mmdecode.decoder import Decoder
from mmdecode.draft.ctc import CTC
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.guide.ctc import Constants, CTCScore, PrefixScorer
from tests.draft.test_ctc import random_head
from tests.support import tiny

FRAMES, LABELS = 5, 2
VOCAB = 100
"""Size of the vocabulary of the tiny Whisper."""


def collapsed(path):
    return tuple(label for label, _ in itertools.groupby(path) if label)


def frame_probabilities(seed, frames=FRAMES, labels=LABELS):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, frames, labels + 1, generator=generator, dtype=torch.double).log_softmax(
        -1
    )


def enumerated(log_probs):
    """Probability of each text: the sum over all paths that collapse to it."""
    found = {}
    for path in itertools.product(range(log_probs.shape[2]), repeat=log_probs.shape[1]):
        chance = math.exp(sum(float(log_probs[0, t, label]) for t, label in enumerate(path)))
        found[collapsed(path)] = found.get(collapsed(path), 0.0) + chance
    return found


def prefixes_of(scorer, longest, labels=LABELS):
    """Every text of up to ``longest`` labels with its scores."""
    waiting = [((), scorer.empty())]
    while waiting:
        text, found = waiting.pop()
        yield text, found
        if len(text) < longest:
            for label in range(1, labels + 1):
                waiting.append(((*text, label), scorer.extended(found, torch.tensor([[label]]))))


def assert_enumerated(seed):
    log_probs = frame_probabilities(seed)
    texts, scorer = enumerated(log_probs), PrefixScorer(log_probs)
    count = 0
    for text, found in prefixes_of(scorer, 4):
        begins = sum(chance for own, chance in texts.items() if own[: len(text)] == text)
        assert found.score.exp().item() == pytest.approx(begins, abs=1e-9), text
        assert found.ends.exp().item() == pytest.approx(texts.get(text, 0.0), abs=1e-9), text
        every = torch.arange(1, LABELS + 1)[None, None]
        after = scorer.scores(found, every).exp()[0, 0]
        # the next label or the end: a distribution
        assert float(after.sum() + found.ends.exp()) == pytest.approx(begins, abs=1e-9)
        count += 1
    return count


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_all_paths(seed):
    assert assert_enumerated(seed) == 31


def without_repeats(self, prefixes, labels):
    return torch.logaddexp(prefixes.label, prefixes.blank)[..., :-1]


MISTAKES = {
    "a repeated label needs no blank": ("_before", without_repeats),
    "frame 0 counts twice": (
        "_before",
        lambda self, p, labels: torch.logaddexp(p.label, p.blank)[..., 1:],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_recursion_is_found(mistake, monkeypatch):
    monkeypatch.setattr(PrefixScorer, *MISTAKES[mistake])
    with pytest.raises(AssertionError):
        assert_enumerated(0)


def test_certain_blanks_after_the_audio_change_nothing():
    log_probs = frame_probabilities(1)
    more = torch.full((1, 4, LABELS + 1), -math.inf, dtype=torch.double)
    more[..., 0] = 0.0
    longer = PrefixScorer(torch.cat([log_probs, more], 1))
    scorer = PrefixScorer(log_probs)
    for (_, one), (_, two) in zip(prefixes_of(scorer, 3), prefixes_of(longer, 3), strict=True):
        assert float(one.score - two.score) == pytest.approx(0, abs=1e-9)
        assert float(one.ends - two.ends) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("fault", [None, "the first label alone counts"])
def test_a_spelled_token_has_the_score_of_its_labels(fault):
    log_probs = frame_probabilities(0)
    texts, scorer = enumerated(log_probs), PrefixScorer(log_probs)
    spellings = torch.tensor([[1, 0, 0], [2, 1, 0], [1, 1, 2], [2, 2, 0]])
    if fault:
        spellings[:, 1:] = 0
    wrong = 0
    for text, found in prefixes_of(scorer, 2):
        scores = scorer.spelled_scores(found, spellings[None, None])[0, 0].exp()
        for score, more in zip(scores.tolist(), [(1,), (2, 1), (1, 1, 2), (2, 2)], strict=True):
            whole = (*text, *more)
            begins = sum(chance for own, chance in texts.items() if own[: len(whole)] == whole)
            wrong += score != pytest.approx(begins, abs=1e-9)
    assert bool(wrong) == bool(fault)


@pytest.mark.parametrize("fault", [None, "it is taken in"])
def test_a_token_that_the_frames_have_no_room_for_is_left_out(fault, monkeypatch):
    if fault:
        monkeypatch.setattr(PrefixScorer, "followed", PrefixScorer.spelled)
    log_probs = frame_probabilities(1)
    padding = torch.full((1, 6, LABELS + 1), -math.inf, dtype=torch.double)
    padding[..., 0] = 0.0
    guide, found = CTCScore(random_head(), 0.5), []
    for frames in (log_probs, torch.cat([log_probs, padding], 1)):
        scorer = PrefixScorer(frames)
        prefixes = scorer.empty()
        for number in range(9):  # five frames have room for five labels
            prefixes = scorer.followed(prefixes, torch.tensor([[[1 + number % 2]]]))
        labels, nothing = torch.tensor([[1], [2], [0]]), torch.zeros(1, 0).long()
        shared, end = torch.ones(3, dtype=torch.bool), torch.tensor([2])
        constants = Constants(scorer, labels, shared, end, nothing, prefixes)
        logits, last = torch.zeros(1, 1, 3).double(), torch.tensor([[1]])
        found.append(guide.mixed(constants, logits, prefixes, last)[0, 0].exp())
    alone, padded = found
    right = float((alone - padded).abs().max()) < 1e-9 and float(alone[2]) > 0.99
    assert right == (fault is None)


@pytest.mark.parametrize("fault", [None, "the end is scored everywhere"])
def test_after_an_id_without_a_spelling_the_end_keeps_its_probability(fault):
    """A window of Whisper may end after a timestamp, though its frames hold further words."""
    scorer = PrefixScorer(frame_probabilities(1, frames=30))
    labels = torch.tensor([[1], [2], [0], [0]])  # two labels, the end and a timestamp
    shared = torch.tensor([True, True, True, False])
    constants = Constants(
        scorer, labels, shared, torch.tensor([2]), torch.zeros(1, 0).long(), scorer.empty()
    )
    own = torch.tensor([0.1, 0.2, 0.4, 0.3]).double()
    last = torch.tensor([[-1, 0, 1, 3]])
    if fault:
        last = torch.zeros_like(last)
    prefixes = scorer.empty().at(torch.zeros(1, 4).long())
    guide = CTCScore(random_head(), 0.5)
    found = guide.mixed(constants, own.log().expand(1, 4, 4), prefixes, last)[0].exp()
    assert found[:, 3].tolist() == pytest.approx([0.3] * 4)  # as is any timestamp
    assert found.sum(-1).tolist() == pytest.approx([1.0] * 4)
    assert max(found[:3, 2].tolist()) < 0.2  # there are words in the frames
    assert (found[3, 2].item() == pytest.approx(0.4)) == (fault is None)


def test_long_recordings_do_not_underflow():
    """1500 frames, 50 labels, against a loop over frames."""
    log_probs = frame_probabilities(2, 1500, 50)
    scorer = PrefixScorer(log_probs)
    found, text = scorer.empty(), [3, 3, 7, 1] * 12
    label, blank = torch.full((1501,), -math.inf), torch.zeros(1501)
    label, blank = label.double(), blank.double()
    blank[1:] = log_probs[0, :, 0].cumsum(0)
    last = None
    for one in text:
        found = scorer.extended(found, torch.tensor([[one]]))
        before = blank if one == last else torch.logaddexp(label, blank)
        new_label, new_blank = torch.full_like(label, -math.inf), torch.full_like(blank, -math.inf)
        score = torch.tensor(-math.inf).double()
        for t in range(1, 1501):
            own = log_probs[0, t - 1]
            new_label[t] = torch.logaddexp(new_label[t - 1], before[t - 1]) + own[one]
            new_blank[t] = torch.logaddexp(new_label[t - 1], new_blank[t - 1]) + own[0]
            score = torch.logaddexp(score, before[t - 1] + own[one])
        label, blank, last = new_label, new_blank, one
    assert found.score.item() == pytest.approx(float(score), rel=1e-9)
    assert found.ends.item() == pytest.approx(
        float(torch.logaddexp(label[-1], blank[-1])), rel=1e-9
    )


# ---- the guide


def guided(draft=None, weight=0.4, batch=3, head=None, **options):
    guide = CTCScore(head or random_head(), weight, **options)
    return tiny.ours(Decoder(draft, guide=guide), "whisper", batch=batch)


def test_weight_zero_changes_nothing():
    assert torch.equal(guided(weight=0.0), tiny.plain("whisper"))


def test_it_changes_the_text():
    assert not torch.equal(guided(), tiny.plain("whisper"))


@pytest.mark.parametrize("draft", ["lookup", "medusa-less", "ctc"])
def test_ids_are_the_same_with_any_draft(draft):
    made = {"lookup": "lookup", "ctc": CTC(random_head()), "medusa-less": "lookahead"}[draft]
    assert torch.equal(guided(made), guided())


def test_rows_do_not_depend_on_their_batch():
    every = guided(batch=3)
    assert torch.equal(guided(batch=2), every[:2])


def test_remembered_scores_are_those_of_the_text(monkeypatch):
    """The scores of the committed text are computed anew in every round."""
    expected = guided("lookup")
    plain = CTCScore._committed

    def forgets(self, constants, call):
        constants.ids, constants.prefixes = constants.ids[:, :0], constants.scorer.empty()
        return plain(self, constants, call)

    monkeypatch.setattr(CTCScore, "_committed", forgets)
    assert torch.equal(guided("lookup"), expected)


@pytest.mark.parametrize("fault", [None, "scores of the frames"])
@pytest.mark.parametrize("spelled", [False, True])
def test_weight_one_follows_the_head_alone(monkeypatch, spelled, fault):
    """With the whole weight and all labels, greedy decoding is the head's greedy prefix search."""
    head, made = spelling_head() if spelled else random_head(), []
    monkeypatch.setattr(CTCScore, "begin", noting(CTCScore.begin, made))
    if fault:
        monkeypatch.setattr(PrefixScorer, "scores", frame_scores)
        monkeypatch.setattr(PrefixScorer, "spelled_scores", frame_scores)
    text = guided(weight=1.0, head=head, candidates=0, batch=1)[0].tolist()
    constants, scorer = made[0], PrefixScorer(made[0].scorer.log_probs)
    labels, prefixes, agreed, wrong = constants.labels, scorer.empty(), 0, 0
    monkeypatch.undo()
    tokens = (labels[:, 0] > 0).nonzero()[:, 0]
    for token in text[-tiny.NEW :]:
        scores = scorer.spelled_scores(prefixes, labels[tokens][None, None])[0, 0]
        best = max(float(scores.max()), float(prefixes.ends))
        if int(labels[token, 0]):
            own = float(scores[tokens == token])
            agreed += own == pytest.approx(best, abs=1e-9)
            wrong += own != pytest.approx(best, abs=1e-9)
            prefixes = scorer.spelled(prefixes, labels[token][None, None])
    assert (agreed > 3 and not wrong) if not fault else wrong


def frame_scores(self, prefixes, labels):
    """The label's largest probability in any frame, whatever came before."""
    first = labels if labels.dim() == 3 else labels[..., 0]
    return self.log_probs.amax(1)[0][first]


def noting(begin, made):
    def begins(self, call, prefill):
        made.append(begin(self, call, prefill))
        return made[-1]

    return begins


def spelling_head():
    """A head whose subwords also spell other tokens."""
    plain = random_head()
    head = type(plain)({**plain.config, "vocab_size": VOCAB, "spelled": 3})
    head.load_state_dict({**plain.state_dict(), "spellings": head.spellings})
    table = plain.labels(VOCAB).to(torch.int16)
    head.spellings[:, :1] = table
    free = (table[:, 0] == 0).nonzero()[:30, 0]
    spelled = torch.randint(1, 21, (30, 3), generator=torch.Generator().manual_seed(2))
    head.spellings[free] = spelled.to(torch.int16)
    return head


@pytest.mark.parametrize("draft", ["lookup", "medusa-less", "ctc"])
def test_ids_are_the_same_with_any_draft_where_tokens_are_spelled(draft):
    head = spelling_head()
    made = {"lookup": "lookup", "ctc": CTC(random_head()), "medusa-less": "lookahead"}[draft]
    expected = guided(head=head)
    assert torch.equal(guided(made, head=head), expected)
    assert not torch.equal(expected, guided())


def test_what_cannot_be_is_refused():
    with pytest.raises(OptionError, match="expected a weight from 0 to 1"):
        CTCScore(random_head(), 1.5)
    with pytest.raises(OptionError, match="guide 'ctc' needs head"):
        CTCScore.from_options(model_id="zoo:llava-scenes")
    with pytest.raises(IncompatibleError, match="encoder states of width"):
        guided(head=random_head(width=7))

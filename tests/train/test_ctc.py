"""Training of CTC heads: spelling with fewer subwords, the loss, and a head that learns a text."""

import functools
import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmdecode.asr import Transcriber
from mmdecode.asr.correction.guard import edits_of as errors
from mmdecode.draft.ctc import CTC
from mmdecode.errors import InputError, OptionError
from mmdecode.train.drafters import ctc
from mmdecode.train.drafters.ctc import CTCOptions, Sample, Speller, ctc_losses, train_head
from mmdecode.zoo.speech import speech_test
from tests.support.commands import invoke, json_of
from tests.support.seams import edited

PIECES = ["<unk>", *"_abcdein", "_an", "_bed", "ade", "<0x0A>", "in", "_cabin"]


class Tokenizer:
    unk_token_id = 0
    all_special_ids = (0,)

    def __len__(self):
        return len(PIECES)

    def get_added_vocab(self):
        return {"ade": PIECES.index("ade")}

    def convert_ids_to_tokens(self, token):
        return PIECES[token]

    def convert_tokens_to_ids(self, pieces):
        return [PIECES.index(piece) if piece in PIECES else 0 for piece in pieces]

    def decode(self, ids, **_):
        return "".join(PIECES[token] for token in ids).replace("_", " ").strip()


def ids_of(*pieces):
    return [PIECES.index(piece) for piece in pieces]


def test_rare_tokens_are_spelled_by_the_longest_subwords():
    frequent = [ids_of("_an", "in")] * 3
    ids = ids_of("_an", "_cabin", "_bed", "ade")
    speller = Speller.of(Tokenizer(), [*frequent, ids], 10)
    pieces = [PIECES[token] for token in speller.ids]
    assert sorted(pieces) == sorted([*"_abcdein", "_an", "in"])
    spelled = [pieces[index] for index in speller.spelled(ids)]
    assert spelled == ["_an", "_", "c", "a", "b", "in", "_", "b", "e", "d", "a", "d", "e"]
    assert Tokenizer().decode(speller.ids[i] for i in speller.spelled(ids)) == "an cabin bedade"
    shortest = edited(Speller._of, "range(min(self._longest, len(piece) - at), 0, -1)", "(1,)")
    speller._of = shortest.__get__(speller)
    assert [pieces[index] for index in speller.spelled(ids_of("_cabin"))][-2:] == ["i", "n"]


def test_tokens_that_nothing_spells_are_left_out():
    speller = Speller.of(Tokenizer(), [ids_of("_an", "_an", "_bed")], 3)
    assert len(speller.ids) == 3
    assert speller.spelled(ids_of("_cabin", "<0x0A>")) == []
    assert ids_of("<0x0A>")[0] in Speller.of(Tokenizer(), [ids_of("<0x0A>")], 9).ids


def test_labels_of_all_tokens_are_their_spellings():
    speller = Speller.of(Tokenizer(), [ids_of("_an", "in", "_", "c", "a", "b", "<0x0A>")], 20)
    pieces = ["", *(PIECES[token] for token in speller.ids)]
    labels = speller.labels(Tokenizer(), len(PIECES) + 3)
    found = [[pieces[label] for label in row if label] for row in labels.tolist()]
    assert found[PIECES.index("_cabin")] == ["_", "c", "a", "b", "in"]
    assert found[PIECES.index("_an")] == ["_an"] and found[PIECES.index("<0x0A>")] == ["<0x0A>"]
    assert found[PIECES.index("_bed")] == found[PIECES.index("ade")] == []  # no e; not text
    assert found[0] == [] and found[-3:] == [[]] * 3 and labels.shape[1] == 5


def collapsed(path):
    return [one - 1 for one, _ in itertools.groupby(path) if one]


def test_the_loss_is_the_sum_over_paths_per_token():
    logits = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(0))
    frames, targets = torch.tensor([4, 3, 4]), [[0, 1], [1, 1], []]
    found = ctc_losses(logits, frames, targets)
    for row, target in enumerate(targets):
        scores, size = logits[row].log_softmax(-1), int(frames[row])
        total = sum(
            math.exp(sum(scores[t, one] for t, one in enumerate(path)))
            for path in itertools.product(range(3), repeat=size)
            if collapsed(path) == target
        )
        assert found[row] == pytest.approx(-math.log(total) / max(1, len(target)), rel=1e-5)


def timed(stride, costs=ctc.outside):
    """Costs of labels of two tokens with spans, of one without, and of none, by frame."""
    speller = Speller(Tokenizer(), ids_of("_an", "in", *"_abc"))
    states = torch.zeros(12, 4)
    known = Sample(ids_of("_an", "_cabin"), states, [(0, 3), (4, 9)])
    free, silent = Sample(ids_of("_an"), states), Sample([], states, [])
    like = torch.zeros(3, 12 // stride, 7)
    return costs([known, free, silent], speller, stride, like)


def test_labels_outside_the_spans_of_their_tokens_cost():
    costs = timed(2)
    free = {1: range(0, 2), 2: range(2, 5)}  # "_an", and "in" of "_cabin", of states 4 to 9
    free |= {label: range(2, 5) for label in (3, 4, 5, 6)}  # "_", "a", "b" and "c"
    for frame, label in itertools.product(range(6), range(1, 7)):
        expected = 0.0 if frame in free[label] else ctc.OUTSIDE
        assert costs[0, frame, label] == expected, (frame, label)
    assert not costs[:, :, 0].any() and not costs[1].any()
    assert (costs[2, :, 1:] == ctc.OUTSIDE).all()
    assert not torch.equal(timed(2, edited(ctc.outside, "first // stride", "first")), costs)


def test_a_loss_with_spans_is_the_sum_over_paths_within_them():
    logits = torch.randn(1, 5, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
    costs = torch.full((1, 5, 3), 60.0)
    costs[0, :, 0] = costs[0, 1:3, 1] = costs[0, 3:, 2] = 0.0
    loss = ctc_losses(logits, torch.tensor([5]), [[0, 1]], costs)
    scores, within = logits[0].detach().log_softmax(-1), costs[0] == 0
    total = sum(
        math.exp(sum(scores[t, one] for t, one in enumerate(path)))
        for path in itertools.product(range(3), repeat=5)
        if collapsed(path) == [0, 1] and all(within[t, one] for t, one in enumerate(path))
    )
    assert loss.item() == pytest.approx(-math.log(total) / 2, rel=1e-5)


@pytest.mark.parametrize("cost", [0.5, 20.0])
def test_the_gradient_of_a_loss_with_costs_is_that_of_its_value(cost):
    dice = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 6, 4, generator=dice, requires_grad=True)
    costs = cost * (torch.rand(3, 6, 4, generator=dice) < 0.4)
    costs[..., 0] = 0.0

    def differences(losses):
        """Largest difference of the gradient to finite differences."""
        losses = functools.partial(
            losses, frames=torch.tensor([6, 5, 4]), targets=[[0, 1, 1], [2], []], costs=costs
        )
        (found,) = torch.autograd.grad(losses(logits).sum(), logits)
        steps = 0.01 * torch.eye(logits.numel()).view(-1, *logits.shape)
        slopes = [(losses(logits + step) - losses(logits - step)).sum() / 0.02 for step in steps]
        return (found - torch.stack(slopes).view_as(found)).abs().max().item()

    assert differences(ctc_losses) < 1e-3
    # torch's own gradient takes its input for normalised
    bare = edited(ctc_losses, "(scores - costs).logsumexp(-1)", "torch.zeros(scores.shape[:2])")
    assert differences(bare) > 0.05


def test_rows_with_fewer_frames_than_tokens_and_repeats_have_no_loss():
    logits = torch.randn(3, 4, 3, requires_grad=True)
    # a repeated token needs a blank: the first row has too few frames by one
    losses = ctc_losses(logits, torch.tensor([4, 2, 4]), [[0, 0, 0], [0, 1, 0], [0, 0]])
    assert losses[:2].tolist() == [0, 0] and losses[2] > 0
    losses.mean().backward()
    assert logits.grad.isfinite().all() and not logits.grad[:2].any() and logits.grad[2].any()


def test_errors_are_edits():
    assert errors("kitten", "sitting") == 3
    assert errors("", "abc") == errors("abc", "") == 3 and errors("ab", "ab") == 0


def spoken(count, seed=0, width=12):
    """Transcripts, and states that say a token each second time, and silence between."""
    dice = torch.Generator().manual_seed(seed)
    codes = torch.randn(len(PIECES), width, generator=torch.Generator().manual_seed(9))
    samples = []
    for _ in range(count):
        size = int(torch.randint(2, 7, (), generator=dice))
        ids = torch.randint(1, len(PIECES) - 3, (size,), generator=dice)
        states = torch.zeros(4 * size, width)
        states[1::4] = states[2::4] = codes[ids]
        noise = 0.1 * torch.randn(states.shape, generator=dice)
        samples.append(Sample(ids.tolist(), (states + noise).half()))
    return samples


OPTIONS = CTCOptions(vocabulary=20, inner=16, epochs=25, batch=4, peak_rate=1e-2, dropout=0.0)


def model_of(width=12):
    torch.manual_seed(0)
    return SimpleNamespace(get_input_embeddings=lambda: nn.Embedding(len(PIECES), width))


@pytest.mark.slow
def test_a_head_learns_what_states_say(tmp_path, monkeypatch):
    embedding = model_of().get_input_embeddings()
    model = SimpleNamespace(get_input_embeddings=lambda: embedding)
    head, report = train_head(model, Tokenizer(), spoken(80), OPTIONS)
    rates = report["word_errors_by_epoch"]
    assert report["word_errors"] == min(rates) < 0.4 < 0.8 < rates[0]
    head.save_pretrained(tmp_path / "head")
    saved = CTC.from_pretrained(tmp_path / "head").head
    new = spoken(8, seed=5)
    states, lengths = ctc._padded(new, embedding.weight)
    found = saved.greedy(states, lengths, embedding.weight[saved.ids].detach())
    texts = [Tokenizer().decode(ids) for ids in found]
    right = sum(a == Tokenizer().decode(b.ids) for a, b in zip(texts, new, strict=True))
    assert right >= 5
    # a loss that pairs recordings with other transcripts teaches nothing
    losses = ctc.ctc_losses
    monkeypatch.setattr(
        ctc,
        "ctc_losses",
        lambda logits, frames, wanted, costs: losses(logits, frames, wanted[::-1], costs),
    )
    _, report = train_head(model, Tokenizer(), spoken(80), OPTIONS)
    assert report["word_errors"] > 0.7


@pytest.mark.parametrize("rates", [(0.9, 0.8, 0.7, 0.6), (0.9, 0.5, 0.8, 0.7)])
def test_an_interrupted_training_ends_as_another(tmp_path, monkeypatch, rates):
    embedding = model_of().get_input_embeddings()
    model = SimpleNamespace(get_input_embeddings=lambda: embedding)
    options, file = replace(OPTIONS, epochs=4, dropout=0.2), tmp_path / "head.pt"

    def train(count, rates, state_file=None, spans=False, begin=None):
        """A rate of ``None`` is Ctrl-C."""
        found = iter(rates)

        def errors(*_):
            rate = next(found)
            if rate is None:
                raise KeyboardInterrupt
            return rate

        monkeypatch.setattr(ctc, "word_errors", errors)
        samples = spoken(count)
        if spans:
            samples = [replace(one, spans=[(0, 1)] * len(one.ids)) for one in samples]
        return train_head(model, Tokenizer(), samples, options, state_file, begin=begin)

    whole, expected = train(24, rates)
    with pytest.raises(KeyboardInterrupt):
        train(24, [*rates[:2], None], file)
    with pytest.raises(OptionError, match="other settings or data"):
        train(25, [], file)
    torch.save({"key": "as before"}, tmp_path / "older.pt")
    with pytest.raises(OptionError, match="other settings or data"):
        train(24, [], tmp_path / "older.pt")
    for change in ({"spans": True}, {"begin": whole}):
        with pytest.raises(OptionError, match="other settings or data"):
            train(24, [], file, **change)
    resumed, report = train(24, rates[2:], file)
    assert report == expected
    for name, weight in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name


def test_too_few_samples_and_odd_options_are_refused():
    with pytest.raises(InputError, match="19 training samples; expected at least 20"):
        train_head(model_of(), Tokenizer(), spoken(19), OPTIONS)
    with pytest.raises(OptionError, match="an odd kernel"):
        CTCOptions(kernel=4)
    with pytest.raises(OptionError, match=r"vocabulary=40000; expected at most 32000"):
        CTCOptions(vocabulary=40_000)


@pytest.mark.slow
def test_a_head_is_trained_from_recordings_and_loads_as_a_draft(tmp_path):
    table = tmp_path / "data.jsonl"
    clips = speech_test()[:24]
    table.write_text("".join(json.dumps({"path": str(clip.path)}) + "\n" for clip in clips))
    words = ["--data", table, "--out", tmp_path / "head", "--epochs", 2, "--width", 16]
    report = json_of(invoke("train", "ctc", "--model", "zoo:whisper-synth", *words, "--json"))
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["vocab_size"] > config["subwords"]
    assert report["samples"] >= 24 and len(report["word_errors_by_epoch"]) == 2
    transcribers = [
        Transcriber.from_pretrained("zoo:whisper-synth", draft)
        for draft in (None, f"ctc:head={tmp_path / 'head'}")
    ]
    assert transcribers[1].decoder.draft.tokenizer is transcribers[1].processor.tokenizer
    own, drafted = (t(clips[0].path).text for t in transcribers)
    assert own == drafted

"""Segmental attention on table models: search against enumeration, and a decoder that learns."""

import itertools
import math
import random

import pytest
import torch

from mmdecode.errors import InputError, OptionError
from mmdecode.models import segmental
from mmdecode.models.segmental import Recorded, SegmentalDecoder, search

FRAMES, LABELS = 5, 2


class TableModel:
    """Probabilities that depend on labels, begin and end in a random way."""

    def __init__(self, seed, frames=FRAMES, labels=LABELS):
        self.seed, self.frames, self.size = seed, frames, labels

    def _random(self, *key):
        return random.Random(repr((self.seed, *key)))

    def end(self, labels, begin, frame):
        return self._random("end", labels, begin, frame).gauss(0, 1.5)

    def label(self, labels, begin, stop):
        draw = self._random("label", labels, begin, stop)
        scores = torch.tensor([draw.gauss(0, 1.5) for _ in range(self.size)], dtype=torch.double)
        return scores.log_softmax(-1)


def enumerated(model, scale=1.0):
    """Log-probability of every segmentation with labels, by (labels, ends)."""
    found = {}
    for count in range(model.frames + 1):
        for ends in itertools.combinations(range(1, model.frames + 1), count):
            for labels in itertools.product(range(model.size), repeat=count):
                score, begin = 0.0, 0
                for index in range(count + 1):
                    stop = ends[index] if index < count else model.frames
                    for frame in range(begin, stop):
                        odds = model.end(labels[:index], begin, frame)
                        ending = index < count and frame == stop - 1
                        score -= scale * math.log1p(math.exp(-odds if ending else odds))
                    if index < count:
                        score += float(model.label(labels[:index], begin, stop)[labels[index]])
                    begin = stop
                found[labels, ends] = score
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_search_finds_the_best_segmentation_of_every_text(seed, scale):
    model = TableModel(seed)
    every = enumerated(model, scale)
    found = search(model, scale=scale)
    assert len(found) == len({labels for labels, _ in every}) == 63
    for path in found:
        best = max(score for (labels, _), score in every.items() if labels == path.labels)
        assert path.score == pytest.approx(best, abs=1e-9)
        assert every[path.labels, path.ends] == pytest.approx(best, abs=1e-9)
    assert [path.score for path in found] == sorted((p.score for p in found), reverse=True)


@pytest.mark.parametrize("seed", range(3))
def test_sums_are_those_of_all_segmentations_and_add_up_to_one(seed):
    model = TableModel(seed)
    every = enumerated(model)
    assert sum(map(math.exp, every.values())) == pytest.approx(1.0, abs=1e-9)
    for path in search(model, total=True):
        total = sum(math.exp(s) for (labels, _), s in every.items() if labels == path.labels)
        assert math.exp(path.score) == pytest.approx(total, abs=1e-9)


def test_recombining_hypotheses_with_other_ends_is_found(monkeypatch):
    plain = segmental._put

    def put(into, key, path, join):
        is_open = len(key) == 2 and isinstance(key[0], tuple)
        plain(into, (key[0], 0) if is_open else key, path, join)

    monkeypatch.setattr(segmental, "_put", put)
    model = TableModel(0)
    every = enumerated(model)
    with pytest.raises(AssertionError):
        for path in search(model):
            best = max(score for (labels, _), score in every.items() if labels == path.labels)
            assert path.score == pytest.approx(best, abs=1e-9)


def test_a_narrow_beam_keeps_few_and_is_no_better():
    lost = []
    for seed in range(8):
        model = TableModel(seed, labels=3)
        narrow, every = search(model, beam=2), search(model)
        assert len(narrow) <= 2
        lost.append(every[0].score - narrow[0].score)
    assert min(lost) > -1e-9 and max(lost) > 1e-3


def test_a_segment_ends_with_one_of_its_likeliest_labels():
    model = TableModel(0, labels=3)
    assert search(model, candidates=3) == search(model)
    for path in search(model, candidates=1):
        begins = (0, *path.ends)
        for index, label in enumerate(path.labels):
            chances = model.label(path.labels[:index], begins[index], path.ends[index])
            assert label == int(chances.argmax())


@pytest.mark.parametrize("options", [{"beam": 0}, {"candidates": 0}])
def test_a_search_that_keeps_nothing_is_refused(options):
    with pytest.raises(OptionError, match="=0; expected 1 or more"):
        search(TableModel(0), **options)


@pytest.mark.parametrize("stops", [[2, 2], [3, 1], [2, 9], [0, 2]])
def test_segments_outside_the_audio_are_refused(stops):
    decoder = SegmentalDecoder(vocab=4, source=6, width=8)
    with pytest.raises(InputError, match="of 6 states; expected increasing numbers from 1 to 6"):
        decoder.loss(torch.randn(6, 6), torch.tensor([0, 1]), torch.tensor(stops))


def test_one_segment_reads_all_frames():
    """A segment over the whole audio is attention over all of it."""
    torch.manual_seed(0)
    decoder = SegmentalDecoder(vocab=4, source=6, width=8).eval()
    states = torch.randn(7, 6)
    model = Recorded(decoder, states)
    context = decoder.context(torch.zeros(0, dtype=torch.long))
    query, keys, values = decoder.query(context), decoder.keys(states), decoder.values(states)
    read = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
    whole = decoder.output(torch.cat([read, context], -1))[0].log_softmax(-1)
    assert torch.allclose(model.label((), 0, 7), whole, atol=1e-6)
    changed = states.clone()
    changed[4:] += 1.0
    assert torch.equal(Recorded(decoder, changed).label((), 0, 4), model.label((), 0, 4))
    assert not torch.allclose(Recorded(decoder, changed).label((), 0, 5), model.label((), 0, 5))


@torch.no_grad()
def test_the_loss_is_the_likelihood_of_the_search():
    torch.manual_seed(1)
    decoder = SegmentalDecoder(vocab=3, source=4, width=8).eval()
    states = torch.randn(4, 4)
    every = enumerated_decoder(decoder, states)
    for labels, stops in (((0,), (2,)), ((2, 1), (1, 4)), ((1, 1, 0), (1, 2, 3))):
        loss = decoder.loss(states, torch.tensor(labels), torch.tensor(stops))
        assert -float(loss) * len(labels) == pytest.approx(every[labels, stops], abs=1e-4)


def enumerated_decoder(decoder, states):
    model = Recorded(decoder, states)
    model.size = 3
    return enumerated(model)


def test_it_learns_a_text_that_the_frames_show():
    torch.manual_seed(2)
    decoder = SegmentalDecoder(vocab=3, source=4, width=16)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-2)
    draw = random.Random(0)

    def sample():
        labels = [draw.randrange(3) for _ in range(draw.randint(1, 4))]
        rows, stops = [], []
        for label in labels:
            rows += [torch.nn.functional.one_hot(torch.tensor(label), 4).float()] * draw.randint(
                1, 2
            )
            rows.append(torch.tensor([0.0, 0.0, 0.0, 1.0]))  # the end of a segment
            stops.append(len(rows))
        return torch.stack(rows), torch.tensor(labels), torch.tensor(stops)

    for _ in range(150):
        loss = sum(decoder.loss(*sample()) for _ in range(4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    right = 0
    for _ in range(10):
        states, labels, _ = sample()
        right += search(Recorded(decoder.eval(), states), beam=8)[0].labels == tuple(
            labels.tolist()
        )
    assert right >= 9

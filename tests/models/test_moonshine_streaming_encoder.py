"""The incremental encoder: the states of one pass, each once, whatever the blocks are."""

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmdecode.models import moonshine_streaming_encoder as ours
from mmdecode.models.moonshine_streaming_encoder import IncrementalEncoder
from tests.support.parts import fed
from tests.support.tiny_recognizers import moonshine_streaming

PUBLISHED = [[16, 4], [16, 4], [16, 0], [16, 0], [16, 4], [16, 4]]
KINDS = {
    "small": {},
    "published": {"num_hidden_layers": 6, "sliding_windows": PUBLISHED},
    "odd": {"sliding_windows": [[1, 0], [2, 1], [7, 5]]},
    "shared keys and frames of 4 ms": {"num_key_value_heads": 1, "frame_ms": 4.0},
}
LOOK_AHEAD = {"small": 2, "published": 12, "odd": 4}


@pytest.fixture(scope="module")
def encoders():
    return {
        kind: moonshine_streaming(encoder=more)[0].get_encoder() for kind, more in KINDS.items()
    }


def noise(count, seed=0):
    return 0.1 * torch.randn(count, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def one_pass(encoder, samples):
    """States of the samples in whole frames, with a mask."""
    whole = torch.nn.functional.pad(samples, (0, -len(samples) % encoder.embedder.frame_len))[None]
    mask = torch.ones_like(whole, dtype=torch.long)
    return encoder(whole, attention_mask=mask).last_hidden_state[0]


def assert_equal(encoder, samples, sizes, looks=frozenset()):
    final, rest = fed(IncrementalEncoder(encoder), samples, sizes, looks)
    found, expected = torch.cat([*final, rest]), one_pass(encoder, samples)
    assert found.shape == expected.shape
    if len(expected):
        assert (found - expected).abs().max() < 1e-5
    return len(found) - len(rest)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_one_pass_for_any_blocks(kind, encoders):
    finals = []

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(
        count=st.integers(1, 24_000),
        sizes=st.lists(st.integers(0, 4000), max_size=12),
        looks=st.sets(st.integers(0, 12), max_size=4),
    )
    @example(count=24_000, sizes=[1] * 85, looks={3, 85})
    @example(count=24_000, sizes=[], looks=set())
    @example(count=1, sizes=[], looks=set())
    @example(count=21_000, sizes=[20_480, 80], looks={0, 1})  # all that is encoded at once
    def same(count, sizes, looks):
        finals.append(assert_equal(encoders[kind], noise(count, count), sizes, looks))

    same()
    assert max(finals) > 40 and min(finals) == 0


@pytest.mark.parametrize("kind", ["published", "odd"])
def test_a_state_is_final_as_soon_as_its_look_ahead_is_complete(kind, encoders):
    encoder = encoders[kind]
    made, count = IncrementalEncoder(encoder), 0
    assert made.look_ahead == LOOK_AHEAD[kind]
    for frame, samples in enumerate(noise(4800).split(encoder.embedder.frame_len)[:-1]):
        count += len(made.feed(samples))
        complete = frame // 4 + 1  # the first frame makes the first state
        assert count == max(0, complete - made.look_ahead)
        assert len(made.provisional()) == complete - count
    assert count > 2


@pytest.mark.parametrize("kind", ["small", "published"])
def test_what_comes_later_changes_no_final_state(kind, encoders):
    """The first state that a change at a sample can reach is its look-ahead earlier."""
    encoder, ahead = encoders[kind], LOOK_AHEAD[kind]
    samples, later = noise(16_000), []
    for at in (9000, 9600, 9601, 9680):
        other = samples.clone()
        other[at:] = 3 * noise(16_000 - at, 1)
        one, two = one_pass(encoder, samples), one_pass(encoder, other)
        first = int((one != two).any(-1).nonzero()[0])
        later.append(first - (-(-(at // 80) // 4) - ahead))
        final = fed(IncrementalEncoder(encoder), samples[:at], [])[0]
        again = fed(IncrementalEncoder(encoder), other, [at])[0]
        assert torch.equal(torch.cat(final), torch.cat(again[:1]))
    assert min(later) == 0 and max(later) <= 1, "a change may be lost in rounding"


def size_of(value):
    """Elements of all tensors that an object keeps, without the model's weights."""
    if isinstance(value, torch.Tensor):
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), "a view"
        return value.numel()
    if isinstance(value, list):
        return sum(map(size_of, value))
    if isinstance(value, (IncrementalEncoder, ours._Layer, ours.IncrementalConvolution)):
        return sum(map(size_of, vars(value).values()))
    return 0


def counted(encoder):
    """A list that gets the number of states of every pass through the first layer."""
    counts = []
    handle = encoder.layers[0].mlp.register_forward_hook(
        lambda module, given, output: counts.append(output.shape[1])
    )
    return counts, handle


def test_neither_memory_nor_work_grows(encoders):
    encoder = encoders["published"]
    made, sizes, work = IncrementalEncoder(encoder), [], []
    counts, handle = counted(encoder)
    for second in range(20):
        made.feed(noise(16_000, second))
        made.provisional()
        sizes.append(size_of(made))
        work.append(sum(counts))
    handle.remove()
    assert len(set(sizes[1:])) == 1
    width, layers = 24, 6
    assert sizes[-1] < layers * (2 * (15 + 3) + 3) * width + 1000
    steps = {b - a for a, b in itertools.pairwise(work)}
    assert steps == {50 + 3}, "new states, and those that this layer does not finish yet"


def test_a_long_block_is_encoded_in_parts(encoders):
    encoder, widths = encoders["small"], []
    handle = encoder.layers[0].mlp.register_forward_hook(
        lambda module, given, output: widths.append(output.shape[1])
    )
    assert len(IncrementalEncoder(encoder).feed(noise(20 * 16_000))) == 998
    handle.remove()
    assert max(widths) <= ours.FRAMES // 4


def test_half_precision_and_gradients(encoders):
    half = moonshine_streaming()[0].get_encoder().to(torch.bfloat16)
    final, rest = fed(IncrementalEncoder(half), noise(8000), [3000])
    found, expected = torch.cat([*final, rest]), one_pass(half, noise(8000).bfloat16())
    assert found.dtype == torch.bfloat16 and not found.requires_grad
    assert (found - expected).abs().max() < 0.2


# Known mistakes


def _too_early(monkeypatch):
    begin = ours._Layer.__init__

    def init(self, *given):
        begin(self, *given)
        self.ahead = max(self.ahead - 1, 0)

    monkeypatch.setattr(ours._Layer, "__init__", init)


def _off_by_one(monkeypatch):
    """As in the paper: the window includes its right bound."""
    begin = ours._Layer.__init__

    def init(self, layer, window, empty):
        left, right = window
        begin(self, layer, (left, right + 1 if right else 0), empty)

    monkeypatch.setattr(ours._Layer, "__init__", init)


def _short_reach(monkeypatch):
    """Keeps one key too few."""
    begin = ours._Layer.__call__

    def call(self, x, last):
        found = begin(self, x, last)
        if not last and self._first:
            self._keys, self._values = self._keys[:, :, 1:], self._values[:, :, 1:]
            self._first += 1
        return found

    monkeypatch.setattr(ours._Layer, "__call__", call)


def _forgets_samples(monkeypatch):
    feed = IncrementalEncoder.feed

    def forget(self, samples):
        found = feed(self, samples)
        self._tail = self._tail[:0]
        return found

    monkeypatch.setattr(IncrementalEncoder, "feed", forget)


def _padded_blocks(monkeypatch):
    """Each block begins with zeros, as in one pass."""
    call = ours.IncrementalConvolution.__call__

    def padded(self, x, last):
        found = call(self, x, last)
        keep = self._kept if last else torch.zeros_like(self._kept)
        self._kept = keep
        return found

    monkeypatch.setattr(ours.IncrementalConvolution, "__call__", padded)


def _keeps_the_end(monkeypatch):
    """States as if the audio ended are kept, as if it had."""
    monkeypatch.setattr(
        IncrementalEncoder,
        "provisional",
        lambda self: self._encode(
            torch.nn.functional.pad(self._tail, (0, -len(self._tail) % 80)), last=False
        ),
    )


MISTAKES = {
    "final too early": _too_early,
    "off by one": _off_by_one,
    "short reach": _short_reach,
    "forgets samples": _forgets_samples,
    "padded blocks": _padded_blocks,
    "keeps the end": _keeps_the_end,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake, encoders, monkeypatch):
    case = encoders["published"], noise(12_345), [3000, 1111, 2000], {1}
    assert_equal(*case)
    MISTAKES[mistake](monkeypatch)
    with pytest.raises(AssertionError):
        assert_equal(*case)


def test_an_encoder_without_windows_is_noticed(encoders):
    """One pass without a mask is not what is compared with."""
    encoder, samples = encoders["published"], noise(16_000)
    with torch.no_grad():
        unmasked = encoder(samples[None]).last_hidden_state[0]
    assert (unmasked - one_pass(encoder, samples)).abs().max() > 0.1

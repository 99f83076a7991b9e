"""CTC drafts: greedy ids whatever the head finds; a head that knows the text saves its passes."""

import functools
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from mmdecode import registry
from mmdecode.asr import Transcriber
from mmdecode.checkpoints import local_path
from mmdecode.decoder import Decoder
from mmdecode.draft.ctc import CPU_ROWS, CTC
from mmdecode.draft.first_of import FirstOf
from mmdecode.draft.lookup import PromptLookup
from mmdecode.engine.contracts import Requirements
from mmdecode.errors import IncompatibleError, InputError, OptionError
from mmdecode.evaluation.speech.wer import wer
from mmdecode.models.ctc_head import CTCHead
from mmdecode.zoo.speech import speech_test
from mmdecode.zoo.synthesis import SAMPLING_RATE
from tests.support import tiny
from tests.support.seams import edited
from tests.support.tiny import WIDTH
from tests.support.traced import Traced

SUBWORDS = 20
FAMILIES = ("whisper", "moonshine")


def random_head(seed=0, strides=(2, 1), width=WIDTH, feed_forward=0):
    """Weights large enough that frames have many classes."""
    torch.manual_seed(seed)
    sizes = {"source_size": width, "hidden_size": width, "inner_size": 24}
    sizes["feed_forward"] = feed_forward
    head = CTCHead({**sizes, "kernel": 3, "strides": list(strides), "subwords": SUBWORDS})
    for weight in head.parameters():
        nn.init.normal_(weight, std=0.5)
    head.ids.copy_(torch.randperm(60)[:SUBWORDS])
    return head


class Known(CTC):
    """A drafter whose head finds given texts, one per row or one for all, in any model."""

    def __init__(self, known, **options):
        super().__init__(random_head(), **options)
        self.known = known

    def needs(self, adapter):
        return Requirements()

    def texts(self, call):
        return [list(row) for row in self.known] * (call.batch // len(self.known))


class Noting(CTC):
    """A drafter that keeps its texts by the number of rows."""

    def __init__(self, *args):
        super().__init__(*args)
        self.found = {}

    def texts(self, call):
        self.found[call.batch] = super().texts(call)
        return self.found[call.batch]


@functools.cache
def undrafted(family, eos=None, batch=3):
    """Ids, and how many passes they take."""
    decoder = Traced()
    ids = tiny.ours(decoder, family, batch=batch, eos_token_id=eos)
    return ids, tiny.generated(decoder.trace), decoder.stats.passes


def drafted(draft, family, eos=None, batch=3):
    decoder = Decoder(draft)
    return tiny.ours(decoder, family, batch=batch, eos_token_id=eos), decoder.stats


@pytest.mark.parametrize("family", [*FAMILIES, "moonshine_padded"])
def test_ids_are_greedy_whatever_a_random_head_finds(family):
    width = 36 if family == "moonshine_padded" else WIDTH
    ids, stats = drafted(CTC(random_head(width=width)), family)
    assert torch.equal(ids, tiny.plain(family))
    assert stats.drafted > 10 and stats.accepted < stats.drafted


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 4, 16])
def test_a_head_that_knows_the_text_leaves_a_pass_per_chain(family, length):
    expected, rows, before = undrafted(family)
    ids, stats = drafted(Known(rows, length=length), family)
    assert torch.equal(ids, expected)
    longest = max(map(len, rows))
    assert before == longest - 1 and stats.passes == math.ceil((longest - 1) / (length + 1))


def test_a_head_that_finds_nothing_is_like_no_draft():
    expected, rows, before = undrafted("whisper", 59)
    ids, stats = drafted(Known([[], [], []]), "whisper", 59)
    assert torch.equal(ids, expected) and stats.passes == before and not stats.drafted
    ids, stats = drafted(Known([rows[0], [], []]), "whisper", 59)
    assert torch.equal(ids, expected) and stats.passes == before and stats.drafted


def test_in_a_larger_batch_the_head_is_off():
    expected, rows, before = undrafted("whisper")
    ids, stats = drafted(Known(rows, rows=3), "whisper")
    assert torch.equal(ids, expected) and stats.drafted and stats.passes < before
    ids, stats = drafted(Known(rows, rows=2), "whisper")
    assert torch.equal(ids, expected) and not stats.drafted and stats.passes == before
    assert drafted(Known([[1, 2]]), "whisper", batch=CPU_ROWS)[1].drafted
    assert drafted(Known(rows[:1], least=1, rows=1), "whisper", batch=1)[1].drafted


def test_a_head_that_is_off_by_default_says_so_once():
    draft, count = Known([[1, 2]]), CPU_ROWS + 1
    with pytest.warns(UserWarning, match=f"off in calls of more than {CPU_ROWS} .*rows={count}"):
        assert not drafted(draft, "whisper", batch=count)[1].drafted
    assert not drafted(draft, "whisper", batch=count)[1].drafted  # a second warning is an error
    _, rows, _ = undrafted("whisper")
    with pytest.warns(UserWarning, match="off with least, .* rows=1 in its options"):
        assert not drafted(Known(rows[:1], least=1), "whisper", batch=1)[1].drafted


def test_rows_below_zero_are_refused():
    with pytest.raises(OptionError, match="rows=-1; expected rows >= 0"):
        Known([], rows=-1)


def test_in_a_larger_batch_the_second_drafter_proposes_alone():
    expected, rows, _ = undrafted("whisper")
    alone = drafted("recycling", "whisper")[1]
    both = FirstOf(Known(rows, rows=2), "recycling")
    ids, stats = drafted(both, "whisper")
    assert torch.equal(ids, expected)
    assert (stats.passes, stats.drafted) == (alone.passes, alone.drafted)
    assert drafted(FirstOf(Known(rows), "recycling"), "whisper")[1].passes < alone.passes


def test_a_string_puts_a_head_before_another_drafter():
    made = registry.create(
        "draft", "first_of:first=ctc:least=2,second=lookup", model_id="zoo:whisper-synth"
    )
    assert isinstance(made.first, CTC) and made.first.texts_drafter.least == 2
    assert isinstance(made.second, PromptLookup)
    with pytest.raises(OptionError, match=r"with first='ctc:least=2' write .*first=ctc:length=3"):
        registry.create("draft", "first_of:first=ctc:least=2,length=3,second=lookup")
    known = {"model_id": "zoo:whisper-synth", "tokenizer": Pairs()}
    for name in ("adaptive:draft=ctc", "first_of:first=ctc,second=lookup"):
        made = registry.create("draft", name, **known)
        assert isinstance(
            getattr(made, "draft", made).tokenizer if name[0] == "a" else made.first.tokenizer,
            Pairs,
        )


def test_the_end_token_is_drafted():
    _, [row], _ = undrafted("whisper", batch=1)
    end = next(at for at in range(5, len(row)) if row[at] not in row[:at])
    expected, [ended], _ = undrafted("whisper", row[end], batch=1)
    assert ended == row[: end + 1]
    ids, stats = drafted(Known([ended[:-1]], length=end), "whisper", row[end], batch=1)
    assert torch.equal(ids, expected) and stats.passes == 1 and stats.accepted == end


def test_a_wrong_token_costs_one_pass():
    expected, [row], _ = undrafted("whisper", batch=1)
    wrong = [*row[:5], (row[5] + 1) % 60, *row[6:]]
    assert len(set(wrong[:10])) == 10, "nothing else matches"
    ids, stats = drafted(Known([wrong]), "whisper", batch=1)
    assert torch.equal(ids, expected) and stats.passes == 2
    ids, stats = drafted(Known([wrong], least=2, rows=1), "whisper", batch=1)
    assert torch.equal(ids, expected) and stats.passes == 4, "two tokens have to match first"


# The head


def states_of(rows, lengths, width=WIDTH, seed=1):
    states = torch.randn(rows, max(lengths), width, generator=torch.Generator().manual_seed(seed))
    return states, torch.tensor(lengths)


@pytest.mark.parametrize("feed_forward", [0, 40])
@pytest.mark.parametrize("strides", [(1,), (2, 1), (3, 2)])
@torch.no_grad()
def test_padded_rows_have_the_text_that_they_have_alone(strides, feed_forward, monkeypatch):
    head, lengths = random_head(strides=strides, feed_forward=feed_forward), [31, 17, 24, 2]
    states, counts = states_of(4, lengths)
    embeddings = torch.randn(SUBWORDS, WIDTH)
    alone = [
        head.greedy(states[row : row + 1, :size], counts[row : row + 1], embeddings)[0]
        for row, size in enumerate(lengths)
    ]
    assert head.greedy(states, counts, embeddings) == alone
    assert sum(map(len, alone)) >= 10
    for row, size in enumerate(lengths):
        frames = head(states[row : row + 1, :size], counts[row : row + 1], embeddings)
        assert frames.shape[1] == head.lengths(counts)[row]
        padded = head(states, counts, embeddings)[row, : frames.shape[1]]
        torch.testing.assert_close(padded, frames[0], rtol=1e-4, atol=1e-3)
    blind = edited(CTCHead.forward, "hidden * real", "hidden")
    monkeypatch.setattr(CTCHead, "forward", blind)
    assert head.greedy(states, counts, embeddings) != alone, "what is padded would be read"


def test_frames_are_collapsed():
    head = random_head()
    classes = [[1, 1, 0, 1, 2, 2, 3, 0, 0, 3], [0, 5, 5, 5, 0, 5, 4, 4, 7, 7], [0] * 10]
    head.forward = lambda *_: nn.functional.one_hot(torch.tensor(classes), SUBWORDS + 1)
    counts = torch.tensor([20, 14, 20])  # the second row has 7 frames
    real = [classes[0], classes[1][:7], classes[2]]
    expected = [
        [int(head.ids[one - 1]) for one, _ in itertools.groupby(row) if one] for row in real
    ]
    assert head.greedy(torch.zeros(3, 20, WIDTH), counts, None) == expected
    assert [len(row) for row in expected] == [5, 3, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_of_a_batch_is_drafted_for_as_alone(family):
    draft = Noting(random_head())
    found = draft.found
    ids, _ = drafted(draft, family)
    assert torch.equal(ids, tiny.plain(family))
    drafted(draft, family, batch=1)
    assert (
        family == "moonshine" or found[1][0] == found[3][0]
    )  # with padding, Moonshine has other states
    assert all(found[3]) and len({tuple(row) for row in found[3]}) == 3
    if family == "moonshine":
        sizes = [len(row) for row in found[3]]
        assert sizes[0] > max(sizes[1:]), "shorter recordings have fewer frames"


class Pairs:
    """A tokenizer that writes each pair of ids as one id, their sum."""

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        ids = [int(word) for word in text.split()]
        return [sum(ids[at : at + 2]) for at in range(0, len(ids), 2)]


def test_texts_are_written_as_the_decoder_would():
    draft = CTC(random_head(), Pairs())
    assert draft.rewritten([1, 2, 3, 4, 5]) == [3, 7, 5] and draft.rewritten([]) == []
    assert CTC(random_head()).rewritten([1, 2]) == [1, 2]
    raw, written = Noting(random_head()), Noting(random_head(), Pairs())
    for one in (raw, written):
        assert torch.equal(drafted(one, "whisper")[0], tiny.plain("whisper"))
    assert written.found[3] == [draft.rewritten(row) for row in raw.found[3]] != raw.found[3]


# Loading, and what does not fit


@pytest.mark.parametrize("feed_forward", [0, 40])
def test_a_saved_head_finds_the_same(feed_forward, tmp_path):
    head = random_head(feed_forward=feed_forward)
    head.half().float()
    head.save_pretrained(tmp_path / "head")
    draft = registry.create("draft", f"ctc:head={tmp_path / 'head'},length=5")
    states, counts = states_of(2, [20, 11])
    embeddings = torch.randn(SUBWORDS, WIDTH)
    found = draft.head.greedy(states, counts, embeddings)
    assert found == head.greedy(states, counts, embeddings) and all(found)
    assert draft.texts_drafter.length == 5
    assert torch.equal(drafted(draft, "whisper")[0], tiny.plain("whisper"))


def test_the_error_of_a_model_without_a_head_says_how_to_train_one():
    with pytest.raises(OptionError, match=r"mmdecode train ctc --model zoo:llava-scenes .*head="):
        registry.create("draft", "ctc", model_id="zoo:llava-scenes")
    with pytest.raises(OptionError, match="none is shipped for this model"):
        registry.create("draft", "ctc")


@torch.no_grad()
def test_the_shipped_head_is_as_its_card_says():
    """The word errors of its text on the test clips, and of a head whose blocks see one state."""
    ours = Transcriber.from_pretrained("zoo:whisper-synth", device="cpu").recognizer
    head, clips = CTC.from_options(model_id="zoo:whisper-synth").head, speech_test()
    size = round(ours.window_s * SAMPLING_RATE)

    def error_rate():
        texts = []
        for clip in clips:
            wave = clip.samples()
            parts = [wave[at : at + size] for at in range(0, len(wave), size)]
            seconds = [len(part) / SAMPLING_RATE for part in parts]
            states = ours.encode(ours.features(parts), seconds).states
            rows = head.greedy(*head.arguments(states, None, ours.model.get_input_embeddings()))
            texts.append(" ".join(ours.tokenizer.decode(row) for row in rows))
        return wer([clip.text for clip in clips], texts).value

    card = json.loads((Path(local_path("zoo:whisper-synth-ctc")) / "card.json").read_text())
    found = error_rate()
    assert f"WER {100 * found:.1f} %" in card["measured"] and found < 0.2
    for block in head.layers:
        block.conv.weight[..., : block.conv.kernel_size[1] // 2] = 0.0
    assert error_rate() > 0.4


def test_other_checkpoints_and_models_are_refused():
    with pytest.raises(InputError, match="holds no CTC head"):
        CTC.from_pretrained("zoo:whisper-synth-medusa")
    with pytest.raises(IncompatibleError, match=r"width 16, the model has 32"):
        drafted(CTC(random_head(width=16)), "whisper")
    for name, size in (("hidden_size", WIDTH + 8), ("vocab_size", 7)):
        head = random_head()
        head.config[name] = size
        with pytest.raises(IncompatibleError, match=f"expects .* {size}, the model has"):
            drafted(CTC(head), "whisper")
    with pytest.raises(IncompatibleError, match="this model lacks"):
        drafted(CTC(random_head()), "llama")
    with pytest.raises(OptionError, match="length=-1"):
        CTC(random_head(), length=-1)

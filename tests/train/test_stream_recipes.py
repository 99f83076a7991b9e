"""Recipes of models for streams: prefixes with their texts, adapters, heads on silent windows."""

import itertools
import json

import numpy as np
import pytest
import torch

from mmdecode.asr.transcriber import Transcriber
from mmdecode.models.ctc_head import CTCHead
from mmdecode.train.drafters.ctc import CTCOptions
from mmdecode.train.zoo import whisper_synth_ctc, whisper_synth_stream
from mmdecode.train.zoo.whisper_synth_ctc import (
    EARLY_S,
    LATE_S,
    EpochSamples,
    HeadOptions,
    LabelledWindows,
)
from mmdecode.train.zoo.whisper_synth_stream import (
    PrefixStream,
    PrefixWindows,
    Sentence,
    StreamOptions,
)
from mmdecode.zoo.speech import speech_test
from tests.support.causal import BASE, causal_whisper


@pytest.fixture
def work(tmp_path):
    """A corpus of shipped clips with even words; nothing is synthesised or aligned again."""
    clips = speech_test()[:6]
    waves = [(clip.samples() * 32767).astype(np.int16) for clip in clips]
    texts = [clip.text for clip in clips]
    folder = tmp_path / "corpus"
    folder.mkdir()
    ends = np.cumsum([len(wave) for wave in waves])
    np.savez(folder / "0000000.npz", samples=np.concatenate(waves), ends=ends, texts=texts)
    counts = [len(text.split()) for text in texts]
    times = [
        np.linspace(0, len(wave) / 16_000, count + 1)[1:]
        for wave, count in zip(waves, counts, strict=True)
    ]
    np.savez(folder / "0000000.words.npz", times=np.concatenate(times), counts=counts)
    return tmp_path


@pytest.fixture
def given(monkeypatch):
    """The corpus is there already."""
    for recipe in (whisper_synth_ctc, whisper_synth_stream):
        monkeypatch.setattr(recipe, "synthesise_corpus", lambda *given: None)


def test_a_prefix_asks_for_the_words_that_have_ended(work):
    windows = PrefixWindows(work / "corpus", causal_whisper()[1], 0)
    windows.refresh()
    spoken = [
        Sentence(0.5, 1.5, [("One", 1.0), ("two.", 1.5)]),
        Sentence(2.0, 4.0, [("Three", 3.0), ("four.", 4.0)]),
    ]
    for end_s, words in ((0.9, 0), (1.2, 1), (1.5, 2), (3.5, 3), (9.0, 4)):
        for _ in range(8):  # with and without timestamps and an earlier text
            given, asked = windows.target(spoken, end_s)
            assert len(given) == len(asked)
            start = given.index(windows.ids.sot)
            wanted = [token for token in asked if 0 <= token < windows.ids.eot]
            assert (
                windows.tokenizer.decode(wanted).split() == "One two. Three four.".split()[:words]
            )
            assert asked[-1] == windows.ids.eot and set(asked[:start]) <= {-100}
            stamps = [t for t in asked if t >= windows.ids.first_timestamp]
            assert all((t - windows.ids.first_timestamp) * 0.04 <= end_s + 0.03 for t in stamps)
    assert windows.target([], 1.0)[1] == [windows.ids.no_speech]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # of peft
def test_an_adapter_is_trained_resumed_and_loaded_by_its_folder(work, given):
    options = StreamOptions(minutes=0.05, states=400)
    first = whisper_synth_stream.run(options, work, work / "out")
    again = whisper_synth_stream.run(StreamOptions(minutes=0.1, states=400), work, work / "out")
    assert again["step"] >= first["step"] > 0
    adapter = json.loads((work / "out" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == BASE  # no path of this machine
    loaded = Transcriber.from_pretrained(str(work / "out"), device="cpu").recognizer.model
    before, after = (
        m.model.decoder.layers[0].self_attn.q_proj for m in (causal_whisper()[0], loaded)
    )
    assert before.weight.shape == after.weight.shape
    assert not torch.equal(before.weight, after.weight)


def test_batches_are_prefixes_of_one_length(work):
    processor = causal_whisper()[1]
    data = iter(PrefixStream(work / "corpus", processor, StreamOptions(states=400)))
    for _ in range(3):
        batch = next(data)
        rows, _, frames = batch.features.shape
        assert frames % 2 == 1 and rows == max(4, 400 // ((frames - 1) // 2))
        assert batch.ids.shape == batch.targets.shape and len(batch.ids) == rows


@pytest.mark.slow
def test_a_head_learns_without_and_then_with_the_times_of_words(work, given):
    head = CTCOptions(vocabulary=60, strides=(2, 1), feed_forward=32, epochs=2, batch=4)
    options = HeadOptions(windows=24, quiet=0.3, head=head, timed_epochs=1)
    report = whisper_synth_ctc.run(options, work, work / "head")
    made = CTCHead.from_pretrained(work / "head")
    assert len(made.ids) <= 60 and report["folder"] == str(work / "head")
    rounds = json.loads((work / "head" / "report.json").read_text())["rounds"]
    assert [len(one["word_errors_by_epoch"]) for one in rounds] == [2, 1]
    assert {one["subwords"] for one in rounds} == {len(made.ids)}
    assert {one["options"]["feed_forward"] for one in rounds} == {32}
    assert not (work / "ctc").exists()  # the state of a training that ended


@pytest.mark.parametrize("number", [0, 1])
def test_the_windows_of_an_epoch_depend_on_the_seed_and_the_epoch_alone(work, number):
    head = CTCOptions(vocabulary=60, strides=(2, 1), feed_forward=32, epochs=3, batch=4)
    options = HeadOptions(windows=6, head=head, timed_epochs=2)
    running, resumed = (EpochSamples(work / "corpus", options, number) for _ in range(2))
    first, second = running(0), running(1)
    assert len(first) == len(second) == 6
    again = resumed(1)
    assert [(one.ids, one.spans) for one in again] == [(one.ids, one.spans) for one in second]
    assert all(torch.equal(a.states, b.states) for a, b in zip(again, second, strict=True))
    assert not torch.equal(first[0].states, second[0].states)
    for sample in first:
        assert sample.states.shape == (200, 128) and sample.states.dtype == torch.float16
        assert (sample.spans is not None) == bool(number)


class Marked(LabelledWindows):
    """Windows in which the samples of a word have the word's own value."""

    words = ("every", "other", "house", "has", "a", "garden", "and", "some", "red", "doors")

    def sentence(self):
        sizes = [self.rng.randint(2000, 9000) for _ in self.words]
        values = torch.arange(1.0, 11).repeat_interleave(torch.tensor(sizes))
        ends = np.cumsum(sizes) / 16_000
        return values, list(zip(self.words, ends.tolist(), strict=True))

    def pause(self, seconds):
        return torch.zeros(round(seconds * 16_000) + 800)

    def damage(self, wave):
        return wave


def test_every_whole_word_of_a_window_is_labelled_where_it_is_spoken(work):
    windows, cut = Marked(work / "corpus", causal_whisper()[1], 5), 0
    for _ in range(40):
        wave, (text, spans) = windows.timed()
        assert len(wave) == 128_000 and len(text) == len(spans)
        found = windows.tokenizer.decode(text).split()
        edges = [0, *(1 + (wave[1:] != wave[:-1]).nonzero()[:, 0]).tolist(), len(wave)]
        runs = [(begin, end) for begin, end in itertools.pairwise(edges) if wave[begin]]
        whole = [run for run in runs if run[0] > 0 and run[1] < len(wave)]
        cut += len(runs) - len(whole)
        assert found == [windows.words[int(wave[begin]) - 1] for begin, _ in whole]
        of_words = list(dict.fromkeys(spans))
        assert len(of_words) == len(whole)
        for (begin, end), (first, last) in zip(whole, of_words, strict=True):
            assert first == pytest.approx(max(0, begin / 16_000 - EARLY_S) / 0.04, abs=1)
            assert last == pytest.approx((end / 16_000 + LATE_S) / 0.04, abs=1)
    assert cut > 10


def test_silent_windows_are_of_every_kind(work):
    windows = LabelledWindows(work / "corpus", causal_whisper()[1], 0)
    found = [windows.quiet().abs().max().item() for _ in range(40)]
    assert 0.0 in found and max(found) > 0.1 and len(set(found)) > 20

"""Correction after a transcriber: words and who decided them, windows, and the command."""

import dataclasses
import json
import warnings

import numpy as np
import pytest
import soundfile
import torch
import transformers

from mmdecode import registry, weights
from mmdecode.asr import Transcriber
from mmdecode.asr.correction.corrector import Corrector
from mmdecode.asr.correction.fusion import Acoustic
from mmdecode.asr.correction.guard import EditGuard
from mmdecode.asr.correction.n_best_lists import NBestList
from mmdecode.asr.correction.prompts import PromptOptions
from mmdecode.asr.correction.transcripts import (
    FusedCorrection,
    LanguageModelCorrection,
    UADFCorrection,
    temperatures_of,
)
from mmdecode.asr.correction.windows import shared_out
from mmdecode.asr.results import DecidedWord, Segment
from mmdecode.asr.transcriber import load
from mmdecode.errors import IncompatibleError, InputError, OptionError, UnknownNameError
from mmdecode.guide.fusion import Static
from mmdecode.guide.uadf import UADF
from mmdecode.quantization import is_quantized
from mmdecode.zoo.speech import speech_test
from tests.support.commands import invoke
from tests.support.correctors import Marked, given_of
from tests.support.moonshine import NAME as MOONSHINE
from tests.support.moonshine import needs_wheel
from tests.support.tiny_recognizers import speech_to_text

LM = "zoo:lm-synth"


@pytest.fixture(scope="module")
def zoo():
    return load("zoo:whisper-synth", "cpu", None)


@pytest.fixture(scope="module")
def recogniser(zoo):
    return Acoustic(model=zoo[0], tokenizer=zoo[1].tokenizer)


@pytest.fixture(scope="module")
def clips():
    return [clip for clip in speech_test() if clip.duration_s < 8][:4]


@pytest.fixture(scope="module")
def encoded_lists(zoo, clips):
    """Lists of two wrong hypotheses each, and what the recogniser is given."""
    audio = given_of(zoo[1], clips)
    lists = [NBestList(clip.name, (clip.text, clip.text.replace("the", "a"))) for clip in clips]
    return lists, audio


def corrector(**options):
    return Corrector.from_pretrained(LM, "cpu", max_new_tokens=60, **options)


def fused(recogniser, join=UADF, **options):
    return FusedCorrection(corrector(**options), recogniser, join)


def test_words_are_those_of_the_text_and_each_has_one_who_decided(recogniser, encoded_lists):
    lists, audio = encoded_lists
    found = fused(recogniser, batch_size=3)(lists, audio)
    assert [one.correction.id for one in found] == [one.id for one in lists]
    for one in found:
        assert " ".join(word.text for word in one.words) == one.correction.text
    by = [word.by for one in found for word in one.words]
    assert set(by) <= {"both", "audio", "language model"} and by.count("both") > len(by) / 2


def test_the_audio_decides_where_it_has_all_the_weight_and_never_where_it_has_none(
    recogniser, encoded_lists
):
    lists, audio = encoded_lists
    every = lambda spec: Static(spec, weight=1e6)  # noqa: E731
    loud = fused(recogniser, every, guard=None, draft=None)(lists[:2], audio[:2])
    by = {word.by for one in loud for word in one.words}
    assert "language model" not in by and "audio" in by
    silent = fused(recogniser, lambda spec: UADF(spec, beta=1.0))(lists, audio)
    alone = LanguageModelCorrection(corrector())(lists)
    assert silent == alone
    answers = [one for one in alone if one.correction.refused is None]
    assert answers and "audio" not in {word.by for one in answers for word in one.words}


def test_what_is_refused_is_the_audio_s(recogniser, encoded_lists):
    lists, audio = encoded_lists
    wrong = [dataclasses.replace(one, hypotheses=("zebra zebra zebra zebra",)) for one in lists[:2]]
    found = fused(recogniser, guard=EditGuard(distance=0.0), draft=None)(wrong, audio[:2])
    assert all(one.correction.refused for one in found)
    assert {word.by for one in found for word in one.words} == {"audio"}
    alone = LanguageModelCorrection(corrector(guard=EditGuard(distance=0.0)))(wrong)
    assert {word.by for one in alone for word in one.words} == {"audio"}


def test_a_fusion_without_audio_is_refused(recogniser, encoded_lists):
    with pytest.raises(OptionError, match="needs the audio"):
        fused(recogniser)(encoded_lists[0])


def test_drafts_change_no_word(recogniser, encoded_lists):
    lists, audio = encoded_lists
    drafted, plain = fused(recogniser), fused(recogniser, draft=None)
    assert drafted(lists[:2], audio[:2]) == plain(lists[:2], audio[:2])
    assert drafted.corrector.stats.acceptance_length > 1.5
    assert plain.corrector.stats.acceptance_length == 1


def test_methods_are_built_from_strings(recogniser):
    way = registry.create("correct", f"uadf:model={LM},scale=4,beta=0.4", recogniser=recogniser)
    assert isinstance(way, UADFCorrection)
    guide = way.corrector.decoder.guide
    assert (guide.scale, guide.beta) == (4.0, 0.4)
    assert (guide.main_temperature, guide.acoustic_temperature) == (1.305, 1.841)
    given = f"shallow:model={LM},weight=0.3,acoustic_temperature=2,count=2"
    way = registry.create("correct", given, recogniser=recogniser)
    assert way.count == 2 and way.corrector.decoder.guide.acoustic_temperature == 2
    assert way.corrector.guard is not None
    alone = registry.create("correct", f"llm:model={LM},guard=false,dtype=bf16")
    assert alone.corrector.decoder.guide is None and alone.corrector.guard is None
    assert alone.corrector.model.dtype == torch.bfloat16
    for name in ("uadf", "static", "shallow"):
        given = f"{name}:model={LM},guard=false,quantize=int8"
        free = registry.create("correct", given, recogniser=recogniser)
        assert free.corrector.guard is None and is_quantized(free.corrector.model)
    with pytest.raises(OptionError, match="needs model"):
        registry.create("correct", "static", recogniser=recogniser)
    with pytest.raises(UnknownNameError, match="uadf"):
        registry.create("correct", "uadv:model=x", recogniser=recogniser)


def test_temperatures_of_the_card_are_taken_unless_others_are_given(tmp_path, recogniser):
    assert temperatures_of(str(tmp_path), None, None, recogniser) == (1.0, 1.0)
    fitted = {"main": 1.5, "acoustic": 2.5}

    def write(**more):
        (tmp_path / "card.json").write_text(json.dumps({"temperatures": fitted | more}))

    write()
    assert temperatures_of(str(tmp_path), None, 3.0, recogniser) == (1.5, 3.0)
    write(recogniser="zoo:whisper-synth")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert temperatures_of(str(tmp_path), None, None, recogniser) == (1.5, 2.5)
    write(recogniser="zoo:lm-synth")  # another model
    with pytest.warns(UserWarning, match="not for the recogniser at hand"):
        assert temperatures_of(str(tmp_path), None, None, recogniser) == (1.5, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert temperatures_of(str(tmp_path), None, 2.0, recogniser) == (1.5, 2.0)


def test_settings_of_a_corrector_on_the_hub_are_found(tmp_path, monkeypatch):
    (tmp_path / "card.json").write_text(json.dumps({"temperatures": {"main": 1.5}}))
    (tmp_path / "corrector.json").write_text(json.dumps({"template": "1_best"}))
    cached = []

    def cached_file(name, file, **options):
        cached.append(name)
        return str(tmp_path / file) if (tmp_path / file).exists() else None

    monkeypatch.setattr(transformers.utils, "cached_file", cached_file)
    monkeypatch.setattr(weights, "local_path", lambda name: name)  # as where the Hub is reachable
    assert weights.read_json("me/corrector", "card.json") == {"temperatures": {"main": 1.5}}
    assert PromptOptions.kept("me/corrector") == {"template": "1_best"}
    assert weights.read_json("me/corrector", "no.json") == {}
    assert {*cached} == {"me/corrector"}


# After a transcriber


def test_a_recogniser_is_no_corrector():
    with pytest.raises(InputError, match=r"is a speech recogniser \(a whisper model\).*corrector"):
        registry.create("correct", "llm:model=zoo:whisper-synth")


def test_a_recogniser_without_adapter_cannot_be_fused_and_the_error_names_what_works():
    model, processor = speech_to_text()
    with pytest.raises(IncompatibleError, match=r"needs an adapter.*llm:model="):
        Transcriber(model, processor, correct=f"uadf:model={LM},acoustic_temperature=1")
    assert Transcriber(model, processor, correct=f"llm:model={LM}")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", ["sequential", "chunked"])
def test_each_window_of_the_first_transcription_is_corrected_once(zoo, mode):
    wave = np.concatenate([clip.samples() for clip in speech_test()[:4]])
    plain = Transcriber(*zoo, options=_options(mode))(wave)
    method = Marked(batch_size=2)
    found = Transcriber(*zoo, options=_options(mode), correct=method)(wave)
    assert found.uncorrected == plain.text and plain.uncorrected is None
    assert [(s.start_s, s.end_s) for s in found.segments] == [
        (s.start_s, s.end_s) for s in plain.segments
    ]
    texts = [one.hypotheses[0] for one, _ in method.asked]
    assert 1 < len(texts) <= plain.stats["windows"]
    assert {len(batch) for batch in method.batches[:-1]} <= {2}
    # window by window, in order, what was said and nothing twice
    assert " ".join(texts) == plain.text
    assert all(len(one.hypotheses) > 1 for one, _ in method.asked)
    assert found.text.count("indeed") == len(texts) == found.stats["edited"]
    words = [word.text for s in found.segments for word in s.decided]
    assert " ".join(words) == found.text
    shape = method.asked[0][1].features.shape
    assert shape == (80, zoo[1].feature_extractor.nb_max_frames)


def _options(mode):
    from mmdecode.asr import TranscribeOptions

    return TranscribeOptions(mode=mode)


def test_silence_and_timed_words_are_left_alone(zoo):
    method = Marked()
    found = Transcriber(*zoo, correct=method)(np.zeros(8000, np.float32))
    assert found.text == "" and not method.asked
    with pytest.raises(OptionError, match="word_timestamps"):
        Transcriber.from_pretrained(
            "zoo:whisper-synth", correct="llm:model=x", word_timestamps=True
        )


def test_a_recording_in_company_is_corrected_as_it_is_alone(zoo, clips):
    waves = [clip.samples("noisy")[:32_000] for clip in clips[:2]]
    spec = f"uadf:model={LM}"
    both = Transcriber(*zoo, correct=spec)(waves, on_error="raise")
    for wave, together in zip(waves, both, strict=True):
        alone = Transcriber(*zoo, correct=spec)(wave)
        assert alone.text == together.text
        assert [s.decided for s in alone.segments] == [s.decided for s in together.segments]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["uadf", "llm"])
@pytest.mark.parametrize("name", ["zoo:whisper-synth", pytest.param(MOONSHINE, marks=needs_wheel)])
def test_batches_change_no_word_of_a_correction(name, method):
    clips = sorted(speech_test(), key=lambda clip: clip.duration_s)[:6]
    waves = [(clip.samples(), 16_000) for clip in clips]
    found = []
    for size in (1, 4):
        spec = f"{method}:model={LM},batch_size={size}"
        if method == "uadf":
            spec += ",acoustic_temperature=1.841"
        found.append(Transcriber.from_pretrained(name, device="cpu", correct=spec)(waves))
    assert found[0] == found[1]
    assert all(one.uncorrected for one in found[0]) and any(o.stats["edited"] for o in found[0])
    by = {word.by for one in found[0] for s in one.segments for word in s.decided}
    assert "both" in by and ("language model" in by or "audio" in by)


def segments(*texts):
    return [
        Segment(start_s=float(i), end_s=i + 1.0, text=text, tokens=[])
        for i, text in enumerate(texts)
    ]


@pytest.mark.parametrize(
    ("before", "after", "shares"),
    [
        (("a b", "c d"), "a b c d", ["a b", "c d"]),
        (("a b", "c d"), "a x c d e", ["a x", "c d e"]),
        (("a b", "c d"), "z a b y c d", ["z a b y", "c d"]),
        (("a b", "c d"), "q r s t", ["q r", "s t"]),
        (("a b", "c d"), "", ["", ""]),
        (("a b", "c"), "c", ["", "c"]),
    ],
)
def test_corrected_words_stay_in_their_segments(before, after, shares):
    words = [DecidedWord(text=word, by="both") for word in after.split()]
    found = shared_out(segments(*before), words)
    assert [one.text for one in found] == shares
    assert [len(one.decided) for one in found] == [len(share.split()) for share in shares]


def test_the_command_corrects_and_its_json_says_who_decided(tmp_path, clips):
    soundfile.write(tmp_path / "a.wav", clips[0].samples(), 16_000)
    words = ["transcribe", str(tmp_path / "a.wav"), "--out", str(tmp_path / "out")]
    words += ["--model", "zoo:whisper-synth", "--format", "json", "--device", "cpu"]
    words += ["--correct", f"uadf:model={LM}"]
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "out" / "a.json").read_text())
    decided = [word for segment in made["segments"] for word in segment["decided"]]
    assert " ".join(word["text"] for word in decided) == made["text"]
    assert {word["by"] for word in decided} <= {"audio", "language model", "both"}
    assert made["uncorrected"]
    again = invoke(*words[:-2], "--resume")
    assert again.exit_code != 0  # other settings


def test_plain_transcripts_do_not_change(zoo, clips):
    torch.manual_seed(0)
    plain = Transcriber(*zoo)(clips[0].samples())
    assert plain.uncorrected is None and all(s.decided is None for s in plain.segments)
    assert "edited" not in plain.stats

"""Fusion of a recogniser with an encoder-decoder language model, whose answer has a start token."""

import pytest
import torch

from mmdecode.asr import Transcriber
from mmdecode.asr.correction import calibration
from mmdecode.asr.correction.corrector import Corrector
from mmdecode.asr.correction.fusion import Acoustic
from mmdecode.asr.correction.n_best_lists import NBestList
from mmdecode.asr.correction.transcripts import FusedCorrection, LanguageModelCorrection
from mmdecode.asr.transcriber import load
from mmdecode.draft.source import Source
from mmdecode.guide.fusion import Shallow, Static
from mmdecode.guide.uadf import UADF
from mmdecode.zoo.speech import speech_test
from tests.support.correctors import TEMPLATE, given_of, model, tokenizer

families = pytest.mark.parametrize("family", ["t5", pytest.param("bart", marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def zoo():
    return load("zoo:whisper-synth", "cpu", None)


@pytest.fixture(scope="module")
def recogniser(zoo):
    return Acoustic(model=zoo[0], tokenizer=zoo[1].tokenizer)


@pytest.fixture(scope="module")
def clips():
    return sorted(speech_test(), key=lambda clip: clip.duration_s)[:3]


@pytest.fixture(scope="module")
def given(zoo, clips):
    """Lists with references, and the audio."""
    audio = given_of(zoo[1], clips)
    lists = [
        NBestList(clip.name, (clip.text.lower(), clip.text[:-4]), reference=clip.text)
        for clip in clips
    ]
    return lists, audio


def corrector(family="t5", **options):
    given = {"template": TEMPLATE, "max_new_tokens": 8, "guard": None, "draft": None}
    return Corrector(model(family), tokenizer(ends=True), **given | options)


def fused(recogniser, join, family="t5", candidates=8, **options):
    return FusedCorrection(corrector(family, **options), recogniser, join, candidates)


def answered(method, *given):
    """Ids of the answers, in the order of the rows."""
    prompts = method.corrector.prompts
    own, found = prompts.text, []
    prompts.text = lambda ids: found.append(list(ids)) or own(ids)
    method(*given)
    return found


@families
def test_without_weight_the_ids_are_the_language_models(recogniser, given, family):
    own = corrector(family)
    expected = answered(LanguageModelCorrection(own), given[0])
    for join in (lambda spec: Static(spec, 1e-9), lambda spec: UADF(spec, beta=1.0)):
        assert answered(fused(recogniser, join, family), *given) == expected
    rows = sorted((own.prompts.prompt(one.hypotheses) for one in given[0]), key=len)
    for row, ids in zip(rows, expected, strict=True):
        start, inputs = own.decoder_inputs(row)
        plain = own.model.generate(
            decoder_input_ids=start, max_new_tokens=8, num_beams=1, do_sample=False, **inputs
        )
        assert plain[0, 1:].tolist() == ids


@families
def test_with_all_the_weight_the_text_is_the_recognisers(recogniser, given, clips, family):
    """Every character is a candidate but white space: a text of nothing else is certain, too."""
    vocab = len(tokenizer())
    blank = torch.tensor([tokenizer().decode([token]).isspace() for token in range(vocab)])
    head = model(family).get_output_embeddings()
    hook = head.register_forward_hook(lambda _, __, out: out.masked_fill(blank, -torch.inf))
    try:
        join = lambda spec: Shallow(spec, 1e6)  # noqa: E731
        found = fused(recogniser, join, family, vocab, max_new_tokens=4)(*given)
    finally:
        hook.remove()
    for one, clip in zip(found, clips, strict=True):
        assert one.correction.raw.lower() == clip.text[:4].lower()
        assert {word.by for word in one.words} == {"audio"}
        assert " ".join(word.text for word in one.words) == one.correction.text


@families
def test_batches_and_drafts_change_no_token(recogniser, given, family):
    join = lambda spec: Static(spec, 4.0)  # noqa: E731
    whole = answered(fused(recogniser, join, family), *given)
    assert answered(fused(recogniser, join, family, batch_size=1), *given) == whole
    draft = Source(ids=[[*ids[:3], 9, *ids[3:]] for ids in whole], length=4)
    drafted = fused(recogniser, join, family, draft=draft)
    assert answered(drafted, *given) == whole
    assert drafted.corrector.stats.accepted > 3
    assert answered(LanguageModelCorrection(corrector(family)), given[0]) != whole


@families
def test_both_models_are_calibrated(recogniser, given, family, monkeypatch):
    lists, audio = given
    method = fused(recogniser, UADF, family)
    fitted = []
    monkeypatch.setattr(calibration, "fit_temperature", lambda *of: fitted.append(of) or 2.0)
    own = method.corrector
    plain = own.prompts.answer
    # a first token without text, such as BART's, says nothing about the recogniser
    monkeypatch.setattr(own.prompts, "answer", lambda text: [own.prompts.pad, *plain(text)])
    found = calibration.calibrate(own, lists[:2], audio[:2])
    answers = [own.prompts.answer(one.reference) for one in lists[:2]]
    (scores, right), (acoustic, likely) = fitted
    assert right.tolist() == [token for answer in answers for token in answer]
    assert found.tokens == len(right)
    assert len(acoustic) == len(likely) == len(right) - 2 and found.acoustic == 2.0
    logits = []
    with torch.no_grad():
        for one, answer in zip(lists, answers, strict=False):
            prompt = torch.tensor([own.prompts.prompt(one.hypotheses)])
            read = torch.tensor([[own.model.config.decoder_start_token_id, *answer[:-1]]])
            logits.append(own.model(input_ids=prompt, decoder_input_ids=read).logits[0])
    torch.testing.assert_close(scores, torch.cat(logits), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_transcriber_corrects_with_it(zoo, clips, tmp_path):
    folder = str(tmp_path / "t5")
    model("t5").save_pretrained(folder)
    tokenizer(ends=True).save_pretrained(folder)
    spec = f"static:model={folder},weight=50,max_new_tokens=9"
    waves = [clip.samples()[:24_000] for clip in clips]
    found = [Transcriber(*zoo, correct=f"{spec},batch_size={size}")(waves) for size in (1, 2)]
    assert found[0] == found[1]
    assert all(one.uncorrected for one in found[0])

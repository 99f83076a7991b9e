"""Beam search over windows against transformers' own long form, recording by recording."""

import logging

import pytest

from mmdecode import Decoder
from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.draft.lookup import PromptLookup
from mmdecode.errors import OptionError


def recordings(kit):
    return [kit.noise(2.5, seed=0), kit.noise(7.32, seed=1)]


def transcripts(model, processor, kit, **options):
    options = TranscribeOptions(beams=3, batch_size=2, loop_guard="report", **options)
    return Transcriber(model, processor, options=options)(recordings(kit))


@pytest.mark.slow
def test_beams_equal_transformers_long_form(processor, kit):
    model = kit.build_model(processor, seed=3)
    for samples, found in zip(recordings(kit), transcripts(model, processor, kit), strict=True):
        expected = kit.stock(model, processor, samples, num_beams=3)
        assert (found.tokens, kit.times(found)) == expected
        assert expected != kit.stock(model, processor, samples, num_beams=1)


def test_the_score_of_the_best_beam_decides_whether_a_window_is_redone(processor, kit):
    # transformers averages over rows of its scores that are not those of the best beam
    model, samples = kit.build_model(processor, seed=3), kit.noise(1.9, seed=0)

    def found(threshold):
        gates = {"temperatures": (0.0, 0.7), "logprob_threshold": threshold}
        options = TranscribeOptions(beams=3, max_new_tokens=9, n_best=3, **gates)
        return Transcriber(model, processor, options=options)(samples)

    score = found(-9.0).n_best[0][0].score
    kept, redone = (found(score + shift).segments[0] for shift in (-1e-3, 1e-3))
    assert (kept.temperature, redone.temperature) == (0.0, 0.7)
    assert kept.avg_logprob == pytest.approx(score)


def test_the_n_best_list_is_that_of_as_many_beams(model, processor, kit):
    def found(**options):
        options = TranscribeOptions(max_new_tokens=12, **options)
        return Transcriber(model, processor, options=options)(kit.noise(1.9, seed=4))

    both = found(beams=5, n_best=2)
    assert both.n_best[0] == found(n_best=5).n_best[0][: len(both.n_best[0])]
    first = both.segments[0].tokens
    assert both.n_best[0][0].tokens[: len(first)] == first


def test_nothing_is_warned_of(processor, kit, caplog):
    model = kit.build_model(processor, seed=3)
    for name in ("transformers", "transformers.generation.utils"):
        monitored = logging.getLogger(name)
        monitored.addHandler(caplog.handler)
    transcripts(model, processor, kit, n_best=3)
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "draft"),
    [({"beams": 0}, None), ({"temperatures": (0.5,)}, None), ({}, PromptLookup())],
)
def test_what_does_not_go_with_beams_is_refused(model, processor, options, draft):
    with pytest.raises(OptionError, match="beams="):
        settings = TranscribeOptions(**{"beams": 3} | options)
        Transcriber(model, processor, Decoder(draft), settings)

"""N-best lists: transformers' beams window by window, samples of the model, scores."""

import pytest
import torch
from transformers import GenerationMixin, LogitsProcessorList
from transformers.generation import utils
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from mmdecode import Decoder
from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.asr.decoding.n_best import hypotheses
from mmdecode.errors import OptionError
from mmdecode.zoo.speech import speech_test


def features_of(processor, kit, samples):
    return processor.feature_extractor(
        samples, sampling_rate=kit.rate, return_tensors="pt"
    ).input_features


def until_end(rows, end):
    return [row[: row.index(end)] if end in row else row for row in rows.tolist()]


RULES = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("timestamps", [True, False])
@pytest.mark.parametrize(("prompt", "rules"), [(None, {}), ("abc", {}), (None, RULES)], ids=str)
def test_beams_are_those_of_transformers(processor, kit, timestamps, prompt, rules):
    model = kit.build_model(processor, positions=60, **rules)
    samples = kit.noise(1.9, seed=4)
    options = TranscribeOptions(n_best=4, timestamps=timestamps, prompt=prompt)
    best = Transcriber(model, processor, options=options)(samples).n_best[0]
    config, features = model.generation_config, features_of(processor, kit, samples)
    names = ["<|en|>", "<|transcribe|>", *([] if timestamps else ["<|notimestamps|>"])]
    start = [config.decoder_start_token_id, *processor.tokenizer.convert_tokens_to_ids(names)]
    ids = None
    if prompt is not None:
        ids = processor.get_prompt_ids(prompt, return_tensors="pt")
        start = [*ids.tolist(), *start]
    # Whisper's own generate returns its best beam, as often as sequences are asked for
    [first] = model.generate(
        features,
        num_beams=4,
        return_timestamps=timestamps,
        prompt_ids=ids,
        force_unique_generate_call=True,
    )
    [first] = until_end(first[None, len(start) :], config.eos_token_id)
    assert best[0].tokens == first
    # that of all other models returns all beams; the rules for times are Whisper's to add
    times = [WhisperTimeStampLogitsProcessor(config, len(start))] if timestamps else []
    output = GenerationMixin.generate(
        model,
        features,
        decoder_input_ids=torch.tensor([start]),
        num_beams=4,
        num_return_sequences=4,
        logits_processor=LogitsProcessorList(times),
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = until_end(output.sequences[:, len(start) :], config.eos_token_id)
    scores = output.sequences_scores.tolist()
    texts = [processor.tokenizer.decode(row, skip_special_tokens=True).strip() for row in rows]
    first = [texts.index(text) for text in dict.fromkeys(texts)]
    assert [h.text for h in best] == [texts[number] for number in first]
    assert [h.tokens for h in best] == [rows[number] for number in first]
    assert [h.score for h in best] == pytest.approx([scores[p] for p in first], abs=1e-5)
    assert 2 <= len(best) <= 4
    assert [h.score for h in best] == sorted((h.score for h in best), reverse=True)


def test_a_text_is_listed_once_with_its_best_score():
    tried = [([900, 1, 2], -0.3), ([5], -0.4), ([901, 1, 2, 950], -0.2), ([1, 2], -0.9)]
    found = hypotheses(tried, lambda tokens: str([token for token in tokens if token < 900]))
    assert [(h.text, h.score, h.tokens) for h in found] == [
        ("[1, 2]", -0.2, [901, 1, 2, 950]),
        ("[5]", -0.4, [5]),
    ]


@pytest.mark.parametrize("method", ["beam", "sample"])
def test_no_text_is_listed_twice(trained, method):
    options = {"n_best": 6, "n_best_method": method}
    ours = Transcriber.from_pretrained(trained, device="cpu", **options)
    [window, *_] = ours(str(speech_test()[0].path)).n_best
    words = [tuple(t for t in h.tokens if t < stamps(ours.model)) for h in window]
    assert len(words) > 1
    assert len({h.text for h in window}) == len(set(words)) == len(words)


def stamps(model):
    return model.generation_config.no_timestamps_token_id + 1


@pytest.mark.parametrize("method", ["beam", "sample"])
def test_alternatives_are_no_work_of_the_decoder(model, processor, kit, method):
    samples, stats = kit.noise(5.0, seed=2), []
    for count in (0, 3):
        decoder = Decoder("recycling:keep=true", seed=0)
        options = TranscribeOptions(n_best=count, n_best_method=method)
        Transcriber(model, processor, decoder, options)(samples)
        stats.append(decoder.stats.as_dict())
    assert stats[0] == stats[1]


def test_beams_are_searched_without_a_warning(model, processor, kit, monkeypatch):
    warnings = []
    for name in ("warning", "warning_once"):
        monkeypatch.setattr(utils.logger, name, lambda *words: warnings.append(words))
    Transcriber(model, processor, options=TranscribeOptions(n_best=2))(kit.noise(1.0))
    assert not warnings


def test_the_transcript_does_not_depend_on_its_alternatives(model, processor, kit):
    samples = kit.noise(5.0, seed=2)
    plain = Transcriber(model, processor)(samples)
    assert plain.n_best is None
    for method in ("beam", "sample"):
        options = TranscribeOptions(n_best=3, n_best_method=method)
        found = Transcriber(model, processor, Decoder("lookup", seed=0), options)(samples)
        assert found.tokens == plain.tokens
        assert len(found.n_best) == found.stats["windows"] > 1


def test_samples_are_scored_by_the_model_and_ranked(model, processor, kit):
    samples = kit.noise(1.9, seed=4)
    options = TranscribeOptions(n_best=5, n_best_method="sample", timestamps=False)
    [best] = Transcriber(model, processor, Decoder(seed=3), options)(samples).n_best
    assert 2 <= len(best) <= 5
    assert len({tuple(h.tokens) for h in best}) == len(best)
    assert [h.score for h in best] == sorted((h.score for h in best), reverse=True)
    features = features_of(processor, kit, samples)
    config, end = model.generation_config, model.config.eos_token_id
    start = [config.decoder_start_token_id, config.lang_to_id["<|en|>"]]
    start += [config.task_to_id["transcribe"], config.no_timestamps_token_id]
    for hypothesis in best:
        ended = len(hypothesis.tokens) + len(start) < model.config.max_target_positions
        tokens = [*hypothesis.tokens, *([end] if ended else [])]
        with torch.no_grad():
            ids = torch.tensor([[*start, *tokens]])
            logits = model(features, decoder_input_ids=ids).logits[0, len(start) - 1 : -1]
        logits[:, config.suppress_tokens] = -torch.inf
        logits[0, config.begin_suppress_tokens] = -torch.inf
        distribution = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])
        assert hypothesis.score == pytest.approx(float(distribution.mean()), abs=1e-4)


def test_the_trained_model_lists_near_misses(trained):
    clip = speech_test()[0]
    ours = Transcriber.from_pretrained(trained, device="cpu", n_best=3, timestamps=False)
    found = ours(str(clip.path))
    texts = [h.text for h in found.n_best[0]]
    assert texts[0] == found.text
    assert len(set(texts)) == 3
    # near misses: most words are those of the best
    words = [set(text.split()) for text in texts]
    assert all(len(words[0] & other) > len(words[0]) / 2 for other in words[1:])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_best": 1}, "2 or more"),
        ({"n_best": -2}, "2 or more"),
        ({"n_best": 2, "n_best_method": "beams"}, "did you mean 'beam'"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        TranscribeOptions(**options)


def test_beams_know_no_guide(processor, kit):
    decoder = Decoder(guide="contrast:prompt=last_token")
    with pytest.raises(OptionError, match="supports no guide"):
        Transcriber(kit.build_model(processor), processor, decoder, TranscribeOptions(n_best=2))

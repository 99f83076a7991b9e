"""Medusa heads for a recogniser that reads recordings of unequal length: a tiny Moonshine."""

from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.draft.medusa import Medusa
from mmdecode.draft.medusa_heads import MedusaHeads
from mmdecode.errors import IncompatibleError, OptionError, UnsupportedModelError
from mmdecode.train.drafters import medusa
from mmdecode.train.drafters.medusa import (
    MedusaOptions,
    most_frequent,
    ranks,
    recognizers_of,
    target_config,
    train_heads,
)
from mmdecode.train.drafters.transcripts import open_past, transcribed, windows_of
from tests.support import tiny_recognizers
from tests.support.sessions import noting

KINDS = pytest.mark.parametrize("kind", ["linear", "block"])


@pytest.fixture(scope="module")
def recognizer():
    """Writes 25 different tokens; ten of its transcripts end before the limit."""
    [found] = recognizers_of(*tiny_recognizers.moonshine(seed=34))
    return found


@pytest.fixture(scope="module")
def waves():
    dice = torch.Generator().manual_seed(0)
    lengths = torch.randint(9_000, 30_000, (24,), generator=dice).tolist()
    return [0.3 * torch.randn(length, generator=dice).numpy() for length in lengths]


@pytest.fixture(scope="module")
def samples(recognizer, waves):
    return list(transcribed([recognizer], waves, Decoder()))


@pytest.fixture(scope="module")
def trained(recognizer, samples):
    """Drafters and reports by kind, of few steps, with half of the tokens that occur."""
    options = {"num_heads": 2, "epochs": 3, "nodes": 4, "batch": 8, "top": 2, "vocabulary": 8}
    return {
        kind: train_heads(recognizer.model, samples, MedusaOptions(kind=kind, **options))
        for kind in ("linear", "block")
    }


def generated(recognizer, waves, draft=None):
    """Ids of recordings at once, without padding, and the decoder."""
    decoder = Decoder(draft)
    seconds = [len(wave) / recognizer.rate for wave in waves]
    encoded = recognizer.encode(recognizer.features(waves), seconds)
    prompt = torch.tensor([recognizer.prompt(None, [])] * len(waves))
    config = recognizer.generation(1, 16)
    names, sources = [str(at) for at in range(len(waves))], [[] for _ in waves]
    ids = recognizer.generate(decoder, prompt, encoded, config, 0.0, names, sources)
    rows = [[token for token in row if token != recognizer.pad] for row in ids.tolist()]
    return rows, decoder


def test_samples_of_a_batch_are_those_of_each_recording_alone(recognizer, waves, samples):
    ordered = sorted(waves, key=len)
    assert len({len(one.audio) for one in samples}) > 10
    assert len({len(one.ids) for one in samples}) > 3
    for wave, sample in list(zip(ordered, samples, strict=True))[::4]:
        [alone] = transcribed([recognizer], [wave], Decoder())
        assert sample.ids.tolist() == alone.ids.tolist()
        assert sample.prompt == 1
        for found, expected in ((sample.hidden, alone.hidden), (sample.audio, alone.audio)):
            torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


def test_windows_are_as_long_as_the_model_takes_and_rests_are_kept(recognizer):
    size = round(recognizer.window_s * recognizer.rate)
    wave = torch.zeros(2 * size + 5000)
    assert [len(one) for one in windows_of(recognizer, [wave])] == [size, size, 5000]
    assert [len(one) for one in windows_of(recognizer, [wave[: size + 100]])] == [size]


def test_heads_without_a_block_need_no_audio(recognizer, waves):
    [sample] = transcribed([recognizer], waves[:1], Decoder(), audio=False)
    assert sample.audio is None
    batch = medusa._pad([sample], torch.device("cpu"))
    assert batch.audio is None and batch.audio_mask is None


def test_a_block_reads_no_padding(recognizer, samples):
    """Logits of a padded batch are those of each sample alone."""
    adapter = registry.adapter_for(recognizer.model)
    block = adapter.extra_layer(recognizer.model.config)
    block.load_state_dict(adapter.layers()[-1].state_dict())
    heads, chosen = MedusaHeads(2, 1, 32), samples[::5]
    with torch.no_grad():
        whole, wanted = medusa._forward(
            adapter, heads, block, medusa._pad(chosen, torch.device("cpu"))
        )
        alone = [
            medusa._forward(adapter, heads, block, medusa._pad([one], torch.device("cpu")))
            for one in chosen
        ]
    expected = torch.cat([one for one, _ in alone], 1)
    torch.testing.assert_close(whole, expected, atol=1e-3, rtol=1e-3)
    assert wanted.tolist() == torch.cat([labels for _, labels in alone], 1).tolist()


def block_states(recognizer, block, sample):
    """States of a sample's tokens after a block, which reads all of them at once."""
    adapter, source = registry.adapter_for(recognizer.model), sample.audio[None].float()
    past, mask = open_past(adapter, 1, sample.ids[None], source, None)
    with torch.no_grad():
        return adapter.run_extra_layer(block, sample.hidden[None].float(), mask, past)[0]


def test_a_block_has_the_states_of_training_in_decoding(recognizer, waves, samples, trained):
    """In a batch of recordings of unequal length, whatever was accepted."""
    draft, seen = Medusa(trained["block"][0].heads, trained["block"][0].block), []
    noting(
        draft,
        proposed=lambda session, _: seen.append((session.call.rows.length.tolist(), session.state)),
    )
    generated(recognizer, sorted(waves, key=len)[::8], draft)
    compared = 0
    for row, sample in enumerate(samples[::8]):
        expected = block_states(recognizer, draft.block, sample)
        for lengths, state in seen:
            at = lengths[row] - 1  # the state that decided the last committed token
            if at < len(expected) - 2:  # the row has not ended
                compared += 1
                torch.testing.assert_close(state[row], expected[at], atol=0.02, rtol=0.02)
    assert compared > 10


def test_a_block_with_the_weights_of_a_layer_does_what_the_layer_does(recognizer, samples):
    [layer], seen = recognizer.model.get_decoder().layers[-1:], []
    sample = samples[-1]

    def noted(module, given, output):
        seen.append((given[0], output[0] if isinstance(output, tuple) else output))

    hook = layer.register_forward_hook(noted)
    source = sample.audio[None].float()
    with torch.no_grad():
        recognizer.model.get_decoder()(input_ids=sample.ids[None], encoder_hidden_states=source)
    hook.remove()
    adapter = registry.adapter_for(recognizer.model)
    block = adapter.extra_layer(recognizer.model.config)
    block.load_state_dict(layer.state_dict())
    [(given, expected)] = seen
    sample = replace(sample, hidden=given[0])
    found = block_states(recognizer, block, sample)
    torch.testing.assert_close(found, expected[0], atol=1e-4, rtol=1e-4)


def test_heads_learn_the_tokens_of_their_list(recognizer, samples):
    """Labels are moved to the list and back: heads are mostly right on their training data."""
    options = MedusaOptions(
        kind="linear", num_heads=1, epochs=40, batch=14, peak_rate=0.03, vocabulary=8, nodes=0
    )
    draft, report = train_heads(recognizer.model, samples, options)
    adapter = registry.adapter_for(recognizer.model)
    hits = ranks(adapter, draft.heads, None, samples, options)[0]
    labels = torch.cat([one.ids[2:] for one in samples])
    listed = torch.isin(labels, draft.heads.vocabulary)
    assert hits.any(1)[~listed].sum() == 0
    most = torch.bincount(labels[listed]).max() / listed.sum()
    assert hits[listed, 0].float().mean() > most + 0.15
    assert draft.paths == [(0,)] and report["expected_tokens_per_pass_tree"] is None


@KINDS
def test_trained_heads_with_few_tokens_draft_exactly(kind, recognizer, waves, samples, trained):
    draft, report = trained[kind]
    assert len(draft.heads.vocabulary) == report["vocabulary"] == 8
    assert 0 < report["tokens_in_vocabulary"] < 1
    assert len(draft.paths) == 4 and len(report["accuracy_by_head_and_rank"]) == 2
    expected, _ = generated(recognizer, waves[:3])
    rows, decoder = generated(recognizer, waves[:3], draft)
    assert rows == expected
    assert decoder.stats.accepted > 0
    single = [generated(recognizer, [wave], draft)[0][0] for wave in waves[:3]]
    assert single == expected


@KINDS
def test_heads_are_the_same_after_saving_and_loading(kind, recognizer, waves, trained, tmp_path):
    draft, _ = trained[kind]
    draft.save_pretrained(tmp_path / kind, target_config(recognizer.model))
    loaded = Medusa.from_pretrained(tmp_path / kind)
    assert torch.equal(loaded.heads.vocabulary, draft.heads.vocabulary)
    assert loaded.paths == draft.paths
    for found, kept in ((loaded.heads, draft.heads), (loaded.block, draft.block)):
        expected = {} if kept is None else kept.state_dict()
        for name, value in expected.items():
            torch.testing.assert_close(found.state_dict()[name], value, atol=1e-3, rtol=1e-3)
    rows, decoder = generated(recognizer, waves[:3], loaded)
    assert rows == generated(recognizer, waves[:3])[0]
    assert decoder.stats.accepted > 0


def test_labels_are_counted_in_transcripts_only(samples):
    ids = most_frequent(samples, 6)
    tokens = [token for one in samples for token in one.ids[1:].tolist()]
    count = {token: tokens.count(token) for token in set(tokens)}
    kept = {count[token] for token in ids.tolist()}
    assert ids.tolist() == sorted(ids.tolist()) and len(ids) == 6
    assert min(kept) >= max(count[token] for token in count if token not in ids)
    assert len(most_frequent(samples, 1000)) == len(count)


def test_own_ids_are_the_inverse_of_target_ids():
    heads = MedusaHeads(1, 1, 4, vocabulary=torch.tensor([3, 7, 9]))
    labels = torch.tensor([[9, 3, -100], [4, 70, 7]])
    own = heads.own_ids(labels)
    assert own.tolist() == [[2, 0, -100], [-100, -100, 1]]
    assert heads.target_ids(own[own >= 0]).tolist() == [9, 3, 7]
    assert MedusaHeads(1, 1, 4).own_ids(labels) is labels


def test_options_and_models_that_do_not_fit_are_refused(recognizer, samples, waves):
    with pytest.raises(OptionError, match="at least 4"):
        MedusaOptions(vocabulary=3)
    with pytest.raises(UnsupportedModelError, match="no adapter"):
        recognizers_of(*tiny_recognizers.speech_to_text())
    heads = MedusaHeads(2, 1, 32, vocabulary=torch.tensor([3, 4000]))
    with pytest.raises(IncompatibleError, match="vocabulary"):
        generated(recognizer, waves[:1], Medusa(heads))
    assert pad_sequence([one.ids for one in samples]).max() < tiny_recognizers.VOCAB

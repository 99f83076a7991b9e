"""The recipe of zoo:lm-synth: what it learns from, and from what it does not."""

import random
import re

import pytest
import torch

from mmdecode.asr.correction.n_best_lists import NBestList
from mmdecode.checkpoints import local_path
from mmdecode.train.loop import FitOptions
from mmdecode.train.zoo.lm_synth import (
    Confusions,
    Examples,
    LMSynthOptions,
    build_model,
    build_tokenizer,
    loss_of,
    run,
)
from mmdecode.train.zoo.sentences import vocabulary
from mmdecode.zoo import grammar
from mmdecode.zoo.rebuilt import UNSEEN, utterances
from mmdecode.zoo.speech import speech_test

SMALL = LMSynthOptions(
    lists=100,
    vocabulary=300,
    width=32,
    layers=1,
    heads=2,
    inner=32,
    fit=FitOptions(steps=6, batch=8, every=3),
)
LISTS = [
    NBestList(f"{n}", (text, text.lower(), text.upper()), None, text)
    for n, text in enumerate(grammar.sentences(40, 3, "train"))
]


def learned(step):
    """Sentences of a step, as the model is to write them."""
    tokenizer = build_tokenizer(SMALL)
    examples = Examples(tokenizer, LISTS, SMALL)
    texts = []
    for one in examples(step):
        answer = [t for t, weight in zip(one.ids, one.weights, strict=True) if weight == 1.0]
        assert answer[-1] == tokenizer.eos_token_id
        texts.append(tokenizer.decode(answer, skip_special_tokens=True).strip())
    return texts


@pytest.mark.slow
def test_no_sentence_of_a_test_set_is_learned():
    held_out = {u.text for part in ("development", "test", "unseen") for u in utterances(part, 60)}
    for clip in [*speech_test(), *speech_test(long=True)]:
        held_out |= set(re.split(r"(?<=[.?!]) ", clip.text))
    templated = [
        text for text in held_out if text not in {u.text for u in utterances("unseen", 60)}
    ]
    assert all(grammar.split(text) == "test" for text in templated)
    learned_texts = [text for step in range(6) for text in learned(step)]
    assert len(learned_texts) == 48
    assert all(grammar.split(text) == "train" for text in learned_texts)
    assert not held_out & {*learned_texts}


def _filled(template, domain):
    """A pattern of what a template can become."""
    ways = grammar.SLOTS[domain]
    parts = re.split(r"\{(\w+)\}", template)
    parts[::2] = map(re.escape, parts[::2])
    parts[1::2] = [f"(?:{'|'.join(map(re.escape, ways[slot]))})" for slot in parts[1::2]]
    return "".join(parts)


def test_unseen_templates_are_of_known_words_and_of_no_known_template():
    words = {w for u in utterances("unseen", 200) for w in re.findall(r"[a-z']+", u.text.lower())}
    assert words <= grammar.vocabulary()
    known = [
        re.compile(_filled(template, domain), re.IGNORECASE)
        for domain, (_, templates) in grammar.TEMPLATES.items()
        for template in templates
    ]
    found = [u.text for u in utterances("unseen", 200)]
    assert not [text for text in found if any(one.fullmatch(text) for one in known)]
    assert set(UNSEEN) == set(grammar.DOMAINS)


def test_parts_share_no_sentence():
    parts = [{u.text for u in utterances(p, 200)} for p in ("development", "test", "unseen")]
    assert [len(part) for part in parts] == [200, 200, 200]
    assert not parts[0] & parts[1] and not parts[1] & parts[2]
    assert [u.text for u in utterances("test", 5)] == [u.text for u in utterances("test", 9)][:5]
    voices = {u.voice.variant for u in utterances("test", 60)}
    assert voices == {"m6", "f3", "Michael", "steph", "max"}


def test_confusions_keep_a_sentence_recognisable():
    confusions, rng = Confusions(vocabulary("grammar")), random.Random(0)
    text = "The doctor measured the frozen planet for seven hours."
    samples = [confusions.sample(text, rng, 3) for _ in range(200)]
    assert all(len(one) == 3 for one in samples)
    same = [words == text for one in samples for words in one]
    assert 0.02 < sum(same) / len(same) < 0.6
    assert any(len(set(one)) == 3 for one in samples)


def test_steps_repeat_and_a_list_weighs_less_than_its_answer():
    tokenizer = build_tokenizer(SMALL)
    examples = Examples(tokenizer, LISTS, SMALL)
    assert [e.ids for e in examples(4)] == [e.ids for e in examples(4)]
    assert [e.ids for e in examples(4)] != [e.ids for e in examples(5)]
    one = examples.corrected(["The cat.", "A cat."], "The bat.")
    answer = examples.prompts.answer("The bat.")
    assert one.ids[-len(answer) :] == answer and one.ids[0] == tokenizer.bos_token_id
    assert one.weights == [0.0, *[0.2] * (len(one.ids) - len(answer) - 1), *[1.0] * len(answer)]
    model = build_model(tokenizer, SMALL)
    alone = loss_of(model, [one])
    both = loss_of(model, [one, examples.plain("A longer sentence, much longer than that.")])
    assert not torch.isclose(alone, both)


def test_recipe_runs_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr("mmdecode.train.zoo.lm_synth.make_lists", lambda folder, options: LISTS)
    first = run(SMALL, tmp_path / "work", tmp_path / "out")
    assert first["step"] in (3, 6) and first["held_out_lists"] + first["lists"] == len(LISTS)
    assert (tmp_path / "out" / "corrector.json").exists()
    again = run(SMALL, tmp_path / "work", tmp_path / "out")
    assert again == first


def test_the_shipped_model_fits_its_bounds():
    from pathlib import Path

    folder = Path(local_path("zoo:lm-synth"))
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4 * 2**20

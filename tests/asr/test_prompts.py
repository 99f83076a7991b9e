"""What a window is shown: prompts, hotwords, languages by recording, tasks."""

import pytest

from mmdecode import Decoder
from mmdecode.asr import Failure, TranscribeOptions, Transcriber
from mmdecode.errors import OptionError

POSITIONS = 120


@pytest.fixture(scope="module")
def roomy(processor, kit):
    """A model with room for a prompt and the text so far, whose text depends on them."""
    return kit.build_model(processor, seed=3, positions=POSITIONS, max_new_tokens=20)


def spied(model, processor, **options):
    """A transcriber, and the list of prompts its decoder is given."""
    seen = []

    class Spy(Decoder):
        def __call__(self, model, input_ids, **kwargs):
            seen.extend(input_ids.tolist())
            return super().__call__(model, input_ids, **kwargs)

    return Transcriber(model, processor, Spy(seed=0), TranscribeOptions(**options)), seen


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"condition_on_prev_tokens": True},
        {"condition_on_prev_tokens": True, "prompt_condition_type": "all-segments"},
    ],
    ids=["every window", "first-segment", "all-segments"],
)
def test_a_prompt_gives_the_tokens_of_transformers(roomy, processor, kit, options):
    samples = kit.noise(5.0, seed=5)
    ids = processor.get_prompt_ids("Zoe, ok", return_tensors="pt")
    ours, seen = spied(roomy, processor, prompt="Zoe, ok", loop_guard="report", **options)
    [found] = ours([samples])
    tokens, times = kit.stock(roomy, processor, samples, prompt_ids=ids, **options)
    assert (found.tokens, kit.times(found)) == (tokens, times)
    assert len(seen) > 2 and max(map(len, seen)) < POSITIONS // 2, "the prompts were cut"
    assert tokens != kit.stock(roomy, processor, samples)[0], "the prompt changed nothing"
    given, _ = spied(roomy, processor, prompt=ids.tolist(), loop_guard="report", **options)
    assert given([samples])[0].tokens == tokens


def text_of(processor, ids):
    return processor.tokenizer.decode(ids)


def test_hotwords_come_before_everything_that_is_shown(roomy, processor, kit):
    both = {"prompt": "abc", "hotwords": "Xy", "condition_on_prev_tokens": True}
    ours, seen = spied(roomy, processor, loop_guard="report", **both)
    [found] = ours([kit.noise(5.0, seed=5)])
    start = "<|startoftranscript|><|en|><|transcribe|>"
    first, second = (text_of(processor, ids) for ids in seen[:2])
    assert first == f"<|startofprev|> Xy abc{start}"
    context = text_of(processor, found.segments[0].tokens[:-1])
    assert second.startswith(f"<|startofprev|> Xy abc{context}")


@pytest.mark.parametrize("kind", ["first-segment", "all-segments"])
def test_the_text_so_far_gives_way_to_what_is_always_shown(processor, kit, kind):
    positions = 40
    model = kit.build_model(processor, positions=positions, max_new_tokens=15)
    ours, seen = spied(
        model,
        processor,
        loop_guard="report",
        prompt="abc",
        hotwords="Xy",
        condition_on_prev_tokens=True,
        prompt_condition_type=kind,
    )
    [found] = ours([kit.noise(9.0, seed=5)])
    most = 1 + positions // 2 - 1 + 3
    full = [text_of(processor, ids) for ids in seen if len(ids) == most]
    assert full and max(map(len, seen)) == most
    head = "<|startofprev|> Xy" + (" abc" if kind == "all-segments" else "")
    assert all(text.startswith(head) for text in full)
    before = text_of(processor, found.segments[-2].tokens[-3:-1])
    assert full[-1].endswith(f"{before}<|startoftranscript|><|en|><|transcribe|>")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": "<|de|> yes"}, "prompt contains the special token"),
        ({"hotwords": "no <|endoftext|>"}, "hotwords contains the special token"),
        ({"prompt": "a" * 40, "hotwords": "b" * 30}, "have 72 tokens; expected at most 59"),
    ],
)
def test_texts_that_cannot_be_shown_are_refused(roomy, processor, options, words):
    with pytest.raises(OptionError, match=words):
        Transcriber(roomy, processor, options=TranscribeOptions(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_condition_type": "all-segments", "prompt": "a"},
        {"prompt_condition_type": "all-segments", "condition_on_prev_tokens": True},
    ],
)
def test_a_prompt_for_all_segments_needs_both_other_options(options):
    with pytest.raises(OptionError, match="needs prompt and condition_on_prev_tokens=True too"):
        TranscribeOptions(**options)


# Languages and tasks


def test_each_recording_of_a_batch_may_have_its_language(processor, kit):
    model = kit.build_model(processor, language=None)
    recordings = [kit.noise(2.1, seed=i) for i in range(4)]
    languages = ["de", None, "english", "<|de|>"]
    inputs = [
        {"audio": samples, "language": language}
        for samples, language in zip(recordings, languages, strict=True)
    ]
    together = Transcriber(model, processor, options=TranscribeOptions(batch_size=4))(inputs)
    assert [t.language for t in together][::2] == ["de", "en"]
    for samples, language, found in zip(recordings, languages, together, strict=True):
        alone = Transcriber(model, processor, options=TranscribeOptions(language=language))
        expected = alone(samples)
        assert (found.language, found.tokens) == (expected.language, expected.tokens)
    stock = [kit.stock(model, processor, recordings[3], language=name)[0] for name in ("de", "en")]
    assert together[3].tokens == stock[0] != stock[1]


def test_a_language_that_is_not_known_fails_its_recording_alone(model, processor, kit):
    samples = kit.noise(0.5)
    ours = Transcriber(model, processor, options=TranscribeOptions(max_new_tokens=3))
    inputs = [{"audio": samples, "language": name} for name in ("de", "dee", 3, None)]
    found = ours(inputs)
    assert [isinstance(t, Failure) for t in found] == [False, True, True, False]
    assert "did you mean 'de'" in found[1].error and found[1].kind == "InputError"
    assert "expected a name such as 'en'" in found[2].error
    single = kit.build_model(processor, is_multilingual=False)
    inputs = [{"audio": samples, "language": name} for name in ("English", "de", None)]
    english, failed, neither = Transcriber(single, processor)(inputs)
    assert english.tokens == neither.tokens
    assert "array 1: language='de'" in failed.error and failed.kind == "InputError"


def test_translation_gives_the_tokens_of_transformers(processor, kit):
    model = kit.build_model(processor, seed=1, scale=3.0)
    samples = kit.noise(2.5, seed=1)
    found = Transcriber(model, processor, options=TranscribeOptions(task="translate"))(samples)
    expected = kit.stock(model, processor, samples, task="translate")[0]
    assert found.tokens == expected != kit.stock(model, processor, samples)[0]

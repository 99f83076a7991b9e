"""Windows that loop: found, never shown to a later one, cut on request; others are left alone."""

import json

import numpy as np
import pytest
import torch

from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.asr.decoding.repetition import first_round_end
from mmdecode.engine.stats import Stats
from mmdecode.zoo.speech import speech_test

A, B, C, D = range(4)


@pytest.mark.parametrize(
    ("tokens", "end"),
    [
        ([A] * 12, 1),
        ([B, C, *[A] * 12], 3),
        ([A] * 11, None),  # a word said eleven times
        ([A, B, C] * 4, 3),
        ([D, *[A, B, C] * 4, A], 4),  # cut off in the middle of a round
        ([A, B, C] * 3, None),  # a chorus
        ([*[A, B, C] * 4, D], None),  # went on
        ([A, A, B] * 4, 3),  # the round, not the repeat inside it
        (list(range(30)), None),
        ([], None),
    ],
    ids=str,
)
def test_a_loop_is_four_rounds_of_twelve_tokens_at_the_end(tokens, end):
    assert first_round_end(tokens) == end


def test_sentences_of_the_test_set_do_not_loop(trained):
    tokenizer = Transcriber.from_pretrained(trained, device="cpu").processor.tokenizer
    for clip in (*speech_test(), *speech_test(long=True)):
        ids = tokenizer.encode(clip.text, add_special_tokens=False)
        assert all(first_round_end(ids[:end]) is None for end in range(len(ids)))


class Script:
    """A decoder that says what it is told, window by window; notes its prompts."""

    def __init__(self, windows):
        self.windows, self.prompts, self.stats = list(windows), [], Stats()
        self.guide = None

    def __call__(self, model, input_ids, **kwargs):
        self.prompts.append(input_ids[0].tolist())
        decoded = input_ids.new_tensor([[*self.windows[len(self.prompts) - 1]]])
        return torch.cat([input_ids, decoded], 1)


@pytest.fixture(scope="module")
def marks(processor, model):
    """Ids of times, of the end, and a function from text to ids."""
    begin, encode = model.generation_config.no_timestamps_token_id + 1, processor.tokenizer.encode

    def window(*parts):
        ids = []
        for part in parts:
            text = isinstance(part, str)
            ids += encode(part, add_special_tokens=False) if text else [begin + part]
        return [*ids, model.config.eos_token_id]

    return window


def scripted(model, processor, kit, windows, seconds, **options):
    script = Script(windows)
    options = TranscribeOptions(**options)
    [found] = Transcriber(model, processor, script, options)([kit.noise(seconds)])
    shown = [processor.tokenizer.decode(ids[:-3]) for ids in script.prompts]
    return found, [text.replace("<|startofprev|>", "") for text in shown]


LOOP = "xy" * 8


@pytest.mark.parametrize("guard", ["report", "isolate", "cut"])
def test_a_repetition_is_not_context_of_a_later_window(processor, kit, marks, guard):
    model = kit.build_model(processor, positions=120)
    windows = [
        marks(0, "one", 50),
        marks(0, f"two {LOOP}", 50),
        marks(0, "three", 50),
        marks(0, "four", 50),
    ]
    found, shown = scripted(
        model, processor, kit, windows, 8.0, loop_guard=guard, condition_on_prev_tokens=True
    )
    expected = f"two {LOOP}" if guard != "cut" else "two xy"
    assert [s.text for s in found.segments] == ["one", expected, "three", "four"]
    assert [s.looped for s in found.segments] == [False, True, False, False]
    assert found.stats["looped"] == 1
    assert shown[1] == "one"
    if guard == "report":
        assert LOOP in shown[2] and LOOP in shown[3]
    else:
        assert shown[2] == ""
        assert shown[3] == "three"


def test_a_loop_over_several_segments_is_cut_to_its_first_round(model, processor, kit, marks):
    parts = [part for i in range(6) for part in (6 * i, "abc", 6 * i + 6)]
    windows = [marks(0, "good", 0, *parts), marks(0, "end", 50)]
    found, _ = scripted(model, processor, kit, windows, 4.0, loop_guard="cut")
    assert [(s.start_s, s.end_s, s.text) for s in found.segments] == [
        (0.0, 0.0, "good"),
        (0.0, 0.24, "abc"),
        (2.0, 4.0, "end"),
    ]
    # the window is read to where it said that it ends, loop or not
    kept, _ = scripted(model, processor, kit, windows, 4.0, loop_guard="report")
    assert len(kept.segments) == 8


def test_a_loop_in_what_the_next_window_decodes_again_is_not_cut(model, processor, kit, marks):
    windows = [marks(0, "good", 25, 25, LOOP), marks(0, "end", 50), marks(0, "x", 25)]
    found, _ = scripted(model, processor, kit, windows, 2.5, loop_guard="cut")
    assert [s.text for s in found.segments] == ["good", "end"]
    assert [s.looped for s in found.segments] == [True, False]


def test_what_does_not_loop_is_the_same_under_every_guard(trained):
    clips = [str(clip.path) for clip in speech_test()[:4]]

    def run(guard):
        ours = Transcriber.from_pretrained(
            trained, device="cpu", loop_guard=guard, condition_on_prev_tokens=True
        )
        return [json.dumps([t.tokens, t.stats]) for t in ours(clips)]

    assert run("report") == run("isolate") == run("cut")


def test_a_random_model_that_loops_is_reported(processor, kit):
    model = kit.build_model(processor, seed=1, scale=3.0)
    [found] = Transcriber(model, processor)([np.tile(kit.noise(2.0), 2)])
    assert found.stats["looped"] > 0
    assert any(segment.looped for segment in found.segments)

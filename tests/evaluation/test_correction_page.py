"""Who decided each word, as a page: colours, alignments, counts."""

import re

import pytest
import soundfile
from rich.console import Console

from mmdecode.asr.results import DecidedWord, Segment, Transcript
from mmdecode.cli import transcribe
from mmdecode.evaluation.speech import correction_page
from mmdecode.evaluation.speech.correction_page import CorrectedText, CorrectedTexts
from mmdecode.zoo.speech import speech_test
from tests.support.commands import invoke
from tests.support.files import write_json_lines
from tests.support.pages import checked

MARKS = {"": "both", "a": "audio", "l": "language model"}


def words(text):
    """``cat/a`` is a word that the audio decided, ``/l`` one of the language model."""
    pairs = (word.partition("/") for word in text.split())
    return [DecidedWord(text=word, by=MARKS[by]) for word, _, by in pairs]


def text(decided, before, reference=None, **more):
    return CorrectedText(
        name="one", words=words(decided), before=before, reference=reference, **more
    )


def shown(html):
    """A line of a page: words as ``class:word``, ``!`` where changed, errors in brackets."""
    html = re.sub(r' title="[^"]+"', "", " ".join(html.split()))
    html = re.sub(r'<span class="by-(\w+)( changed)?">(.*?)</span>', _short, html)
    html = re.sub(r'<span class="substitute">(.*?)<del>(.*?)</del></span>', r"[\1|\2]", html)
    html = re.sub(r'<span class="insert">(.*?)</span>', r"[+\1]", html)
    return re.sub(r'<del class="delete">(.*?)</del>', r"[-\1]", html)


def _short(found):
    by, changed, word = found.groups()
    return f"{'' if by == 'both' else by + ':'}{word}{'!' * bool(changed)}"


_LINE = r"<dt>(.*?)</dt><dd>(.*?)</dd>"


def lines(one, **options):
    html = CorrectedTexts([one], **options).as_html()
    return {name: shown(line) for name, line in re.findall(_LINE, html, re.DOTALL)}


def test_each_word_has_the_colour_and_the_title_of_who_decided_it():
    html = CorrectedTexts([text("the cat/a sat/l", "the hat sat")]).as_html()
    html = html[html.index("<dd>") :]
    for name, by in (("by-both", "both"), ("by-audio", "audio"), ("by-model", "language model")):
        [(found, title)] = re.findall(rf'class="{name}(?: changed)?" title="([^"]*)">(\w+)', html)
        assert found == correction_page.TELLS[by]
        assert title == {"both": "the", "audio": "cat", "language model": "sat"}[by]


def test_without_a_reference_the_1_best_stands_next_to_and_changes_are_marked():
    found = lines(text("The cat/a sat, there/l", "the hat sat"))
    assert found == {"1-best": "the hat sat", "corrected": "The audio:cat! sat, model:there!"}


def test_words_are_aligned_to_the_reference():
    one = text("so the cat/a sat/l now", "the hat sat now", "the cat sits now please")
    assert lines(one) == {
        "reference": "the cat sits now please",
        "1-best": "the [hat|cat] [sat|sits] now [-please]",
        "corrected": "[+so!] the audio:cat! [model:sat|sits] now [-please]",
    }


@pytest.mark.parametrize(
    ("decided", "reference", "expected"),
    [
        # the normaliser parts, joins and leaves out; words stay as they are written
        ("don't/a go", "do not go", "audio:don&#39;t go"),
        ("twenty/l one/a cats", "21 cats", "model:twenty audio:one cats"),
        ("well uh/l cats", "well cats", "well model:uh cats"),
        ("uh/l cats/a", "cats", "model:uh audio:cats"),
        ("uh/l", "", "model:uh"),
        ("", "cats", "[-cats]"),
        ("cats/a sit", "two cats sit", "[-two] audio:cats sit"),
    ],
)
def test_words_that_are_not_scored_as_written_keep_order_and_colour(decided, reference, expected):
    before = " ".join(word.text for word in words(decided))
    assert lines(text(decided, before, reference))["corrected"] == expected


def test_everything_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    for reference in (None, f"{evil} {evil}", "x"):
        one = CorrectedText(
            name=evil, words=[DecidedWord(text=evil, by="audio")], before=evil, reference=reference
        )
        texts = CorrectedTexts([one], normaliser="none")
        for html in (texts.page({evil: evil}), texts._repr_html_()):
            assert "<script" not in html and "&lt;script&gt;" in html


def test_counts_are_of_all_texts_and_right_words_of_those_with_a_reference():
    texts = CorrectedTexts(
        [
            text("the cat/a sat/l", "the hat sat", "the cat sits"),
            text("a/a b/l", "a b"),
        ]
    )
    both, audio, model = texts.rows()
    assert [row["words"] for row in (both, audio, model)] == ["1", "2", "2"]
    assert [row["share, %"] for row in (both, audio, model)] == ["20.00", "40.00", "40.00"]
    assert [row["not in the 1-best"] for row in (both, audio, model)] == ["0", "1", "0"]
    assert [row["right, %"] for row in (both, audio, model)] == ["100.00", "100.00", "0.00"]
    assert {name: score.errors for name, score in texts.scores.items()} == {
        "1-best": 2,
        "corrected": 1,
    }
    assert "right, %" not in CorrectedTexts([text("a", "a")]).rows()[0]


def test_a_page_shows_the_most_changed_first_and_says_what_it_leaves_out():
    texts = [text("a b c", "a b c"), text("a x/l y/l", "a b c"), text("a x/l c", "a b c")]
    html = CorrectedTexts(texts).page({"model": "m"}, most=2)
    checked(html)
    shown_texts = re.findall(r"<dt>corrected</dt><dd>(.*?)</dd>", html, re.DOTALL)
    assert [shown(line) for line in shown_texts] == ["a model:x! model:y!", "a model:x! c"]
    assert "The 2 of 3 recordings with the most changes" in html and "of 3</small>" in html
    assert re.search(r"Of 9 words the audio decided <b>0</b>, the language model\s<b>3</b>", html)
    whole = CorrectedTexts(texts[:2]).page({}, most=2)
    assert "with the most changes" not in whole
    CorrectedTexts([]).page({})  # where all recordings failed


def test_recordings_play_from_the_page_unless_they_are_large(tmp_path):
    path = tmp_path / "a.wav"
    soundfile.write(path, [0.0] * 800, 16_000)
    both = [text("a", "a", audio=path), text("b", "b", audio=tmp_path / "gone.wav")]
    assert CorrectedTexts(both).as_html().count("<audio") == 1
    three = CorrectedTexts([text("a", "a", audio=path)] * 3)
    assert three.as_html(held=2 * path.stat().st_size).count("<audio") == 2
    assert "<audio" not in CorrectedTexts(both).as_html(played=100)


def transcript(**more):
    decided = words("the cat/a")
    segments = [
        Segment(start_s=0, end_s=1, text="the cat", tokens=[], decided=decided),
        Segment(start_s=1, end_s=2, text="is  here", tokens=[]),
    ]
    given = {"segments": segments, "uncorrected": "the hat is  here"} | more
    return Transcript(
        source="a.wav",
        index=0,
        text="the cat is  here",
        language=None,
        duration_s=2,
        tokens=[],
        stats={},
        **given,
    )


def test_what_was_not_corrected_is_the_audio_s():
    one = CorrectedText.of_transcript(transcript(), "the cat")
    assert one.words == words("the cat/a is/a here/a")
    assert (one.name, one.before, one.reference) == ("a.wav", "the hat is  here", "the cat")
    plain = CorrectedText.of_transcript(transcript(uncorrected=None))
    assert plain.before == "the cat is  here"


def test_a_corrected_text_is_shown_in_a_notebook_and_as_text():
    one = CorrectedText(name="u1", words=words("the cat/a"), before="the hat")
    texts = CorrectedTexts([one])
    assert repr(texts) == "u1\n  1-best    the hat\n  corrected the cat\n    cat: audio"
    html = texts._repr_html_()
    assert html.startswith("<style>") and ".by-audio" in html and ".substitute" in html


def test_a_terminal_has_colours_and_a_pipe_the_same_text(monkeypatch):
    coloured = transcribe.coloured(transcript())
    assert coloured.plain == transcript().text
    assert [(coloured.plain[s.start : s.end], s.style) for s in coloured.spans if s.style] == [
        ("cat", "blue")
    ]
    plain = Console(force_terminal=False)
    with plain.capture() as capture:
        plain.print(coloured)
    assert capture.get() == "the cat is  here\n"


def test_the_command_writes_the_page_and_a_resumed_one_writes_it_whole(tmp_path):
    clips = [clip for clip in speech_test() if clip.duration_s < 8][:2]
    rows = []
    for number, clip in enumerate(clips):
        soundfile.write(tmp_path / f"{number}.wav", clip.samples()[:40_000], 16_000)
        rows.append({"audio": f"{number}.wav", "text": clip.text})
    manifest = tmp_path / "m.jsonl"
    write_json_lines(manifest, rows)
    page, out = tmp_path / "pages" / "who.html", tmp_path / "out"
    command = ["transcribe", "--data", str(manifest), "--device", "cpu", "--out", str(out)]
    command += ["--model", "zoo:whisper-synth", "--format", "txt", "--report", str(page)]
    command += ["--correct", "llm:model=zoo:lm-synth"]
    for more in (["--limit", "1"], ["--resume"]):
        done = invoke(*command, *more)
        assert done.exit_code == 0, done.output
        html = page.read_text()
        assert html.count('class="clip"') == html.count("<audio") == 1 + (more == ["--resume"])
    assert clips[0].text in html and "WER, corrected" in html
    refused = invoke("transcribe", tmp_path / "0.wav", "--report", "x.html")
    assert "without --correct" in str(refused.exception or refused.output)
    folder = invoke(*command[:-3], tmp_path, *command[-2:])
    assert "is a folder" in str(folder.exception or folder.output)


def test_words_of_the_1_best_that_nothing_replaces_are_counted():
    def text(before, after):
        words = [DecidedWord(text=word, by="both") for word in after.split()]
        return CorrectedText(name="x", words=words, before=before)

    pairs = [("a b c d", "a d"), ("a b", "a x y b"), ("a b c", "a x"), ("", "a"), ("A, b.", "a b")]
    assert [text(*pair).left_out for pair in pairs] == [2, 0, 1, 0, 0]
    page = CorrectedTexts([text(*pair) for pair in pairs]).page({})
    assert "left out: <b>3</b>" in page

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from mmdecode.asr.output import manifest
from mmdecode.checkpoints import scheme_card, zoo_names
from mmdecode.runs import console
from mmdecode.zoo import real_clips
from mmdecode.zoo.real_clips import FOLDER, MORE, all_clips
from tests.support.commands import invoke, json_of

CLIPS = real_clips.real_clips()


def test_the_shipped_clips_are_real_speech_with_texts_and_licences():
    assert len(CLIPS) == 11 and sum(len(clip.text.split()) for clip in CLIPS) == 174
    assert 65 < sum(clip.duration_s for clip in CLIPS) < 66
    assert {clip.path.name for clip in CLIPS} == {path.name for path in FOLDER.glob("*.flac")}
    terms = (FOLDER / "README.md").read_text()
    for clip in CLIPS:
        assert "public" in clip.licence or "CC BY 4.0" in clip.licence, clip.name
        assert clip.origin and clip.speaker and clip.source.partition(":")[0] in terms
    assert terms.count("creativecommons.org/licenses/by/4.0/") == 2  # LibriSpeech, AMI
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2.5e6


def test_the_notice_names_whom_to_credit():
    notice = (Path(__file__).parents[2] / "NOTICE").read_text()
    corpora = {
        clip.licence.split("(")[1].split(")")[0] for clip in CLIPS if "CC BY" in clip.licence
    }
    assert corpora == {"LibriSpeech", "AMI"}
    for words in (
        *corpora,
        "Vassil Panayotov",
        "AMI Consortium",
        scheme_card("moonshine:tiny-en")["notice"],
    ):
        assert words in notice, words


def test_clips_keep_their_rates_and_are_read_at_that_of_the_model():
    kinds = {soundfile.info(clip.path).samplerate for clip in CLIPS}
    assert kinds == {16_000, 22_050, 44_100}
    for clip in CLIPS:
        info = soundfile.info(clip.path)
        assert info.duration == pytest.approx(clip.duration_s, abs=0.006)
        if info.samplerate != 16_000:
            wave = clip.samples()
            assert wave.dtype == np.float32 and wave.ndim == 1
            assert len(wave) == pytest.approx(16_000 * clip.duration_s, abs=100)
            assert 0.05 < np.abs(wave).max() <= 1


def folder_of(path, **changed):
    rows = [
        {"audio": "a.wav", "text": "a dog", "language": "en", "source": "own", "origin": "us"},
        {"audio": "b.wav", "text": "ein Hund", "language": "de"},
        {"audio": "c.wav", "text": "ask not", "language": "en", "source": CLIPS[0].source},
    ]
    path.mkdir()
    (path / "manifest.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def test_english_clips_of_another_folder_come_after_the_shipped_ones_once_each(
    tmp_path,
):
    assert all_clips(tmp_path / "none") == CLIPS
    found = all_clips(folder_of(tmp_path / "more"))
    assert [clip.name for clip in found] == [*(clip.name for clip in CLIPS), "a.wav"]


@pytest.mark.skipif(not MORE.exists(), reason="no further clips lie next to this checkout")
def test_the_shipped_clips_are_those_they_were_taken_from():
    [*found] = all_clips()
    assert len(found) == 22 and sum(len(clip.text.split()) for clip in found) == 265
    originals = {clip.source: clip for clip in real_clips.real_clips(MORE)}
    for clip in CLIPS:
        original = originals[clip.source]
        assert clip.text == original.text
        same = (soundfile.read(one.path, dtype="int16")[0] for one in (clip, original))
        assert np.array_equal(*same), clip.name


def test_the_zoo_prints_whole_names_in_narrow_terminals(monkeypatch):
    monkeypatch.setattr(console.out, "width", 80)
    printed = invoke("zoo").stdout
    assert max(map(len, printed.splitlines())) <= 80
    for name in (*zoo_names(), "real-clips"):
        assert f" zoo:{name} " in printed, name


def test_the_zoo_lists_its_recordings():
    done = invoke("zoo", "--json")
    assert done.exit_code == 0, done.output
    cards = {row["name"]: row for row in json_of(done)}
    assert "174 words" in cards["zoo:real-clips"]["measured"]
    for name in manifest.shipped_manifests():
        assert cards[f"zoo:{name}"]["what"], name

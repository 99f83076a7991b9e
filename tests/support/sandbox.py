"""The files that examples of the documentation read, made from shipped recordings and scenes."""

from __future__ import annotations

import io
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

from mmdecode.checkpoints import ZOO
from mmdecode.zoo.scenes import draw_scene, render
from mmdecode.zoo.speech import speech_test
from tests.support.files import write_json_lines

RATE = 16_000
FOLDERS = {
    "my-llava": "llava-scenes",
    "my-drafter": "llava-scenes-eagle",
    "my-corrector": "lm-synth",
    "my-llama": "lm-synth",
}
"""Checkpoints of one's own, and the shipped ones that stand there."""


def write_video(path: Path, samples: np.ndarray) -> None:
    """A container with one track of sound."""
    import av

    with av.open(str(path), "w") as file:
        stream = file.add_stream("aac", rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(
            samples[None].astype(np.float32), format="fltp", layout="mono"
        )
        frame.sample_rate = RATE
        for packet in (*stream.encode(frame), *stream.encode(None)):
            file.mux(packet)


def lay_out(folder: Path) -> None:
    """Everything that an example of the documentation may name."""
    clips = [speech_test()[number] for number in (3, 5, 4)]
    (folder / "recordings" / "sub").mkdir(parents=True)
    for clip, name in zip(clips, ("recordings/a", "recordings/sub/a", "talk"), strict=True):
        shutil.copy(clip.path, folder / f"{name}.ogg")
    waves = [clip.samples() for clip in clips]
    for name, wave in (("a.wav", waves[0]), ("b.flac", waves[1]), ("talk.mp3", waves[2])):
        soundfile.write(folder / name, wave, RATE)
    write_video(folder / "talk.mp4", waves[2])
    entries = [{"path": f"recordings/{n}.ogg", "text": c.text} for n, c in (("a", clips[0]),)]
    entries.append({"path": "talk.ogg", "text": clips[2].text})
    for name in ("test.jsonl", "manifest.jsonl"):
        write_json_lines(folder / name, entries)
    for sub in ("scenes", "photos"):
        (folder / sub).mkdir()
    names = ("scene.png", "photo.jpg", "scenes/1.png", "scenes/2.png", "photos/1.jpg")
    for seed, name in enumerate(names):
        Image.fromarray(render(draw_scene(seed))).save(folder / name)
    wanted = [f"Is there a {word} in the image?" for word in ("ring", "star")]
    asked = [{"image": "photo.jpg", "question": question} for question in wanted]
    texts = {"input": ["one word", "one ward"], "output": "one word"}
    lists = [{"id": str(number), **texts} for number in range(9)]
    for name, rows in (("questions", asked), ("others", asked), ("lists", lists)):
        write_json_lines(folder / f"{name}.jsonl", rows)
    (folder / "wanted.txt").write_text("star\n2\n")
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (16, 16, 40, 40))
    mask.save(folder / "mask.png")
    (folder / "prompts.txt").write_text("a word\nanother word\n")
    (folder / "names.txt").write_text("Okonkwo\nMarion Lee\n")
    for name, stands in FOLDERS.items():
        shutil.copytree(ZOO / stands, folder / name)


def commands_of(block: str) -> list[str]:
    """Lines of a block of shell, those that are continued put together, without comments."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in map(str.strip, lines) if line and not line.startswith("#")]


def piped(before: str) -> bytes:
    """What a program before ``| mmdecode`` would write; of ffmpeg, which not every machine has,
    what it is asked for."""
    words = shlex.split(before)
    if words[0] == "ffmpeg":
        from mmdecode.asr.audio.reading import blocks, source_of

        wave = np.concatenate(list(blocks(source_of(words[words.index("-i") + 1], RATE), RATE)))
        kind = words[words.index("-f") + 1]
        if kind == "s16le":
            return (wave * 32767).astype("<i2").tobytes()
        assert kind == "wav", before
        buffer = io.BytesIO()
        soundfile.write(buffer, wave, RATE, format="WAV")
        return buffer.getvalue()
    import subprocess

    return subprocess.run(before, shell=True, check=True, capture_output=True).stdout


def run_line(line: str) -> None:
    """Runs a line of shell with ``mmdecode`` in it, in this process; it must succeed."""
    from tests.support.commands import invoke

    before, _, words = re.sub(r"\s+#.*$", "", line).partition("mmdecode ")
    stdin = piped(before.rstrip("| ")) if before.rstrip().endswith("|") else b""
    done = invoke(*shlex.split(words), input=stdin)
    assert done.exit_code == 0, (line, done.output, done.exception)


def run_python(code: str) -> None:
    """Runs an example as a program of its own would: from a clean namespace."""
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})

"""Uploads have the samples and pixels that the readers give, are refused, or end their process."""

import io
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import psutil
import pytest
import soundfile
from PIL import Image

from mmdecode.asr.audio.reading import blocks, encoded
from mmdecode.errors import CrashError, InputError, MMDecodeError, OptionError
from mmdecode.serve import media
from mmdecode.serve.media import MediaCounts, MediaDecoder, TooLargeError
from mmdecode.vlm.images import read_image
from tests.asr.fuzz import DAMAGE, recordings

RATE = 16_000
MIB = 1 << 20
posix = pytest.mark.skipif(os.name != "posix", reason="signals and limits are those of POSIX")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def decoder():
    with MediaDecoder(time_limit_s=60, most_pixels=Image.MAX_IMAGE_PIXELS) as found:
        yield found


@pytest.fixture(scope="module")
def audio():
    """One recording in each format that can be written here, one with subtitles too."""
    return recordings() | {"subtitled.mkv": SUBTITLED}


def wave(values, rate=RATE, kind="WAV", **options):
    file = io.BytesIO()
    soundfile.write(file, np.asarray(values), rate, format=kind, **options)
    return file.getvalue()


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def subtitled():
    """A recording in a container that has a track of subtitles."""
    av = pytest.importorskip("av")
    file, text = io.BytesIO(), b"1\n00:00:00,000 --> 00:00:00,100\nso it is\n"
    with av.open(file, "w", format="matroska") as to, av.open(io.BytesIO(text)) as lines:
        sound = to.add_stream("flac", rate=RATE, layout="mono")
        titles = to.add_stream_from_template(lines.streams[0])
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1600), np.int16), "s16", "mono")
        frame.sample_rate, frame.pts = RATE, 0
        for packet in [*sound.encode(frame), *sound.encode(None)]:
            to.mux(packet)
        for packet in lines.demux(0):
            if packet.dts is not None:
                packet.stream = titles
                to.mux(packet)
    return file.getvalue()


def noisy_images():
    noise = np.random.default_rng(0).integers(0, 256, (18, 24, 4), dtype=np.uint8)
    photo = Image.fromarray(noise[..., :3])
    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        "png": saved(photo),
        "jpeg": saved(photo, "JPEG"),
        "turned": saved(photo, "JPEG", exif=exif.tobytes()),
        "cmyk": saved(photo.convert("CMYK"), "JPEG"),
        "webp": saved(photo, "WEBP", lossless=True),
        "avif": saved(photo, "AVIF"),
        "gif": saved(photo, "GIF", save_all=True, append_images=[photo.rotate(180)]),
        "lzw": saved(photo, "TIFF", compression="tiff_lzw"),
        "16 bits": saved(photo.convert("I;16"), "TIFF"),
        "lab": saved(Image.new("LAB", (9, 9), (90, 20, 30)), "TIFF"),
        "jpeg2000": saved(photo, "JPEG2000"),
        "transparent": saved(Image.fromarray(noise)),
        "palette": saved(photo.convert("P")),
    }


IMAGES = noisy_images()
SUBTITLED = subtitled()
TONE = wave(np.sin(np.arange(4000) / 10) / 2)


def samples_here(data, name="audio"):
    return np.concatenate(list(blocks(encoded(data, name), RATE)))


def image_here(data, name="image"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read_image(data, name)


def outcome(read, *args):
    """Content that is read, or the message of the refusal without addresses of objects."""
    try:
        found = read(*args)
    except InputError as error:
        if isinstance(error, TooLargeError) or "MAX_IMAGE_PIXELS" in str(error):
            return InputError, "too large"
        return type(error), re.sub("0x[0-9a-f]+", "", str(error))
    return found.size, found.tobytes()


def runs(pid):
    """Whether a process runs; one that has ended may wait long for whoever takes note of it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# Whole files, and files that cannot be read


def test_samples_are_those_of_the_readers_in_every_format(decoder, audio):
    assert len(audio) >= 12
    for kind, data in audio.items():
        found, expected = decoder.samples(data, RATE), samples_here(data)
        assert found.dtype == np.float32 and found.ndim == 1, kind
        assert found.tobytes() == expected.tobytes(), kind
        found[0] = 1  # it is the caller's own


def test_samples_have_the_rate_that_is_asked_for(decoder):
    assert len(decoder.samples(TONE, 48_000)) == 12_000
    assert len(decoder.samples(wave(np.zeros((800, 2)), 8000), RATE)) == 1600


def test_images_are_those_of_the_reader_in_every_format(decoder):
    for kind, data in IMAGES.items():
        found, expected = decoder.image(data), image_here(data)
        assert (found.mode, found.size) == ("RGB", expected.size), kind
        assert found.tobytes() == expected.tobytes(), kind


REFUSED = {
    "empty": b"",
    "text": b"This is no recording and no image.",
    "web page": b"<!DOCTYPE html><title>404</title>",
    "drawing": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='/etc/passwd'/></svg>",
    "document": b"%PDF-1.7",
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run\n",
    "cut wav": TONE[:-999],
    "cut png": IMAGES["png"][:-99],
    "nan": wave(np.full(99, np.nan, np.float32), subtype="FLOAT"),
    "no samples": wave(np.zeros(0)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused_in_the_words_of_the_readers(decoder, kind):
    data, before = REFUSED[kind], decoder.counts
    for read, here in ((decoder.samples, samples_here), (decoder.image, image_here)):
        args = (data, RATE) if here is samples_here else (data,)
        found = outcome(lambda *args, read=read: read(*args, name="upload 7"), *args)
        assert found == outcome(here, data, "upload 7")
        assert found[0] is InputError and found[1].startswith("upload 7: ")
        assert str(Path(sys.prefix)) not in found[1] and "site-packages" not in found[1]
    assert decoder.counts == before._replace(refused=before.refused + 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # soundfile's
@pytest.mark.parametrize("count", [300, pytest.param(6000, marks=pytest.mark.slow)])
def test_broken_files_end_as_they_do_here(decoder, audio, count):
    draw, ended = random.Random(count), set()
    before, pids = decoder.counts, set(decoder.pids)
    for number in range(count):
        if number % 3:
            kind = draw.choice(sorted(audio))
            data = draw.choice(DAMAGE)(audio[kind], draw)
            found = outcome(decoder.samples, data, RATE)
            assert found == outcome(samples_here, data), (number, kind)
        else:
            kind = draw.choice(sorted(IMAGES))
            data = draw.choice(DAMAGE)(IMAGES[kind], draw)
            found = outcome(decoder.image, data)
            assert found == outcome(image_here, data), (number, kind)
        ended.add((number % 3 > 0, found[0] is InputError))
    assert len(ended) == 4, "some of each are read, and some refused"
    assert decoder.counts.killed == before.killed and (count > 300 or pids <= set(decoder.pids))
    assert decoder.samples(TONE, RATE).tobytes() == samples_here(TONE).tobytes()


def test_a_long_name_is_cut_and_an_odd_one_kept(decoder):
    with pytest.raises(InputError, match="^" + "n" * 200 + ": is empty"):
        decoder.image(b"", name="n" * 100_000)
    with pytest.raises(InputError, match=r'^a"ä.: is empty'):
        decoder.samples(b"", RATE, name='a"ä\udcff')


@pytest.mark.parametrize(
    "option", ["workers", "time_limit_s", "memory_bytes", "longest_s", "most_pixels"]
)
def test_numbers_that_allow_nothing_are_refused(option):
    with pytest.raises(OptionError, match=f"^{option} is 0; expected a number greater than 0"):
        MediaDecoder(**{option: 0})


# Too large


def test_audio_may_have_the_longest_length_and_no_more():
    with MediaDecoder(1, longest_s=0.25, time_limit_s=60) as decoder:
        assert len(decoder.samples(TONE, RATE)) == 4000
        with pytest.raises(TooLargeError, match=r"^a: is longer than 0.25 s; split it"):
            decoder.samples(wave(np.zeros(4001)), RATE, name="a")
        assert decoder.counts == MediaCounts(1, 1, 0)


@pytest.mark.parametrize(
    ("kind", "minutes"), [("FLAC", 40), pytest.param("OGG", 4, marks=pytest.mark.slow)]
)
def test_much_in_few_bytes_is_refused_after_its_first_seconds(kind, minutes):
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", 8000, 1, format=kind) as sound:
        for _ in range(6 * minutes):
            sound.write(np.zeros(80_000, np.int16))
    assert len(file.getvalue()) < 300_000
    with MediaDecoder(1, longest_s=20, memory_bytes=48 * MIB, time_limit_s=60) as decoder:
        decoder.samples(TONE, RATE)
        process = psutil.Process(decoder.pids[0])
        used = process.cpu_times().user
        with pytest.raises(TooLargeError):
            decoder.samples(file.getvalue(), RATE)
        assert process.cpu_times().user - used < 1
        assert len(decoder.samples(TONE, RATE)) == 4000


@pytest.mark.slow
@linux
def test_memory_of_large_images_is_given_back():
    data, me = saved(Image.new("L", (5000, 5000))), psutil.Process()
    with MediaDecoder(3, time_limit_s=60) as decoder:

        def ask():
            decoder.image(data).copy().resize((9, 9))

        ask()
        before = me.memory_info().rss
        for _ in range(2):
            threads = [threading.Thread(target=ask) for _ in range(3)]
            for one in threads:
                one.start()
            for one in threads:
                one.join()
        assert me.memory_info().rss - before < 50 * MIB


def test_an_image_may_have_the_most_pixels_and_no_more():
    with MediaDecoder(1, most_pixels=600, time_limit_s=60) as decoder:
        assert decoder.image(saved(Image.new("RGB", (30, 20)))).size == (30, 20)
        for size in ((30, 21), (256, 200)):  # Pillow warns of the first and raises at the second
            for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "ICO"):
                with pytest.raises(TooLargeError, match=r"has more than 600 pixels; resize it"):
                    decoder.image(saved(Image.new("RGB", size), kind, sizes=[size]))
        assert decoder.counts.killed == 0


def test_an_image_that_unpacks_to_much_is_refused_before_it_is_decoded():
    bomb = saved(Image.new("1", (10_000, 10_000)))
    assert len(bomb) < 50_000
    with MediaDecoder(1, memory_bytes=100 * MIB, time_limit_s=60) as decoder:
        with pytest.raises(TooLargeError):
            decoder.image(bomb)
        assert decoder.counts.killed == 0


@linux
@pytest.mark.parametrize("kind", ["image", "upload"])
def test_an_upload_that_needs_too_much_memory_ends_its_process_alone(kind):
    data = saved(Image.new("L", (6000, 6000))) if kind == "image" else bytes(200 * MIB)
    with MediaDecoder(1, memory_bytes=64 * MIB, most_pixels=10**9, time_limit_s=60) as decoder:
        with pytest.raises(CrashError, match=r"^big: needs more than the 64 MiB of memory"):
            decoder.image(data, name="big")
        assert decoder.pids == [] and decoder.counts == MediaCounts(0, 0, 1)
        assert decoder.image(IMAGES["png"]).size == (24, 18)


# Processes that hang, are killed or write nonsense


@posix
def test_a_process_that_hangs_is_killed_and_others_go_on():
    with MediaDecoder(2, time_limit_s=0.6) as decoder:
        decoder.samples(TONE, RATE)
        (hung,) = decoder.pids
        os.kill(hung, signal.SIGSTOP)
        ended = []

        def ask():
            with pytest.raises(
                CrashError, match=r"^slow: takes more than 0.6 s to decode; shorten"
            ):
                decoder.samples(TONE, RATE, name="slow")
            ended.append(time.monotonic())

        asking = threading.Thread(target=ask)
        begun = time.monotonic()
        asking.start()
        while len(decoder._free) == 2:
            time.sleep(0.01)
        while decoder.pids == [hung]:
            assert len(decoder.samples(TONE, RATE)) == 4000
        assert not ended
        asking.join()
        assert 0.5 < ended[0] - begun < 20
        assert not psutil.pid_exists(hung) and hung not in decoder.pids
        assert decoder.counts.killed == 1
        assert len(decoder.samples(TONE, RATE)) == 4000


@posix
def test_a_process_that_is_killed_while_it_decodes_fails_alone():
    with MediaDecoder(1, time_limit_s=60) as decoder:
        decoder.samples(TONE, RATE)
        (pid,) = decoder.pids
        os.kill(pid, signal.SIGSTOP)
        data = wave(np.zeros(200_000))  # more than a pipe holds
        caught = []

        def ask():
            with pytest.raises(CrashError, match=r"ends the process that decodes it \(signal 9,"):
                decoder.samples(data, RATE)
            caught.append(True)

        asking = threading.Thread(target=ask)
        asking.start()
        while decoder._free:
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        asking.join()
        assert caught
        assert len(decoder.samples(TONE, RATE)) == 4000
        (pid,) = decoder.pids
        os.kill(pid, signal.SIGKILL)  # idle: the next upload does not notice
        psutil.wait_procs([psutil.Process(pid)], timeout=0.2)
        assert len(decoder.samples(TONE, RATE)) == 4000
        assert decoder.counts == MediaCounts(3, 0, 1)


def standing_in(monkeypatch, code):
    """Lets children run other code."""
    monkeypatch.setattr(media, "child_command", lambda: [sys.executable, "-P", "-c", code])


NONSENSE = {
    "nothing": "",
    "text": "w(b'Traceback (most recent call last):')",
    "no JSON": "w(b'\\0\\0\\0\\1' + bytes(8) + b'{')",
    "a list": "w(b'\\0\\0\\0\\2' + bytes(8) + b'[]')",
    "nested": "w(struct.pack('>IQ', 60000, 0) + b'[' * 60000)",
    "no kind": "w(b'\\0\\0\\0\\2' + bytes(8) + b'{}')",
    "much": "w(struct.pack('>IQ', 2, 1 << 60) + b'{}')",
    "more than is allowed": "[c.write_frame(o, {'kind': 'part'}, bytes(4000)) for _ in range(99)]",
    "half": "w(struct.pack('>IQ', 20, 400))",
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_process_that_writes_nonsense_is_ended(monkeypatch, kind):
    code = "import struct, sys, mmdecode.serve.media_child as c\no = sys.stdout.buffer; w = o.write"
    code += f"\nc.write_frame(o, {{'kind': 'ready'}})\n{NONSENSE[kind]}"
    standing_in(monkeypatch, code)
    with MediaDecoder(1, longest_s=1, time_limit_s=30) as decoder:
        with pytest.raises(CrashError, match="ends the process that decodes it"):
            decoder.samples(TONE, RATE)
        assert decoder.pids == []


def test_an_answer_that_nobody_read_is_not_the_next_ones(decoder, monkeypatch):
    def without_reading(process, request, data, *_):
        media.write_frame(process.stdin, request, data)
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(media, "_exchange", without_reading)
        decoder.samples(TONE, RATE)
    for _ in range(3):
        assert decoder.image(IMAGES["png"]).size == (24, 18)


def test_a_process_that_does_not_start_is_an_error_of_the_server(monkeypatch):
    standing_in(monkeypatch, "raise SystemExit(3)")
    with MediaDecoder(1) as decoder, pytest.raises(MMDecodeError, match=r"exit code 3") as caught:
        decoder.samples(TONE, RATE)
    assert not isinstance(caught.value, InputError)


# Threads, starts and ends


def test_threads_have_each_its_own_answers(decoder):
    found, before = {}, decoder.counts.decoded

    def ask(thread):
        for number in range(20):
            value = (1 + thread * 20 + number) / 256
            level = thread * 20 + number
            if number % 2:
                samples = decoder.samples(wave(np.full(500 + level, value)), RATE)
                assert len(samples) == 500 + level
                found[level] = set(samples.tolist()) == {value}
            else:
                image = decoder.image(saved(Image.new("RGB", (3 + level, 2), (level, 7, 9))))
                found[level] = set(image.get_flattened_data()) == {(level, 7, 9)}

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(160), True)
    assert decoder.counts.decoded == before + 160
    assert len(decoder.pids) == 2


def test_processes_are_started_when_they_are_needed_and_replaced_in_time(monkeypatch):
    monkeypatch.setattr(media, "USES", 2)
    with MediaDecoder(2) as decoder:
        assert decoder.pids == []
        decoder.samples(TONE, RATE)
        first = decoder.pids
        decoder.samples(TONE, RATE)
        decoder.samples(TONE, RATE)
        assert len(first) == len(decoder.pids) == 1 and first != decoder.pids
        pids = {*first, *decoder.pids}
    assert not any(psutil.pid_exists(pid) for pid in pids)


@posix
def test_closing_ends_what_runs_and_what_waits():
    decoder = MediaDecoder(1)
    decoder.samples(TONE, RATE)
    (pid,) = decoder.pids
    os.kill(pid, signal.SIGSTOP)
    ended = []

    def ask():
        with pytest.raises(MMDecodeError, match="decoder of uploads is closed"):
            decoder.samples(TONE, RATE)
        ended.append(True)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    decoder.close()
    for thread in threads:
        thread.join()
    decoder.close()
    ask()
    assert len(ended) == 4 and not psutil.pid_exists(pid)
    assert decoder.counts == MediaCounts(1, 0, 0)


@posix
def test_signals_of_the_terminal_do_not_reach_a_process_and_its_parents_death_ends_it():
    code = f"""
import time
from mmdecode.serve.media import MediaDecoder
decoder = MediaDecoder(2)
decoder.samples({TONE!r}, {RATE})
print(*decoder.pids, flush=True)
time.sleep(100)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent:
        pid = int(parent.stdout.readline())
        assert os.getsid(pid) == pid
        os.kill(pid, signal.SIGINT)
        time.sleep(0.1)
        assert runs(pid)
        parent.kill()
        begun = time.monotonic()
        while runs(pid):
            assert time.monotonic() - begun < 20
            time.sleep(0.02)


@posix
def test_a_process_without_a_parent_ends_by_itself():
    words = [str(100 * MIB), "1", str(0.3 - media.media_child.GRACE_S)]
    child = subprocess.Popen(
        [*media.child_command(), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=media.child_environment(),
    )
    with child:
        assert media.read_frame(child.stdout)[0] == {"kind": "ready"}
        request = {"kind": "samples", "name": "a", "rate": RATE, "most": 1 << 60}
        media.write_frame(child.stdin, request, wave(np.zeros(1 << 20)))
        assert child.wait(20) == -signal.SIGALRM  # it waits for somebody who reads

"""Uploads that name files and addresses open nothing, even if one of two guards is missing."""

import contextlib
import errno
import io
import socket
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from mmdecode.asr.audio.reading import blocks, encoded
from mmdecode.errors import CrashError, InputError, MMDecodeError
from mmdecode.serve import media_child
from mmdecode.serve.media import MediaDecoder
from tests.serve.test_media import RATE, TONE, linux, posix, standing_in, wave

av = pytest.importorskip("av")


class Listener:
    """Sockets of TCP and UDP that note who connects or sends."""

    def __init__(self):
        self.tcp, self.udp = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
        self.tcp.bind(("127.0.0.1", 0))
        self.tcp.listen()
        self.port = self.tcp.getsockname()[1]
        self.udp.bind(("127.0.0.1", 0))
        self.udp_port = self.udp.getsockname()[1]

    def seen(self):
        """What has come, without waiting for more."""
        found = []
        self.tcp.setblocking(False)
        self.udp.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.tcp.accept()[0].close()
                found.append("connection")
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self.udp.recv(100))
        return found

    def close(self):
        self.tcp.close()
        self.udp.close()


@pytest.fixture
def listener():
    found = Listener()
    yield found
    found.close()


@pytest.fixture
def secret(tmp_path, monkeypatch):
    """The working directory has a recording, which no upload may read."""
    monkeypatch.chdir(tmp_path)
    soundfile.write("secret.wav", np.full(4000, 0.25), RATE)
    return tmp_path / "secret.wav"


def box(kind, *parts):
    data = b"".join(parts)
    return struct.pack(">I", 8 + len(data)) + kind + data


def referring(address):
    """A movie whose samples are in another file: its data references are an alias and a URL."""
    path = address.encode() + b"\0" * (len(address) % 2)
    alias = bytes(150) + struct.pack(">hH", 2, len(path)) + path + struct.pack(">hH", -1, 0)
    references = struct.pack(">II", 0, 2) + box(b"alis", bytes(4), alias)
    references += box(b"url ", bytes(4), address.encode() + b"\0")
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as to:
        stream = to.add_stream("pcm_s16le", rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4000), np.int16), layout="mono")
        frame.sample_rate, frame.pts = RATE, 0
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            to.mux(packet)
    data = file.getvalue()
    start = data.rindex(b"dref", 0, data.index(b"stbl")) - 4
    (size,) = struct.unpack_from(">I", data, start)
    longer = box(b"dref", references)
    grown = bytearray(data[:start] + longer + data[start + size :])
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"dinf"):  # the boxes around it
        at = grown.rindex(kind, 0, start + 4) - 4
        (old,) = struct.unpack_from(">I", grown, at)
        struct.pack_into(">I", grown, at, old + len(longer) - size)
    return bytes(grown)


def playlist(address, *tags):
    lines = ["#EXTM3U", "#EXT-X-VERSION:3", "#EXT-X-TARGETDURATION:5", *tags, "#EXTINF:5,", address]
    return "\n".join([*lines, "#EXT-X-ENDLIST", ""]).encode()


def session(port):
    lines = ["v=0", "o=- 0 0 IN IP4 127.0.0.1", "s=a", "c=IN IP4 127.0.0.1", "t=0 0"]
    lines += [f"a=control:rtsp://127.0.0.1:{port}/", "m=audio 0 RTP/AVP 0"]
    return "\r\n".join([*lines, "a=rtpmap:0 PCMU/8000", ""]).encode()


def hostile(listener, secret):
    """Uploads by name."""
    here = f"http://127.0.0.1:{listener.port}/a.ts"
    udp = f"udp://127.0.0.1:{listener.udp_port}"
    names = {
        "http": here,
        "tcp": f"tcp://127.0.0.1:{listener.port}",
        "udp": udp,
        "rtsp": f"rtsp://127.0.0.1:{listener.port}/",
        "hls+http": f"hls+{here}",
        "absolute": str(secret),
        "relative": secret.name,
        "file": f"file:{secret}",
        "subfile": f"subfile,,start,0,end,0,,:{secret}",
        "concat": f"concat:{secret.name}|{secret.name}",
        "passwd": "/etc/passwd",
    }
    made = {"session": session(listener.port)}
    for name, address in names.items():
        made[f"m3u8 of {name}"] = playlist(address)
        made[f"m3u8 with key of {name}"] = playlist(
            "a.ts", f'#EXT-X-KEY:METHOD=AES-128,URI="{address}"'
        )
        made[f"list of {name}"] = f"ffconcat version 1.0\nfile '{address}'\n".encode()
        made[f"movie of {name}"] = referring(address)
        made[f"drawing of {name}"] = f'<svg><image href="{address}"/></svg>'.encode()
        made[f"redirection to {name}"] = f"[Reference]\r\nRef1={address}\r\n".encode()
        made[f"manifest of {name}"] = (
            '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period>'
            '<AdaptationSet mimeType="audio/mp4"><Representation id="1" bandwidth="1"><BaseURL>'
            f"{address}</BaseURL></Representation></AdaptationSet></Period></MPD>"
        ).encode()
    return made


def opened(decoder, uploads):
    """Names of uploads that are not refused, or whose process was ended."""
    found = []
    for name, data in uploads.items():
        for read in (lambda data: decoder.samples(data, RATE), decoder.image):
            try:
                content = read(data)
            except CrashError:
                found.append(f"{name} hangs")
            except InputError:
                continue
            else:
                # a movie whose reference is ignored has samples of its own
                if not isinstance(content, np.ndarray) or content.any():
                    found.append(name)
    return found


def test_the_movie_holds_the_reference_where_ffmpeg_reads_it(secret):
    read = {}
    for name in ("secret.wav", "missing.wav"):
        options = {"enable_drefs": "1", "use_absolute_path": "1"}
        Path("movie.mov").write_bytes(referring(str(secret.with_name(name))))
        with av.open("movie.mov", options=options) as container:
            read[name] = any(frame.to_ndarray().any() for frame in container.decode(audio=0))
    assert read == {"secret.wav": True, "missing.wav": False}


def test_uploads_open_no_file_and_no_address(listener, secret):
    with MediaDecoder(1, time_limit_s=20) as decoder:
        uploads = hostile(listener, secret)
        assert len(uploads) > 70
        assert opened(decoder, uploads) == []
        assert listener.seen() == []
        assert decoder.counts.killed == 0
        assert len(decoder.samples(TONE, RATE)) == 4000


MUTANT = """
import sys
import av
from mmdecode.serve import media_child
real = av.open
if "list" in {without!r}:
    av.open = lambda file, options=None: real(file)
if "limit" in {without!r}:
    media_child.limit_files = lambda last: None
media_child.main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
"""


@posix
@pytest.mark.parametrize(
    ("without", "expected"),
    [
        (["list"], []),
        (["limit"], []),
        (["list", "limit"], ["session hangs", "list of relative"]),
    ],
    ids=["no list of protocols", "no limit of files", "neither"],
)
def test_either_guard_is_enough_and_one_is_needed(listener, secret, monkeypatch, without, expected):
    standing_in(monkeypatch, MUTANT.format(without=without))
    with MediaDecoder(1, time_limit_s=0.6) as decoder:
        uploads = hostile(listener, secret)
        tried = {name: uploads[name] for name in ("session", "list of relative", "list of http")}
        assert opened(decoder, tried) == expected


def test_bytes_that_list_files_open_none_in_this_process_either(listener, secret):
    for name, data in hostile(listener, secret).items():
        found = [np.zeros(1)]
        with contextlib.suppress(InputError):
            found += blocks(encoded(data, name), RATE)
        assert not np.concatenate(found).any(), name
    assert listener.seen() == []


@linux
def test_a_process_has_no_descriptor_left_and_no_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("LANG", "C.UTF-8")
    with MediaDecoder(1) as decoder:
        decoder.samples(TONE, RATE)
        process = Path(f"/proc/{decoder.pids[0]}")
        limits = (process / "limits").read_text()
        held = sorted(int(one.name) for one in (process / "fd").iterdir())
        environment = (process / "environ").read_bytes()
        mapped = (process / "maps").read_text()
    for limit, most in (("Max open files", len(held)), ("Max file size", 0), ("Max core", 0)):
        words = limits.partition(limit)[2].splitlines()[0].split()
        assert [int(word) for word in words if word.isdigit()] == [most, most]
    assert held == list(range(len(held))), "a gap is free for a file"
    assert b"hf_secret" not in environment and b"LANG=C.UTF-8" in environment
    assert "libtorch" not in mapped


@linux
def test_gaps_among_descriptors_are_filled():
    code = """
import os
from mmdecode.serve.media_child import limit_files
last = os.dup2(0, 9)
limit_files(last)
for number in range(10):
    os.fstat(number)
for opens in (lambda: open("/dev/null"), os.pipe, lambda: __import__("socket").socket()):
    try:
        opens()
    except OSError as error:
        print(error.errno)
"""
    done = subprocess.run(
        [sys.executable, "-c", "import socket\n" + code], capture_output=True, text=True
    )
    assert done.stdout.split() == [str(errno.EMFILE)] * 3, done.stderr


# Machines that lack something


def without(module):
    """Code of a child on a machine that lacks a module."""
    return f"""
import sys
sys.modules[{module!r}] = None
from mmdecode.serve.media_child import main
main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
"""


@pytest.mark.slow
def test_without_limits_of_posix_uploads_are_decoded_too(monkeypatch):
    standing_in(monkeypatch, without("resource"))
    with MediaDecoder(1) as decoder:
        assert len(decoder.samples(TONE, RATE)) == 4000


def test_without_pyav_what_it_alone_reads_is_refused(monkeypatch):
    standing_in(monkeypatch, without("av"))
    with MediaDecoder(1) as decoder:
        for data in (b"#!AMR\n" + b"\x3c" + bytes(31), b"text"):
            with pytest.raises(InputError, match=r"^audio: cannot be decoded by the libraries"):
                decoder.samples(data, RATE)
        assert len(decoder.samples(wave(np.zeros(99)), RATE)) == 99


@pytest.mark.parametrize(
    ("module", "extra"), [("soundfile", "asr"), pytest.param("PIL", "vlm", marks=pytest.mark.slow)]
)
def test_a_library_that_is_missing_is_an_error_of_the_server(monkeypatch, module, extra):
    standing_in(monkeypatch, without(module))
    with MediaDecoder(1) as decoder:
        with pytest.raises(MMDecodeError, match=rf"needs .*mmdecode\[{extra}\]") as caught:
            decoder.image(b"") if extra == "vlm" else decoder.samples(TONE, RATE)
        assert not isinstance(caught.value, InputError)
        assert decoder.counts == (0, 0, 0)


def test_messages_name_no_path_of_this_machine():
    path = "/srv/secret/module.py"
    causes = [
        OSError(24, "Too many open files", path),
        ImportError(f"cannot import name 'a' from 'b' ({path})"),
    ]
    for cause in causes:
        error = InputError(f"a: is truncated or damaged ({cause}); copy it again")
        error.__cause__ = cause
        frame = media_child.error_frame(error, "a")
        assert frame["kind"] == media_child.REFUSED
        assert frame["message"].startswith("a: cannot be decoded") and path not in str(frame)
    assert path not in str(media_child.error_frame(RuntimeError(path), "a"))

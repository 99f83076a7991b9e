"""The page in a browser: microphone, files, keys, errors, and the end of the server."""

import contextlib
import difflib
import re

import httpx
import numpy as np
import pytest
import soundfile
import soxr

from mmdecode.serve.limits import Limits
from mmdecode.zoo.speech import speech_test
from tests.serve.browser import PROGRAM, Browser
from tests.serve.running import SPEECH, running, transcriber

CLIP = speech_test()[7]
KEY = "a-key-of-the-test"
READABLE = 4.5
"""Least contrast of text, of WCAG 2.1's level AA."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A browser whose microphone records the clip, with a second of silence before and after."""
    folder = tmp_path_factory.mktemp("browser")
    wave = np.pad(CLIP.samples(), 16_000)
    soundfile.write(folder / "clip.wav", soxr.resample(wave, 16_000, 48_000), 48_000)
    found = Browser(
        folder / "profile",
        "--use-fake-ui-for-media-stream",
        "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={folder / 'clip.wav'}%noloop",
        "--host-resolver-rules=MAP page.test 127.0.0.1",
    )
    yield found
    found.close()


@pytest.fixture(scope="module")
def server():
    with running(chat=False) as found:
        yield found


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "damaged.ogg"
    path.write_bytes(CLIP.path.read_bytes()[:40] + bytes(2000))
    return path


def words(text):
    return re.findall(r"\w+", text.lower())


def share(text, expected):
    """Share of the expected words that a text has in their order."""
    blocks = difflib.SequenceMatcher(None, words(text), words(expected), False)
    return sum(block.size for block in blocks.get_matching_blocks()) / len(words(expected))


def hear(page, seconds):
    """Waits until the server has transcribed some seconds."""
    page.wait(f"parseFloat(document.getElementById('delay').textContent) >= {seconds}")


def follow(page):
    """Collects what the line of the state says in ``states``."""
    page.value(
        "window.states = []; new MutationObserver(() => states.push("
        "document.getElementById('status').textContent)).observe("
        "document.getElementById('status'), {childList: true})"
    )


def test_the_page_loads_without_errors_and_shows_the_models(browser, server):
    with browser.page(server.url) as page:
        page.wait("document.getElementById('model').textContent")
        assert page.text("model") == f"{SPEECH}, whisper-1"
        assert page.text("status") == ""
        assert page.value("document.getElementById('insecure').hidden")
        assert page.value("document.getElementById('copy').disabled")
        assert page.problems() == []


def test_the_microphone_is_transcribed_until_it_is_stopped(browser, server):
    with browser.page(server.url) as page:
        follow(page)
        page.click("record")
        page.wait_for_status("Listening")
        assert page.text("record") == "Stop microphone"
        assert page.value("document.getElementById('file').disabled")
        page.wait("document.getElementById('provisional').textContent")
        hear(page, CLIP.duration_s + 2)
        page.click("record")
        page.wait_for_status("Done.")
        page.wait("document.body.dataset.state == 'idle'")
        assert share(page.text("committed"), CLIP.text) >= 0.5
        assert (page.text("provisional"), page.text("record")) == ("", "Start microphone")
        assert page.value("states")[-2:] == ["The last words follow.", "Done."]
        assert page.problems() == []
        page.click("copy")
        page.wait("document.getElementById('copy').textContent == 'Copied'")
        page.click("clear")
        assert page.text("committed") == page.text("status") == ""
    assert server.is_idle()


def test_the_keyboard_starts_and_stops_the_microphone(browser, server):
    with browser.page(server.url) as page:
        page.press("Tab")
        page.press("Enter")
        page.wait_for_status("Listening")
        assert page.value("document.activeElement.id") == "record"
        page.press(" ")
        page.wait_for_status("Done.")
        assert page.value("document.activeElement.id") == "record"
        page.press("Tab")
        assert page.value("document.activeElement.id") == "file"


def test_a_microphone_that_is_refused_is_named_and_can_be_tried_again(browser, server):
    with browser.page(server.url) as page:
        page.value(
            "window.real = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);"
            "navigator.mediaDevices.getUserMedia = () =>"
            " Promise.reject(new DOMException('', 'NotAllowedError'))"
        )
        page.click("record")
        page.wait_for_status("does not let this page use the microphone")
        page.value("navigator.mediaDevices.getUserMedia = real; 0")
        page.click("record")
        page.click("record")  # while it opens: nothing
        page.wait_for_status("Listening")
        page.click("record")
        page.wait_for_status("Done.")
    assert server.is_idle()


def test_a_file_has_the_text_of_the_transcriber(browser, server):
    with browser.page(server.url) as page:
        page.choose("file", CLIP.path)
        page.wait_for_status("Done: 6.9 s of audio.")
        assert page.text("committed") == transcriber()(str(CLIP.path)).text
        assert page.problems() == []


def test_a_file_can_be_cancelled(browser, server):
    (long,) = speech_test(long=True)
    with browser.page(server.url) as page:
        page.choose("file", long.path)
        page.wait("document.getElementById('committed').textContent")
        page.click("cancel")
        page.wait_for_status("Cancelled.")
        assert page.value("document.getElementById('cancel').hidden")
        assert not page.value("document.getElementById('file').disabled")
    assert server.is_idle(60)


def test_a_damaged_file_is_answered_with_the_words_of_the_server(browser, server, damaged):
    answer = httpx.post(
        f"{server.url}/v1/audio/transcriptions",
        files={"file": damaged.read_bytes()},
        data={"model": SPEECH},
    )
    assert answer.status_code == 400
    with browser.page(server.url) as page:
        page.choose("file", damaged)
        page.wait("document.getElementById('status').className == 'error'")
        assert page.text("status") == answer.json()["error"]["message"]
        page.choose("file", CLIP.path)  # and the page goes on
        page.wait_for_status("Done")


def test_a_file_that_is_too_large_is_named_as_such(browser, tmp_path):
    large = tmp_path / "large.wav"
    large.write_bytes(bytes(8 << 20))
    with (
        running(Limits(upload_bytes=1 << 20), chat=False) as server,
        browser.page(server.url) as page,
    ):
        page.choose("file", large)
        page.wait("document.getElementById('status').className == 'error'")
        assert "larger than 1 MiB" in page.text("status")


def test_a_key_is_asked_for_and_used(browser):
    with running(key=KEY, chat=False) as server, browser.page(server.url) as page:
        page.wait_for_status("This server needs a key")
        assert page.value("document.getElementById('settings').open")
        assert page.value("document.activeElement.id") == "key"
        page.click("record")
        page.wait_for_status("This server needs a key")
        page.type("key", "another")
        page.wait_for_status("The server refuses this key.")
        page.value("document.getElementById('key').value = ''")
        page.type("key", KEY)
        page.wait("document.getElementById('model').textContent")
        assert page.text("status") == ""
        page.choose("file", CLIP.path)
        page.wait_for_status("Done")
        assert page.text("committed") == transcriber()(str(CLIP.path)).text
        page.click("record")
        page.wait_for_status("Listening")
        page.click("record")
        page.wait_for_status("Done.")
        refused = [one for one in page.problems() if "401" not in one["text"]]
        assert refused == []


def test_a_server_that_ends_hands_over_the_last_words(browser):
    with running(chat=False) as server, browser.page(server.url) as page:
        follow(page)
        page.click("record")
        hear(page, 6)
        page.wait("document.getElementById('provisional').textContent")
        before = page.text("committed")
        server.stop()
        page.wait_for_status("The server has ended")
        assert "The server ends; the last words follow." in page.value("states")
        after = page.text("committed")
        assert after.startswith(before) and len(after) > len(before)
        assert share(after, CLIP.text.partition(".")[0]) >= 0.5
        assert page.text("provisional") == ""
        page.wait("document.body.dataset.state == 'idle'")


def test_a_server_that_has_gone_is_named(browser):
    with contextlib.ExitStack() as stack:
        with running(chat=False) as server:
            page = stack.enter_context(browser.page(server.url))
        page.choose("file", CLIP.path)
        page.wait_for_status("The connection to the server failed")
        page.click("record")
        page.wait("document.body.dataset.state == 'idle'")
        page.wait_for_status("The connection to the server failed")


def test_a_page_without_microphone_says_why(browser, server):
    with browser.page(server.url.replace("127.0.0.1", "page.test")) as page:
        assert page.value("navigator.mediaDevices === undefined")
        assert page.value("document.getElementById('record').disabled")
        assert "https, or from localhost" in page.value("document.body.innerText")
        page.choose("file", CLIP.path)
        page.wait_for_status("Done")
        page.click("copy")
        page.wait("document.getElementById('copy').textContent == 'Copied'")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_fits_a_phone_and_can_be_read(browser, server, damaged, dark):
    with browser.page(server.url, width=360, dark=dark) as page:
        wide = "document.documentElement.scrollWidth > 360"
        assert not page.value(wide)
        page.value("document.getElementById('settings').open = true")
        assert not page.value(wide)
        page.value("put('word '.repeat(40) + 'x'.repeat(200), ' and more')")
        page.value("say('x'.repeat(200))")
        assert not page.value(wide)
        page.choose("file", damaged)
        page.wait("document.getElementById('status').className == 'error'")
        assert not page.value(wide)
        paper = color(page, "copy", "backgroundColor")
        assert (luminance(paper) < 0.1) == dark
        for name in ("model", "status", "committed", "provisional"):
            assert contrast(color(page, name), paper) >= READABLE, name
        for state in ("idle", "listens", "ends"):
            page.value(f"turn('{state}')")
            button = color(page, "record", "backgroundColor")
            assert contrast(color(page, "record"), button) >= READABLE, state


def color(page, name, kind="color"):
    """Red, green and blue of an element."""
    found = page.value(f"getComputedStyle(document.getElementById('{name}')).{kind}")
    return [int(value) for value in re.findall(r"\d+", found)[:3]]


def luminance(found):
    parts = [value / 255 for value in found]
    parts = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one, other):
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)

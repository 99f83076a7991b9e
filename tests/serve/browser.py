"""A Chromium without a window, which a test drives through the DevTools protocol."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
from websockets.sync.client import connect

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = """
--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --mute-audio
--disable-background-networking --disable-component-update --disable-sync --disable-extensions
--disable-dev-shm-usage --remote-debugging-port=0
""".split()
_KEYS = {"Tab": 9, "Enter": 13, " ": 32}


class Browser:
    """A browser with a profile of its own.

    Args:
        folder: Empty folder for its profile.
        *flags: Further flags.
    """

    def __init__(self, folder, *flags):
        home = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
        self._process = subprocess.Popen(
            [PROGRAM, *_FLAGS, f"--user-data-dir={folder}", *flags, "about:blank"],
            env={**os.environ, **home},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        file = Path(folder) / "DevToolsActivePort"
        try:
            until(lambda: file.exists() and "\n" in file.read_text(), 60)
        except BaseException:
            self.close()
            raise
        self._url = f"http://127.0.0.1:{file.read_text().splitlines()[0]}"

    def close(self):
        """Ends the browser with all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(20)

    @contextlib.contextmanager
    def page(self, url, width=900, dark=False):
        """Opens a page, and closes it."""
        made = httpx.put(f"{self._url}/json/new?about:blank", trust_env=False).json()
        with connect(made["webSocketDebuggerUrl"], proxy=None, max_size=None) as socket:
            page = Page(socket)
            for domain in ("Page", "Runtime", "Log", "DOM"):
                page.call(f"{domain}.enable")
            page.call(
                "Emulation.setDeviceMetricsOverride",
                width=width, height=720, deviceScaleFactor=1, mobile=width < 600,
            )  # fmt: skip
            page.call("Emulation.setFocusEmulationEnabled", enabled=True)
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            page.call("Emulation.setEmulatedMedia", features=[scheme])
            page.call("Page.navigate", url=url)
            page.wait("location.href != 'about:blank' && document.readyState == 'complete'")
            yield page
        httpx.get(f"{self._url}/json/close/{made['id']}", trust_env=False)


class Page:
    """A page of the browser.

    Args:
        socket: Its connection.
    """

    def __init__(self, socket):
        self._socket, self._number, self._events = socket, 0, []

    def call(self, method, **params):
        """Returns the result of a method of the protocol."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._events.append(message)

    def value(self, expression):
        """Returns the value of an expression of JavaScript."""
        found = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def text(self, name):
        """Returns the text of an element by its id."""
        return self.value(f"document.getElementById('{name}').textContent")

    def wait(self, expression, seconds=60):
        """Waits until an expression is true, and returns its value."""
        return until(lambda: self.value(expression), seconds, lambda: self.value(_ALL))

    def wait_for_status(self, part):
        """Waits until the line of the state has some words."""
        self.wait(f"document.getElementById('status').textContent.includes({json.dumps(part)})")

    def click(self, name):
        """Clicks on the middle of an element, as a mouse does."""
        box = self.value(
            f"(() => {{ const box = document.getElementById('{name}').getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind, x=box[0], y=box[1], button="left", clickCount=1,
            )  # fmt: skip

    def press(self, key):
        """Presses a key."""
        params = {"key": key, "windowsVirtualKeyCode": _KEYS[key], "code": key.strip() or "Space"}
        if key != "Tab":
            params["text"] = {"Enter": "\r"}.get(key, key)
        self.call("Input.dispatchKeyEvent", type="keyDown", **params)
        self.call("Input.dispatchKeyEvent", type="keyUp", **params)

    def type(self, name, text):
        """Types a text into an element, and leaves it."""
        self.value(f"document.getElementById('{name}').focus()")
        self.call("Input.insertText", text=text)
        self.value(f"document.getElementById('{name}').blur()")

    def choose(self, name, path):
        """Chooses a file in an element."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=f"#{name}")["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(path)], nodeId=node)

    def problems(self):
        """Returns errors of scripts, of the policy and of what was loaded."""
        self.value("0")  # after which all events until now are there
        found = []
        for event in self._events:
            method, params = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"])
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(params["args"])
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"])
        return found


_ALL = "document.body.innerText"


def until(found, seconds, shown=lambda: ""):
    """Returns what a function finds, as soon as that is true."""
    end = time.monotonic() + seconds
    while True:
        value = found()
        if value:
            return value
        assert time.monotonic() < end, shown()
        time.sleep(0.05)

"""A page in headless Chromium, controlled through the DevTools protocol."""

import json
import os
import signal
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import requests
from websockets.sync.client import ClientConnection, connect

from tests.support.untested import find

CHROMIUM = find("chromium")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
START_S = 60.0  # timeout of the browser's start in seconds
WAIT_S = 30.0  # timeout of a command and of `wait_for` in seconds
CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "Home": 36, "ArrowLeft": 37}


class Page:
    """A page of a browser, and the errors in its console."""

    def __init__(self, connection: ClientConnection) -> None:
        self.errors: list[str] = []  # exceptions, console errors, and failed downloads
        self._connection = connection
        self._calls = 0
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Send a command of the protocol, and return its result."""
        self._calls += 1
        self._connection.send(json.dumps({"id": self._calls, "method": method, "params": params}))
        while True:
            message = json.loads(self._connection.recv(timeout=WAIT_S))
            if message.get("id") == self._calls:
                assert "error" not in message, message
                return message["result"]
            self._record_error(message)

    def open(self, url: str, *, width: int, height: int = 900) -> None:
        self.resize(width, height)
        self.call("Page.navigate", url=url)

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window this size, in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key that is named as in JavaScript's events."""
        text = {"text": "\r"} if key == "Enter" else {}
        codes = {"windowsVirtualKeyCode": CODES[key], "key": key, "code": key}
        self.call("Input.dispatchKeyEvent", type="keyDown", **codes, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **codes)

    def colours(self, scheme: str) -> None:
        """Let the browser prefer this scheme of colours, light or dark."""
        preferred = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[preferred])

    def picture(self, *, height: int) -> bytes:
        """Return a PNG of the page's upper part, as wide as the window."""
        self.call("Emulation.setScrollbarsHidden", hidden=True)
        width = self.evaluate("window.innerWidth")
        part = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        screenshot = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=part
        )
        return b64decode(screenshot["data"])

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true. Fails after WAIT_S."""
        deadline = time.monotonic() + WAIT_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"never true: {expression}\n{self.errors}"
            time.sleep(0.1)

    def _record_error(self, message: dict[str, Any]) -> None:
        method, params = message["method"], message["params"]
        is_error = method == "Runtime.exceptionThrown" or "error" in (
            params.get("type"),
            params.get("entry", {}).get("level"),
        )
        if is_error:
            self.errors.append(json.dumps(params))


@contextmanager
def page() -> Iterator[Page]:
    """Open an empty page in a new browser, which ends with the context."""
    assert CHROMIUM is not None
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [
                *(CHROMIUM, *OPTIONS, "--remote-debugging-port=0"),
                *(f"--user-data-dir={folder}", "about:blank"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            with connect(_tab(Path(folder)), max_size=None, proxy=None) as connection:
                yield Page(connection)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tab(folder: Path) -> str:
    """Return the WebSocket address of the browser's first page."""
    file, deadline = folder / "DevToolsActivePort", time.monotonic() + START_S
    while not (file.exists() and file.read_text().count("\n")):
        assert time.monotonic() < deadline, "chromium does not start"
        time.sleep(0.05)
    port = file.read_text().splitlines()[0]
    while True:
        tabs = requests.get(f"http://127.0.0.1:{port}/json", timeout=10).json()
        for tab in tabs:
            if tab["type"] == "page":
                return str(tab["webSocketDebuggerUrl"])
        assert time.monotonic() < deadline, f"chromium opens no page: {tabs}"
        time.sleep(0.05)

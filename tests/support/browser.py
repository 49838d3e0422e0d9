"""Opens pages in headless Chromium, over the pipe of its DevTools protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from time import monotonic
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions",
    "--autoplay-policy=no-user-gesture-required", "--remote-debugging-pipe",
)  # fmt: skip
MESSAGES = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
SECONDS = 30.0  # to wait for an answer
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")


class Browser:
    """One tab.

    Attributes:
        messages: what pages have written to the console, errors and violations of the page's policy included.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser, self._from_browser = to_browser, from_browser
        self._received, self._id, self._session = b"", 0, ""
        self._events: list[str] = []
        self.messages: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def open(self, page: Path, width: int, scheme: str) -> None:
        """Opens a page in a window of `width` pixels, under the colour scheme light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._events.clear()
        self.call("Page.navigate", url=page.absolute().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression, that of a promise when it is settled."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._id:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        deadline = monotonic() + SECONDS
        while b"\0" not in self._received:
            assert select([self._from_browser], [], [], max(0.0, deadline - monotonic()))[0], "no answer"
            received = os.read(self._from_browser, 1 << 16)
            assert received, "the browser has ended"
            self._received += received
        line, _, self._received = self._received.partition(b"\0")
        message = json.loads(line)
        self._events.append(message.get("method", ""))
        if message.get("method") in MESSAGES:
            self.messages.append(json.dumps(message["params"]))
        return message


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Starts Chromium with a new profile in the folder `profile`, and ends it."""
    assert CHROMIUM is not None
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    shell = f'exec "$@" 3<&{commands} 4>&{answers}'  # the protocol is on 3 and 4
    words = ["bash", "-c", shell, "bash", CHROMIUM, *OPTIONS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(words, pass_fds=(commands, answers), stderr=subprocess.DEVNULL)
    os.close(commands)
    os.close(answers)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        os.close(to_browser)  # ends it
        os.close(from_browser)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

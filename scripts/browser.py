"""A headless browser of this machine: opens a page in a window of any size, light or dark, runs scripts in
it, and takes its picture.

In: chromium and its driver from the system's packages (or their paths in BROWSER and BROWSER_DRIVER). Out: a
`Browser` over the W3C's WebDriver protocol, which is JSON over HTTP on the loopback. Every call has a limit.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

INSTALL = "apt-get install chromium chromium-driver"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
)
_LIMIT_SECONDS = 60.0


class BrowserError(Exception):
    """There is no browser, or it did not do what it was asked for."""


class Browser:
    """A session of one window. Leave the `with` to end the processes."""

    def __enter__(self) -> Browser:
        browser, driver = _found("BROWSER", _BROWSERS), _found("BROWSER_DRIVER", ("chromedriver",))
        self._directory = tempfile.TemporaryDirectory(prefix="rannc-browser-")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._base = f"http://127.0.0.1:{port}"
        self._driver = subprocess.Popen(
            [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._await_driver()
            arguments = [f"--user-data-dir={self._directory.name}", *_ARGUMENTS]
            options = {"binary": browser, "args": arguments}
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._base += f"/session/{session['sessionId']}"
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._call("DELETE", "", None)
        except BrowserError:
            pass
        self._end()

    def open(
        self, page: Path, *, width: int, height: int = 900, dark: bool = False, phone: bool = False
    ) -> None:
        """Show a file. `width`, `height`: of the window in CSS pixels, of which a phone has three dots each
        way.
        """
        size = {"width": width, "height": height, "deviceScaleFactor": 3 if phone else 1, "mobile": phone}
        self._tool("Emulation.setDeviceMetricsOverride", size)
        self._tool("Emulation.setTouchEmulationEnabled", {"enabled": phone})
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._tool("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._call("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a function gives, called in the page; it finds its arguments in `arguments`."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, *keys: str) -> None:
        """Press keys one after the other, as WebDriver numbers them ("\\ue004" is Tab)."""
        strokes = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": strokes}]})

    def point(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window."""
        move = {"type": "pointerMove", "duration": 0, "origin": "viewport", "x": round(x), "y": round(y)}
        self._call("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def messages(self) -> list[str]:
        """Errors and warnings of the page since the last call: what a developer would see in the console."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def picture(self, *, width: int, height: int, scale: float = 1.0) -> bytes:
        """The left upper part of the page as PNG, `scale` dots to a CSS pixel."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": scale}
        answer = self._tool(
            "Page.captureScreenshot", {"format": "png", "clip": clip, "captureBeyondViewport": True}
        )
        return base64.b64decode(answer["data"])

    def page_height(self) -> int:
        """CSS pixels."""
        return int(self.run("return document.documentElement.scrollHeight"))

    def _tool(self, command: str, values: dict[str, Any]) -> Any:
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": values})

    def _await_driver(self) -> None:
        end = time.monotonic() + _LIMIT_SECONDS
        while True:
            try:
                self._call("GET", "/status", None)
                return
            except BrowserError:
                if self._driver.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._base + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=_LIMIT_SECONDS) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise BrowserError(error.read().decode(errors="replace")[:2000]) from None
        except (OSError, ValueError) as error:
            raise BrowserError(f"{method} {path}: {error}") from None

    def _end(self) -> None:
        self._driver.terminate()
        try:
            self._driver.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._driver.kill()
            self._driver.wait()
        self._directory.cleanup()


def _found(variable: str, names: tuple[str, ...]) -> str:
    path = os.environ.get(variable) or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise BrowserError(
            f"there is no {names[0]} on this machine. What to change: {INSTALL} (or give its path in "
            f"{variable})."
        )
    return path

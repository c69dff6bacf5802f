"""A real browser for the screenshot and the tests of the page: Chromium, driven over its debugging pipe.

Owns the process and one tab of it. Needs nothing but a Chromium on PATH: commands and events are JSON texts,
each ended by a zero byte, which the browser reads from descriptor 3 and writes to descriptor 4. What the page
complained of (exceptions, console errors, what its policy blocked, failed loads) is kept in `complaints`.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = f"no browser found ({', '.join(NAMES)}); install one, on Debian with: apt-get install chromium"
PATIENCE_S = 30.0
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
          "--no-first-run", "--no-proxy-server", "--remote-debugging-pipe")  # fmt: skip
_ONTO_THE_PIPE = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1'


class BrowserError(RuntimeError):
    """The browser said no, or nothing in time."""


def find_browser() -> str | None:
    """The path of a Chromium; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._unread = b""
        self._count = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        """One command; its result. Events that come meanwhile are looked through for complaints."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        end = time.monotonic() + PATIENCE_S
        while True:
            answer = self._read(end)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._notice(answer)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page. Raises `BrowserError` if it throws."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(_said(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def open(self, url: str) -> None:
        """Go there and wait until everything the page names is loaded."""
        failed = self.send("Page.navigate", url=url).get("errorText")
        if failed:
            raise BrowserError(f"{url}: {failed}")
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def until(self, script: str, within_s: float = PATIENCE_S) -> None:
        """Wait until an expression holds."""
        end = time.monotonic() + within_s
        while not self.evaluate(f"Boolean({script})"):
            if time.monotonic() > end:
                raise BrowserError(f"waited {within_s:.0f} s in vain until {script}")
            time.sleep(0.05)

    def type(self, selector: str, text: str) -> None:
        """Type into a field, as a keyboard does."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.send("Input.insertText", text=text)

    def press_enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self.send("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self.send("Input.dispatchKeyEvent", type="keyUp", **key)

    def resize(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self) -> bytes:
        """What is in the window, as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def _read(self, end: float) -> Any:
        assert self._process.stdout is not None
        number = self._process.stdout.fileno()
        while b"\0" not in self._unread:
            readable, _, _ = select.select([number], [], [], max(0.0, end - time.monotonic()))
            part = os.read(number, 65536) if readable else b""
            if not part:
                raise BrowserError("the browser has ended" if readable else "the browser does not answer")
            self._unread += part
        raw, _, self._unread = self._unread.partition(b"\0")
        return json.loads(raw)

    def _notice(self, event: Any) -> None:
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(_said(params["exceptionDetails"]))
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(one.get("value", one.get("description"))) for one in params["args"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}".strip())


def _said(details: Any) -> str:
    return str(details.get("exception", {}).get("description") or details["text"])


@contextmanager
def browser() -> Iterator[Tab]:
    """A browser with one empty tab, gone afterwards. Raises `BrowserError` where there is none."""
    found = find_browser()
    if found is None:
        raise BrowserError(MISSING)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = ["/bin/sh", "-c", _ONTO_THE_PIPE, found, *_FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            tab = Tab(process)
            yield tab
            tab._session = None
            tab.send("Browser.close")
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()

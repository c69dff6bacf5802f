"""Write `docs/images/page.png`: the page of `octavo serve` in a real browser, in the middle of an answer.

Owns the conversation in the picture. `make screenshot` runs it. It needs a Chromium; the model is the
default one, and answers are greedy.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.browser import MISSING, browser, find_browser  # noqa: E402 - found through the line above

PICTURE = ROOT / "docs" / "images" / "page.png"
WIDTH, HEIGHT = 1100, 900
STARTS_S, ANSWERS_S = 180.0, 120.0
ANSWERED, ASKED = "What is the capital of France?", "Write a short story about a bookbinder."


@contextmanager
def served() -> Iterator[str]:
    """The default model behind `octavo serve`; its address."""
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "octavo.cli.main", "serve", "--port", "0"]
        child = subprocess.Popen(command, stderr=log, text=True)
        try:
            end = time.monotonic() + STARTS_S
            while True:
                log.seek(0)
                said = log.read()
                if found := re.search(r"^ready: (\S+) serves", said, flags=re.MULTILINE):
                    break
                if child.poll() is not None or time.monotonic() > end:
                    sys.exit(f"octavo serve did not start:\n{said}")
                time.sleep(0.2)
            yield found[1]
        finally:
            child.terminate()
            child.wait()


def main() -> None:
    if find_browser() is None:
        sys.exit(MISSING)
    with served() as url, browser() as tab:
        tab.resize(WIDTH, HEIGHT)
        tab.open(f"{url}/")
        tab.evaluate("document.getElementById('temperature').value = '0'")
        tab.type("#text", ANSWERED)
        tab.press_enter()
        tab.until("document.querySelector('.cost')", ANSWERS_S)
        tab.type("#text", ASKED)
        tab.press_enter()
        # While it answers: the counters, which are read once a second, and a part of the answer.
        tab.until("document.querySelector('#running').textContent === '1'", ANSWERS_S)
        tab.until("document.querySelectorAll('.assistant')[1].textContent.length > 400", ANSWERS_S)
        tab.evaluate("window.scrollTo(0, 0)")
        picture = tab.screenshot()
    if tab.complaints:
        sys.exit("the page complained:\n" + "\n".join(tab.complaints))
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_bytes(picture)
    print(f"{PICTURE.relative_to(ROOT)}: {len(picture):,} bytes")


if __name__ == "__main__":
    main()

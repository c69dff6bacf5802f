"""A program on a pseudo-terminal, driven as a person would: type, wait for what appears, press Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence

PATIENCE_S = 60.0
CTRL_C, CTRL_D = "\x03", "\x04"
_TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Ctrl-C reaches a program only from its controlling terminal, and is lost where a shell has put the tests in the
background and had them ignore it."""
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """`command` with a terminal of its own as stdin, stdout and stderr. Close it."""

    def __init__(self, command: Sequence[str], env: dict[str, str], *, columns: int = 160) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))

        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *command],
            stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.text = ""
        """All that appeared, without colours and carriage returns."""
        self.pieces: list[str] = []
        """The same, as it came."""
        self._raw = b""
        self._read = 0

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, wanted: str, patience_s: float = PATIENCE_S) -> str:
        """Wait for a text; returns what appeared since the last wait, up to its end."""
        end = time.monotonic() + patience_s
        while True:
            new = self.text[self._read :]
            if wanted in new:
                found = new[: new.index(wanted) + len(wanted)]
                self._read += len(found)
                return found
            left = end - time.monotonic()
            assert left > 0, f"waited in vain for {wanted!r}; there is {new[-2000:]!r}"
            if not self._receive(left):
                raise AssertionError(f"the program ended before {wanted!r}; there is {new[-2000:]!r}")

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """Read to the end; returns the exit code."""
        while self._receive(patience_s):
            pass
        return self.process.wait(patience_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    def _receive(self, patience_s: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], patience_s)
        if not ready:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux: the other side is closed
            return False
        self._raw += data
        # What may be the beginning of a character or an escape sequence waits for its rest.
        whole = self._raw.decode(errors="ignore")
        cut = re.search(r"\x1b(\[[0-9;?]*)?$", whole)
        whole = whole[: cut.start()] if cut else whole
        self._raw = self._raw[len(whole.encode()) :]
        self.pieces.append(_ESCAPE.sub("", whole).replace("\r", ""))
        self.text += self.pieces[-1]
        return bool(data)

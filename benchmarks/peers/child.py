"""An engine's process, from the comparison's side: start it, ask it, bound it, measure it, end it.

Invariant: nothing an engine does stops the comparison. It may die, hang, print nonsense or refuse; each
becomes a `Broken` with a reason, and its whole group of processes is ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Self

KEEP_LINES = 3
LEAVE_S = 20.0
BEGAN = 19
"""The field of a process's `stat`, counted after its name, that says when it began."""
TICKS = os.sysconf("SC_CLK_TCK")


class Broken(Exception):
    """The engine can answer nothing more; the message is for the table."""


class Child:
    """One process that speaks the protocol. A context: leaving it ends the process and all it started."""

    def __init__(self, command: list[str], log: Path, variables: dict[str, str]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._started = time.monotonic()
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=variables,
                cwd=log.parent, start_new_session=True,
            )  # fmt: skip
        self._left = b""
        self._descendants: dict[int, str] = {}
        """Every one that was ever seen, with the time it began."""
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ignored: object) -> None:
        self.end()

    @property
    def age_s(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._started

    def ask(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Its answer. Raises `Broken` when there is none in time; the process has ended then."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
            line = self._line(time.monotonic() + limit_s, limit_s)
            answer = json.loads(line)
        except OSError:
            raise self._broken(self._death()) from None
        except ValueError as error:
            raise self._broken(f"answered with something else: {error}") from None
        if not isinstance(answer, dict):
            raise self._broken(f"answered with {answer!r}")
        self.peak_bytes = max(self.peak_bytes, self._peak())
        return answer

    def cpu_seconds(self) -> float:
        """Of all its processes that live, so far."""
        return sum(_cpu_seconds(pid) for pid in self._pids())

    def end(self) -> None:
        """Ask it to leave, then make it; nothing of its group stays."""
        self._pids()  # while they still have their parent
        stdin, stdout = self._process.stdin, self._process.stdout
        with contextlib.suppress(OSError):
            if stdin is not None:
                stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_S)
        self._kill()
        if stdout is not None:
            stdout.close()

    def _line(self, deadline: float, limit_s: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._left:
                if not ready.select(max(0.0, deadline - time.monotonic())):
                    raise self._broken(f"no answer within {limit_s:.0f} s")
                piece = os.read(stdout.fileno(), 1 << 20)
                if not piece:
                    raise self._broken(self._death())
                self._left += piece
        line, _, self._left = self._left.partition(b"\n")
        return line

    def _broken(self, reason: str) -> Broken:
        self._kill()
        return Broken(reason)

    def _death(self) -> str:
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "closed its answers"
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return f"{how}: {' / '.join(lines[-KEEP_LINES:])[-300:]}" if lines else how

    def _kill(self) -> None:
        """The group at once, and whatever had moved to another group and was seen to descend from it."""
        self._pids()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid, began in self._descendants.items():
            # a number may have been given to another process meanwhile: one that began at another time
            if _stat(Path("/proc") / str(pid))[BEGAN : BEGAN + 1] == [began]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def _pids(self) -> list[int]:
        """The process and its descendants, whatever groups they have moved to."""
        parents = _parents()
        found = [self._process.pid]
        for pid in found:
            found += [child for child, (parent, _) in parents.items() if parent == pid]
        self._descendants |= {pid: parents[pid][1] for pid in found[1:]}
        return found

    def _peak(self) -> int:
        return sum(_peak_bytes(pid) for pid in self._pids())


def _parents() -> dict[int, tuple[int, str]]:
    """Of every process: its parent, and when it began."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(entry)
        if fields:
            parents[int(entry.name)] = (int(fields[1]), fields[BEGAN])
    return parents


def _stat(folder: Path) -> list[str]:
    """The fields of a process's `stat` that come after its name: state, parent, ..."""
    try:
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_seconds(pid: int) -> float:
    """Its own and those of its children that have ended."""
    fields = _stat(Path("/proc") / str(pid))
    return sum(int(ticks) for ticks in fields[11:15]) / TICKS if fields else 0.0


def _peak_bytes(pid: int) -> int:
    try:
        text = (Path("/proc") / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return 0
    peaks = [line.split()[1] for line in text.splitlines() if line.startswith("VmHWM:")]
    return int(peaks[0]) * 1024 if peaks else 0

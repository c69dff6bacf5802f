"""The thread that an engine lives in, from loading its model to its last step.

torch's OpenMP keeps a team of workers for every thread that ever computed in parallel. A model
that is loaded in one thread and run in another leaves two teams; together they outnumber the
cores, and every barrier of every operation then sleeps instead of spinning (see decision 006).
Owns nothing but the thread: what runs in it is given to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

Result = TypeVar("Result")


class Host:
    """A daemon thread that runs what it is given, one thing after the other."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def call(self, function: Callable[[], Result]) -> Result:
        """Run `function` in the thread and wait for it; what it raises is raised here."""
        return self.begin(function).result()

    def begin(self, function: Callable[[], Result]) -> Future[Result]:
        """Have `function` run in the thread; what comes of it is the future's."""
        answer: Future[Result] = Future()

        def task() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                answer.set_exception(error)

        self._give(task)
        return answer

    def finish(self, function: Callable[[], None]) -> None:
        """Run `function` as the last thing; returns at once. The thread ends with it."""
        self._give(function)
        self._tasks.put(None)

    def join(self, timeout_s: float | None) -> None:
        """Wait for the thread to end. Does nothing from within it, or before it has begun."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _give(self, task: Callable[[], None]) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

"""A server that runs out of file descriptors says so once, goes on, and takes what waited."""

from __future__ import annotations

import asyncio
import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tests.server.serving import Running, served

from octavo.server.descriptors import ENOUGH, tell_seldom

SOURCE = Path(__file__).parents[2] / "src"


def test_thousands_of_tries_for_a_descriptor_are_one_line_and_other_complaints_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []
    loop = asyncio.new_event_loop()
    try:
        tell_seldom(loop, told.append)
        for number in [errno.EMFILE, errno.ENFILE] * 2000:
            loop.call_exception_handler({"message": "accept", "exception": OSError(number, "no more")})
        assert told == [told[0]]
        assert "ulimit -n" in told[0]
        assert not caplog.records
        loop.call_exception_handler({"message": "something else", "exception": OSError(errno.EIO, "broken")})
        loop.call_exception_handler({"message": "without a cause"})
        assert [record.message.splitlines()[0] for record in caplog.records] == ["something else", "without a cause"]
        assert len(told) == 1
    finally:
        loop.close()


def test_a_server_tells_its_log(caplog: pytest.LogCaptureFixture) -> None:
    with served() as server:

        def run_out(running: Running) -> None:
            loop = running.service.llm._loop
            assert loop is not None
            error = OSError(errno.EMFILE, "no more")
            loop.call_soon_threadsafe(loop.call_exception_handler, {"message": "accept", "exception": error})

        run_out(server)
        server.until(lambda: any("no file descriptor is left" in line for line in server.lines), "it is told")
        assert server.get("/health").status_code == 200
    assert not caplog.records


def test_a_process_gets_as_many_as_the_system_grants_it() -> None:
    """In a process of its own: a limit may be lowered by anybody, and raised again up to the hard one."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, {most}))\n"
        "from octavo.server.descriptors import raise_limit; raise_limit(); raise_limit()\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for most in (300, hard):
        command = [sys.executable, "-c", code.format(most=most)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=SOURCE)
        wanted = ENOUGH if most == resource.RLIM_INFINITY else min(ENOUGH, most)
        assert done.stdout.split() == [str(wanted), str(most)]

"""File descriptors: as many as the system grants, and what is said when they run out.

A connection takes one, and so does a file that is open. Where none is left, connections wait until one is given back;
asyncio complains of each try, of thousands a second. Owns asking for more at start, and one line a minute instead.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

ENOUGH = 65_536
TELL_EVERY_S = 60.0
OUT_OF = (errno.EMFILE, errno.ENFILE)


def raise_limit() -> None:
    """Up to what the system lets this process have, where it has fewer than enough."""
    try:
        import resource
    except ImportError:  # where there are no such limits
        return
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if most == resource.RLIM_INFINITY else min(ENOUGH, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def tell_seldom(loop: asyncio.AbstractEventLoop, tell: Callable[[str], Any]) -> None:
    """Let `loop` say at most once a minute that descriptors have run out; all else it says as before."""
    told_s = -TELL_EVERY_S

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal told_s
        cause = context.get("exception")
        if not isinstance(cause, OSError) or cause.errno not in OUT_OF:
            loop.default_exception_handler(context)
        elif time.monotonic() - told_s >= TELL_EVERY_S:
            told_s = time.monotonic()
            tell("no file descriptor is left: new connections wait until others end; allow more (ulimit -n)")

    loop.set_exception_handler(handle)

"""One server around the echoing engine for every test that does not disturb it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.server.serving import Running, served


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with served() as running:
        yield running
        running.until_empty()

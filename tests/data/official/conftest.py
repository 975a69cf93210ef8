from __future__ import annotations

from collections.abc import Iterator

import pytest
from official_archives import Server, loopback


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A loopback server, reached without a proxy."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with loopback() as running:
        yield running

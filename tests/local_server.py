"""Local servers in a thread of the test or started by a command, and requests to them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from crmatch.report.server import LocalServer, Site


@contextmanager
def served(site: Site) -> Iterator[LocalServer]:
    server, stop = LocalServer(site), threading.Event()
    thread = threading.Thread(target=server.run, args=(stop.is_set, 600))
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join()


def ask(address: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, http.client.HTTPMessage]:
    """Status, content (JSON is decoded) and headers; a body that is not bytes is sent as JSON."""
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.netloc, timeout=20)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request("GET" if body is None else "POST", f"{url.path}{path}", content, headers)
    answer = connection.getresponse()
    got = answer.read()
    connection.close()
    return answer.status, json.loads(got) if answer.headers["Content-Type"] == "application/json" else got, answer.headers


def cards_of(page: bytes) -> list[dict[str, Any]]:
    """What a page knows about its pictures."""
    return list(json.loads(page.decode().partition('id="data">')[2].partition("</script>")[0])["images"])


def open_browser_with(monkeypatch: pytest.MonkeyPatch, act: Callable[[str], None]) -> list[Exception]:
    """Let `act(address)` be the browser of a command; returns what went wrong in it."""
    errors: list[Exception] = []

    def browse(address: str) -> None:
        def run() -> None:
            try:
                act(address)
            except Exception as error:  # noqa: BLE001
                errors.append(error)
                os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=run).start()

    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", browse)
    return errors

"""A small web server for one person at this computer: loopback only, a random token in every address."""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Protocol

from crmatch.errors import CRMatchError, RequestError

POLICY = (
    "default-src 'none'; img-src 'self' data: blob: file:; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
)
"""What a page may load: its own pictures, and scripts and styles that carry the nonce."""


class Answer(NamedTuple):
    """The answer to a request; the server ends after the `last` one."""

    content: bytes
    kind: str = "application/json"
    status: int = 200
    last: bool = False


def json_answer(values: Any, status: int = 200, last: bool = False) -> Answer:
    """JSON as an answer."""
    return Answer(json.dumps(values).encode(), status=status, last=last)


class Site(Protocol):
    """What a server shows. Paths are relative to its address; None as an answer: there is no such path."""

    most_bytes: int  # of the body of a request

    def get(self, path: str, nonce: str) -> Answer | None:
        """The page (path ""), whose scripts and styles carry the nonce, or another file."""

    def post(self, path: str, body: bytes) -> Answer | None:
        """The answer to a request with a body."""


class LocalServer(ThreadingHTTPServer):
    """Serves a site at `address`."""

    request_queue_size = 64  # a browser asks for many thumbnails at once
    timeout = 0.2  # of `handle_request`

    def __init__(self, site: Site, port: int = 0) -> None:
        """Listen on `port`; 0: any free one."""
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise RequestError(f"port {port} cannot be used: {error.strerror}.\nUse another --port.") from error
        self.site, self.token, self.nonce = site, secrets.token_urlsafe(16), secrets.token_urlsafe(16)
        self.address = f"http://127.0.0.1:{self.server_port}/{self.token}/"
        self.last_request, self.ended = time.monotonic(), False

    def run(self, stop: Callable[[], bool], idle_seconds: float) -> None:
        """Serve until `stop` returns True, the site gave its last answer, or there was no request for `idle_seconds`."""
        while not (stop() or self.ended or time.monotonic() - self.last_request > idle_seconds):
            self.handle_request()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes a connection is no error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LocalServer
    timeout = 30.0  # seconds without a byte
    server_version, sys_version = "crmatch", ""

    def do_GET(self) -> None:
        self._respond(lambda path: self.server.site.get(path, self.server.nonce))

    def do_POST(self) -> None:
        self._respond(self._post)

    def _post(self, path: str) -> Answer | None:
        length, most = int(self.headers.get("Content-Length") or -1), self.server.site.most_bytes
        if 0 <= length <= most:
            return self.server.site.post(path, self.rfile.read(length))
        while length > 0 and (part := self.rfile.read(min(length, 1 << 20))):  # so that the client reads the answer
            length -= len(part)
        return json_answer({"error": f"more than {most >> 20} MB, or no length given"}, 413)

    def _respond(self, answer_to: Callable[[str], Answer | None]) -> None:
        """Answer, if the request has the token and was sent to this computer by name: a page elsewhere knows neither."""
        token, slash, path = self.path.partition("?")[0][1:].partition("/")
        known = hmac.compare_digest(token.encode(), self.server.token.encode())
        hosts = [f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")]
        if not (known and slash and self.headers.get("Host") in hosts):
            self._send(json_answer({"error": "this address has no valid token: use the one that crmatch printed"}, 403))
            return
        self.server.last_request = time.monotonic()
        try:
            answer = answer_to(path) or json_answer({"error": "not found"}, 404)
        except (CRMatchError, ValueError) as error:
            answer = json_answer({"error": str(error).replace("\n", " ")}, 400)
        self._send(answer)
        self.server.ended |= answer.last

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        headers = {
            "Content-Type": answer.kind,
            "Content-Length": str(len(answer.content)),
            "Content-Security-Policy": f"{POLICY.format(nonce=self.server.nonce)}; frame-ancestors 'none'",
            "Cache-Control": "private, max-age=3600" if answer.kind.startswith("image/") else "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not printed."""

"""Proxy of an S3 server with injected faults."""

from __future__ import annotations

import contextlib
import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

_FORBIDDEN = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
_NOT_FORWARDED = {"host", "connection", "content-length", "transfer-encoding"}


class FaultyS3:
    """Proxy of an S3 server that injects a ``fault``.

    Faults of reads: a ``cut`` connection in the middle of the contents, ``short`` contents, or a
    ``changed`` byte. Faults of all requests: ``hangs``, for at most 30 s, and ``forbidden``.
    """

    def __init__(self, port: int) -> None:
        self.fault = ""
        self.num_requests = 0
        self._server_port = port
        self._released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._answer(self)

            def do_HEAD(self) -> None:
                outer._answer(self)

            def do_PUT(self) -> None:
                outer._answer(self)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        self.num_requests += 1
        if self.fault == "hangs":
            self._released.wait(30.0)
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        if self.fault == "forbidden":
            is_head = request.command == "HEAD"
            self._send(request, 403, [], b"" if is_head else _FORBIDDEN)
            return
        server = http.client.HTTPConnection("127.0.0.1", self._server_port)
        with contextlib.closing(server):
            server.request(request.command, request.path, body, dict(request.headers))
            answer = server.getresponse()
            contents = answer.read()
            size = answer.getheader("Content-Length")
            headers = [one for one in answer.getheaders() if one[0].lower() not in _NOT_FORWARDED]
        if request.command == "HEAD":
            self._send(request, answer.status, headers, b"", size)
            return
        if request.command == "GET" and contents and answer.status < 300:
            middle = len(contents) // 2
            if self.fault == "cut":
                self._send(request, answer.status, headers, contents[:middle], str(len(contents)))
                request.close_connection = True
                return
            if self.fault == "short":
                contents = contents[:middle]
            if self.fault == "changed":
                changed = bytes([contents[middle] ^ 1])
                contents = contents[:middle] + changed + contents[middle + 1 :]
        self._send(request, answer.status, headers, contents)

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler,
        status: int,
        headers: list[tuple[str, str]],
        contents: bytes,
        size: str | None = None,
    ) -> None:
        with contextlib.suppress(OSError):  # who asked may have gone
            request.send_response(status)
            for name, value in headers:
                request.send_header(name, value)
            request.send_header("Content-Length", size or str(len(contents)))
            request.end_headers()
            request.wfile.write(contents)

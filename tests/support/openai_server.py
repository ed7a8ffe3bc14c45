"""Server of OpenAI's completions with scripted text: an engine of kind ``openai``."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PIECE = 4  # characters of an event


class OpenAiServer:
    """``script`` is given the prompt and returns the text. ``asked`` has the bodies of all streams.
    An event follows the one before after ``event_s``; ``num_written`` are the characters of the
    last stream that its client took before it closed the connection. ``paths`` are all that were
    posted to, and a path in ``also`` is answered with that status."""

    def __init__(self) -> None:
        self.script: Callable[[str], str] = lambda _prompt: "Hello."
        self.event_s = 0.0
        self.asked: list[dict[str, Any]] = []
        self.num_written = 0
        self.posted: list[str] = []
        self.also: dict[str, int] = {}
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self._paused = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    @contextmanager
    def running(self) -> Iterator[OpenAiServer]:
        thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._paused.set()
            self._http.shutdown()
            thread.join()
            self._http.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._whole({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                server.posted.append(self.path)
                if self.path in server.also:
                    self._whole({}, server.also[self.path])
                    return
                asked = json.loads(body)
                if not asked.get("stream"):
                    self._whole({"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]})
                    return
                server.asked.append(asked)
                self._stream(server.script(asked["prompt"]))

            def _whole(self, value: Any, status: int = 200) -> None:
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _stream(self, text: str) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                server.num_written = 0
                try:
                    for start in range(0, len(text), _PIECE):
                        self._event(text[start : start + _PIECE], None)
                        server.num_written = start + _PIECE
                        server._paused.wait(server.event_s)
                    self._event("", "stop")
                    self.wfile.write(b"data: [DONE]\n\n")
                except OSError:
                    pass  # the client has left
                self.close_connection = True

            def _event(self, text: str, reason: str | None) -> None:
                choice = {"index": 0, "text": text, "finish_reason": reason}
                self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
                self.wfile.flush()

            def log_message(self, *_arguments: object) -> None:
                pass

        return Handler

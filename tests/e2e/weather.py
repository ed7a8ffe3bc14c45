"""A tool of the gateway's own: an HTTP server beside the system, and its catalogue."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

CITY = "Ghent"
FORECAST = "rain until noon"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": [CITY]}},
    "required": ["city"],
    "additionalProperties": False,
}


class _Weather(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body = json.dumps({"city": asked["city"], "forecast": FORECAST}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def weather_tools() -> Iterator[str]:
    """Serve the tool until the block ends; the text of its catalogue."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Weather)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    tool = {
        "description": "The weather of a city",
        "url": f"http://127.0.0.1:{server.server_port}/weather",
        "parameters": PARAMETERS,
        "allow_private": True,
    }
    try:
        yield yaml.safe_dump({"tools": {"weather": tool}})
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""Real HTTP server that plays recorded answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

Answer = Callable[[dict[str, Any]], "Played"]


@dataclass
class Played:
    """Recorded answer: a body, or ``events`` of a stream, after which the connection ``breaks`` or
    not. ``text`` is a body that is no JSON."""

    body: Any = None
    events: Sequence[Any] = ()
    status: int = 200
    text: str | None = None
    breaks: bool = False


@dataclass
class Transcript:
    """Transcript of a server: ``answers`` by path, and the requests so far in ``asked``.

    A function in ``answers`` gets the body of the request. A request has path, body and headers.
    """

    answers: dict[str, Played | Answer] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """Return the bodies of the requests to this path, in order."""
        return [body for asked, body, _ in self.asked if asked == path]

    async def play(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = msgspec.json.decode(raw) if raw else {}
        self.asked.append((request.path, body, dict(request.headers)))
        answer = self.answers.get(request.path)
        if answer is None:
            return web.Response(status=404, text="Not Found")
        played = answer if isinstance(answer, Played) else answer(body)
        if not played.events and not played.breaks:
            if played.text is not None:
                return web.Response(status=played.status, text=played.text)
            return web.json_response(played.body, status=played.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in played.events:
            data = event if isinstance(event, bytes) else msgspec.json.encode(event)
            await response.write(b"data: " + data + b"\n\n")
        if played.breaks:
            assert request.transport is not None
            request.transport.abort()
        return response

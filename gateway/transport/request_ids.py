"""The id that a client gives its request, returned on whatever answers it."""

from __future__ import annotations

import re

from millrace.gateway.transport.http import (
    AsgiApp,
    Event,
    Headers,
    Receive,
    Scope,
    Send,
    header_of,
    request_id_header,
)

_NAME = b"x-request-id"
_OWN_NAME = b"x-millrace-request-id"
_FORM = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """Answers with a client's ``X-Request-Id`` of 1 to 128 visible ASCII characters, and with our
    own id beside it: a client may use one id twice, and everything here is keyed by ours. Without
    such an id, ours is ``X-Request-Id``."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = header_of(scope, _NAME) if scope["type"] == "http" else None
        if given is None or not _FORM.fullmatch(given):
            await self._app(scope, receive, send)
            return

        async def send_with_id(event: Event) -> None:
            if event["type"] == "http.response.start":
                event = {**event, "headers": _headers_with(given, event["headers"])}
            await send(event)

        await self._app(scope, receive, send_with_id)


def with_id_also_as(name: bytes, send: Send) -> Send:
    """Our own id in a header of that name, too."""

    async def send_with_name(event: Event) -> None:
        if event["type"] == "http.response.start":
            also = [(name, value) for known, value in event["headers"] if known == _NAME]
            event = {**event, "headers": [*event["headers"], *also]}
        await send(event)

    return send_with_name


def _headers_with(given: str, headers: Headers) -> Headers:
    """Those of an answer, where ours is under its other name and the client's in its place."""
    renamed = [(_OWN_NAME if name.lower() == _NAME else name, value) for name, value in headers]
    return [*renamed, request_id_header(given)]

"""The events of an answer in the background, for whoever wants to see them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from millrace.gateway.api.answers import Answers
from millrace.gateway.api.client_connection import ABORT_EXTENSION, HttpClient
from millrace.gateway.core import Gateway
from millrace.gateway.rendering.rendering import Renderer
from millrace.gateway.request.response_reader import ResponseReader
from millrace.gateway.request.resuming import UnknownRequestError
from millrace.gateway.responses.store import ResponseNotFoundError
from millrace.gateway.tenancy.identity import Caller
from millrace.gateway.transport.connection_writer import WRITER_EXTENSION, ResponseWriter
from millrace.gateway.transport.http import Headers, Receive, Scope, Send
from millrace.schemas.records import ClientEnd


async def follow(
    gateway: Gateway,
    scope: Scope,
    receive: Receive,
    send: Send,
    caller: Caller,
    response_id: str,
    render: Callable[[ResponseReader], Renderer],
    headers: Headers,
) -> int:
    """Stream an answer from its beginning, as far as ``render`` gives it out, to its end or until
    the client leaves, which changes nothing for the answer. The HTTP status that was sent.

    Raises ResponseNotFoundError and RedisUnreachableError before anything is sent.
    """
    extensions = scope["extensions"]
    client = HttpClient(gateway.config.client_buffer_bytes, extensions[ABORT_EXTENSION])
    writer: ResponseWriter = extensions[WRITER_EXTENSION]
    watch = asyncio.create_task(client.watch(receive))
    try:
        try:
            response = await gateway.resuming.share(caller, response_id, client)
        except UnknownRequestError:
            raise ResponseNotFoundError(response_id) from None
        try:
            answers = Answers(gateway)
            return await answers.follow(response, client, writer, send, render(response), headers)
        finally:
            writer.release()
            # Nothing to do if its end was delivered.
            response.abort(client.gone or ClientEnd.DISCONNECTED)
    finally:
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch

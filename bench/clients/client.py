"""Client of one server: requests of the chosen API over a pool of kept connections."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from millrace.bench.clients.events import read_whole_usage
from millrace.bench.clients.exchange import ClientExchange
from millrace.bench.clients.http_client import (
    ClientConnection,
    HttpConnection,
    connect,
    request_bytes,
)
from millrace.bench.clients.socket_client import SocketConnection
from millrace.bench.prompts import Prompted
from millrace.bench.settings import LoadError, LoadSettings, TargetApi, target_of

_ROUTES = {TargetApi.CHAT: "/chat/completions", TargetApi.COMPLETIONS: "/completions"}
_HANDSHAKE_S = 30.0


class LoadClient:
    """Owner of connections; ``close`` ends them with their requests.

    Every request has one connection while it runs; a new one is opened when none is idle.
    """

    def __init__(self, settings: LoadSettings) -> None:
        self._settings = settings
        self._target = target_of(settings.url)
        self._headers = list(settings.headers)
        if settings.api_key:
            self._headers.append(("authorization", f"Bearer {settings.api_key}"))
        self._idle: list[ClientConnection] = []
        self._busy: set[ClientConnection] = set()

    def encode(self, index: int, prompted: Prompted, **fields: Any) -> bytes:
        """Encode the request for a prompt, with further ``fields``."""
        body = self._body(prompted) | fields
        if self._settings.api is TargetApi.WEBSOCKET:
            return msgspec.json.encode({"type": "generate", "id": str(index), **body})
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        payload = msgspec.json.encode(body | self._settings.extra_body)
        return self._post(_ROUTES[self._settings.api], payload)

    async def run(self, request: bytes, exchange: ClientExchange) -> None:
        """Send a request and wait until its answer has ended; failures are stored in the
        exchange."""
        settings = self._settings
        connection: ClientConnection | None = None
        try:
            async with asyncio.timeout(settings.timeout_s):
                connection = await self._connection()
                self._busy.add(connection)
                connection.send(request, exchange)
                await exchange.done
        except TimeoutError:
            exchange.fail("timeout")
        except (OSError, LoadError) as error:
            exchange.sent_s = time.perf_counter()
            exchange.fail(error.message if isinstance(error, LoadError) else _cannot_connect(error))
        finally:
            if connection is not None:
                self._busy.discard(connection)
                if connection.is_idle:
                    self._idle.append(connection)
                else:
                    connection.close()
        if not exchange.finished:
            exchange.fail("not_a_stream")
        exchange.close(time.perf_counter())

    async def ask(self, prompted: Prompted) -> ClientExchange:
        """Request one answer that is not measured."""
        exchange = self._exchange()
        await self.run(self.encode(0, prompted), exchange)
        return exchange

    async def count_prompt(self, text: str) -> int | None:
        """Return the server's token count of a prompt; None if the server does not report it."""
        exchange = self._exchange()
        if self._settings.api is TargetApi.WEBSOCKET:
            await self.run(self.encode(0, Prompted(text=text, max_tokens=1)), exchange)
        else:
            body = self._body(Prompted(text=text, max_tokens=1))
            payload = msgspec.json.encode(body | self._settings.extra_body | {"stream": False})
            await self._run_whole(
                self._post(_ROUTES[self._settings.api], payload), exchange, has_usage=True
            )
        return exchange.prompt_tokens if exchange.has_usage and not exchange.error else None

    async def first_model(self) -> str:
        """Return the first model that the server lists. Raises LoadError if it lists none."""
        exchange = self._exchange()
        request = request_bytes(self._target, "GET", "/models", self._headers, b"")
        await self._run_whole(request, exchange, has_usage=False)
        try:
            return str(msgspec.json.decode(exchange.body)["data"][0]["id"])
        except (msgspec.DecodeError, LookupError, TypeError) as error:
            why = exchange.error or f"status {exchange.status}"
            raise LoadError(
                f"{self._settings.url} lists no model ({why}); say --model, or check --url"
            ) from error

    def close(self) -> None:
        """Close all connections."""
        for connection in (*self._idle, *self._busy):
            connection.close()

    async def _run_whole(
        self, request: bytes, exchange: ClientExchange, *, has_usage: bool
    ) -> None:
        """Send an HTTP request whose answer is not streamed, on its own connection."""
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                connection = await connect(self._target, HttpConnection)
                connection.send(request, exchange)
                try:
                    await exchange.done
                finally:
                    connection.close()
        except TimeoutError:
            exchange.fail("timeout")
        except OSError as error:
            exchange.fail(_cannot_connect(error))
        if has_usage and not exchange.error:
            read_whole_usage(exchange)

    def _exchange(self) -> ClientExchange:
        return ClientExchange(0, time.perf_counter(), asyncio.get_running_loop())

    def _post(self, route: str, payload: bytes) -> bytes:
        return request_bytes(self._target, "POST", route, self._headers, payload)

    def _body(self, prompted: Prompted) -> dict[str, Any]:
        settings = self._settings
        body: dict[str, Any] = {"model": settings.model}
        if prompted.messages:
            body["messages"] = prompted.messages
        elif settings.api is TargetApi.COMPLETIONS:
            body["prompt"] = prompted.text
        else:
            body["messages"] = [{"role": "user", "content": prompted.text}]
        if prompted.max_tokens is not None:
            body["max_tokens"] = prompted.max_tokens
        if settings.ignore_eos:
            body["ignore_eos"] = True
        return body | (settings.extra_body if settings.api is TargetApi.WEBSOCKET else {})

    async def _connection(self) -> ClientConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_idle:
                return connection
        if self._settings.api is not TargetApi.WEBSOCKET:
            return await connect(self._target, HttpConnection)
        made = await connect(self._target, SocketConnection)
        made.greet(self._target, self._headers)
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await made.opened
        except BaseException:
            made.close()
            raise
        return made


def _cannot_connect(error: OSError) -> str:
    return f"no connection: {error.strerror or error}"

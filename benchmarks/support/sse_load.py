"""Closed loop of streamed completions, with little CPU use beside a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from benchmarks.support.figures import RequestTimes, percentile
from millrace.bench.clients.exchange import ClientExchange
from millrace.bench.clients.http_client import (
    CONNECTION_LOST,
    HttpConnection,
    connect,
    request_bytes,
)
from millrace.bench.settings import ServerTarget, target_of

# Routes below the path of the base URL.
CHAT = "/chat/completions"
COMPLETIONS = "/completions"


@dataclass
class LoadResult:
    """Result of a load, with the times of each request on this process's monotonic clock."""

    wall_s: float = 0.0
    requests: list[RequestTimes] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return sum(request.num_tokens for request in self.requests) / self.wall_s

    def ttft_percentile_ms(self, share: float) -> float:
        return percentile([(r.parts_s[0] - r.sent_s) * 1e3 for r in self.requests], share)


async def run_load(
    base_url: str, bodies: list[dict[str, Any]], num_clients: int, route: str = CHAT
) -> LoadResult:
    """Send every body once to ``route``, by ``num_clients`` clients with a kept connection each.

    Raises RuntimeError when a request is not answered with text.
    """
    result = LoadResult()
    target, waiting = target_of(base_url), iter(bodies)
    started_s = time.perf_counter()
    await asyncio.gather(*(_client(target, route, waiting, result) for _ in range(num_clients)))
    result.wall_s = time.perf_counter() - started_s
    return result


async def _exchanged(connection: HttpConnection, request: bytes) -> ClientExchange:
    """Return the exchange of a request, marked as lost if the connection is gone."""
    exchange = ClientExchange(0, 0.0, asyncio.get_running_loop())
    if connection.is_idle:
        connection.send(request, exchange)
        await exchange.done
    else:
        exchange.error = CONNECTION_LOST
    return exchange


async def _client(
    target: ServerTarget, route: str, waiting: Iterator[dict[str, Any]], result: LoadResult
) -> None:
    connection = await connect(target, HttpConnection)
    try:
        for body in waiting:
            streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
            request = request_bytes(target, "POST", route, [], msgspec.json.encode(streamed))
            exchange = await _exchanged(connection, request)
            if exchange.error == CONNECTION_LOST and not exchange.status:
                # Some servers close a connection that they declared as kept.
                connection = await connect(target, HttpConnection)
                exchange = await _exchanged(connection, request)
            if exchange.error or not exchange.has_usage or not exchange.parts_s:
                why = exchange.error or "no text or no usage"
                raise RuntimeError(f"a request was not answered: {why}")
            result.requests.append(
                RequestTimes(exchange.sent_s, tuple(exchange.parts_s), exchange.output_tokens)
            )
    finally:
        connection.close()

"""A closed loop of streamed chat completions, cheap enough to share two cores with a server."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class LoadResult:
    """What a load measured; times in ms, one TTFT per request."""

    num_requests: int = 0
    completion_tokens: int = 0
    wall_s: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.wall_s

    def ttft_percentile_ms(self, share: float) -> float:
        ordered = sorted(self.ttft_ms)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def run_load(base_url: str, bodies: list[dict[str, Any]], num_clients: int) -> LoadResult:
    """Send every body once, ``num_clients`` at a time, each client on one kept connection."""
    result = LoadResult()
    waiting = iter(bodies)
    started = time.perf_counter()
    await asyncio.gather(*(_client(base_url, waiting, result) for _ in range(num_clients)))
    result.wall_s = time.perf_counter() - started
    return result


async def _client(base_url: str, waiting: Any, result: LoadResult) -> None:
    address = urlsplit(base_url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        for body in waiting:
            await _one(reader, writer, address.netloc, body, result)
    finally:
        writer.close()


async def _one(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    host: str,
    body: dict[str, Any],
    result: LoadResult,
) -> None:
    payload = json.dumps(
        {**body, "stream": True, "stream_options": {"include_usage": True}}
    ).encode()
    sent = time.perf_counter()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (host.encode(), len(payload), payload)
    )
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the server answered {head.splitlines()[0].decode()}")
    first_at, usage = 0.0, b""
    async for event in _events(reader):
        if not first_at and b'"content":"' in event and b'"content":""' not in event:
            first_at = time.perf_counter()
        if b'"usage":{' in event:
            usage = event
    counted = json.loads(usage.split(b"data: ", 1)[1])["usage"]
    result.num_requests += 1
    result.completion_tokens += counted["completion_tokens"]
    result.ttft_ms.append((first_at - sent) * 1e3)


async def _events(reader: asyncio.StreamReader) -> Any:
    """The events of a chunked SSE body."""
    pending = b""
    while True:
        size = int(await reader.readline(), 16)
        chunk = (await reader.readexactly(size + 2))[:-2]
        if size == 0:
            return
        pending += chunk
        *complete, pending = pending.split(b"\n\n")
        for event in complete:
            yield event

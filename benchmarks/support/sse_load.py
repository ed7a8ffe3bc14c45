"""A closed loop of streamed completions, cheap enough to share two cores with a server."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.support.figures import RequestTimes, percentile

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# What stands in an event before text, and in one that brings none.
_TEXT_KEYS = {CHAT: (b'"content":"', b'"content":""'), COMPLETIONS: (b'"text":"', b'"text":""')}


@dataclass
class LoadResult:
    """What a load measured, with the times of each request on this process's monotonic clock."""

    wall_s: float = 0.0
    requests: list[RequestTimes] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return sum(request.num_tokens for request in self.requests) / self.wall_s

    def ttft_percentile_ms(self, share: float) -> float:
        return percentile([(r.parts_s[0] - r.sent_s) * 1e3 for r in self.requests], share)


async def run_load(
    base_url: str, bodies: list[dict[str, Any]], num_clients: int, path: str = CHAT
) -> LoadResult:
    """Send every body once to ``path``, ``num_clients`` at a time, each client on one kept
    connection. Raises RuntimeError when a request is not answered with text."""
    result = LoadResult()
    waiting = iter(bodies)
    started = time.perf_counter()
    await asyncio.gather(*(_client(base_url, path, waiting, result) for _ in range(num_clients)))
    result.wall_s = time.perf_counter() - started
    return result


async def _client(base_url: str, path: str, waiting: Any, result: LoadResult) -> None:
    address = urlsplit(base_url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        for body in waiting:
            result.requests.append(await _one(reader, writer, address.netloc, path, body))
    finally:
        writer.close()


async def _one(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    host: str,
    path: str,
    body: dict[str, Any],
) -> RequestTimes:
    payload = json.dumps(
        {**body, "stream": True, "stream_options": {"include_usage": True}}
    ).encode()
    text, no_text = _TEXT_KEYS[path]
    sent_s = time.perf_counter()
    writer.write(
        b"POST %b HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (path.encode(), host.encode(), len(payload), payload)
    )
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the server answered {head.splitlines()[0].decode()}")
    parts_s: list[float] = []
    usage = b""
    async for event in _events(reader):
        if text in event and no_text not in event:
            parts_s.append(time.perf_counter())
        if b'"usage":{' in event:
            usage = event
    if not usage or not parts_s:
        raise RuntimeError("the server's answer has no text or no usage")
    counted = json.loads(usage.split(b"data: ", 1)[1])["usage"]
    return RequestTimes(sent_s, tuple(parts_s), counted["completion_tokens"])


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

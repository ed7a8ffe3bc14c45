"""Generations that the gateway makes for itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.errors import refusal_of_end
from gateway.streams.stream import Client, OpenStream
from schemas.errors import MillraceError
from schemas.frames import Done
from schemas.jobs import Job

if TYPE_CHECKING:
    from gateway.core import Gateway

_MAX_BYTES = 1024 * 1024


class QuietGenerationError(
    MillraceError, code="generation_failed", retryable=True, http_status=503
):
    """A generation that no client waits for did not end well."""


class _Reader(Client):
    """Gathers the text."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(_MAX_BYTES)
        self._gateway = gateway
        self._over = asyncio.Event()
        self.texts: list[str] = []

    def wake(self, stream: OpenStream) -> None:
        now_s = self._gateway.clock.monotonic()
        self.texts.append(stream.take(now_s, self._gateway.metrics.gaps).text)
        if stream.ended:
            self._over.set()

    def drop(self, _reason: str) -> None:
        self._over.set()

    async def over(self) -> None:
        await self._over.wait()


async def generate_quietly(gateway: Gateway, job: Job) -> str:
    """The text of a job that is ready for a worker. Raises MillraceError for any other end."""
    reader = _Reader(gateway)
    stream = await gateway.begin_job(job, reader)
    try:
        await reader.over()
        end = stream.reader.terminal
        if not isinstance(end, Done):
            why = "it was dropped" if end is None else refusal_of_end(end).message
            raise QuietGenerationError(f"A generation in the background failed: {why}")
        return "".join(reader.texts)
    finally:
        if stream.ended:
            gateway.streams.finish(stream)
        else:
            gateway.streams.leave(stream, "failed")

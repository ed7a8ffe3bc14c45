"""One request and its answer, as a client sees them."""

from __future__ import annotations

import asyncio
from array import array
from itertools import pairwise

import msgspec

UNFINISHED = "unfinished"


class ClientSample(msgspec.Struct, frozen=True, array_like=True):
    """What is kept of a request. Times are seconds from the start of the run.

    ``due_s`` is when it was meant to be sent, and what its latencies are measured from; ``sent_s``
    is when its first byte was. ``first_s`` is None if no text came. ``error`` is empty if all went
    well, ``unfinished`` if the run ended before it did. ``gaps_ms`` (float32) are the times between
    the parts of the answer after the first, ``part_tokens`` (int32) the tokens of each part if the
    server says them, else empty. ``num_output_tokens`` is what the server counted, or, without
    ``has_usage``, the number of parts.
    """

    index: int
    due_s: float
    sent_s: float
    first_s: float | None
    end_s: float
    status: int
    error: str
    has_usage: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_parts: int
    gaps_ms: bytes
    part_tokens: bytes


class ClientExchange:
    """A request on its way. The connection reports to it; ``done`` is set when nothing follows.

    Times are of ``time.perf_counter``, which all processes of a machine share.
    """

    __slots__ = (
        "body",
        "cached_tokens",
        "done",
        "due_s",
        "end_s",
        "error",
        "finished",
        "has_usage",
        "index",
        "output_tokens",
        "part_tokens",
        "parts_s",
        "prompt_tokens",
        "sent_s",
        "status",
    )

    def __init__(self, index: int, due_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self.index = index
        self.due_s = due_s
        self.sent_s = due_s
        self.end_s = 0.0
        self.status = 0
        self.error = ""
        self.finished = False
        self.has_usage = False
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.parts_s = array("d")
        self.part_tokens = array("i")
        self.body = b""
        self.done: asyncio.Future[None] = loop.create_future()

    def part(self, now_s: float) -> None:
        """A part of the answer has come."""
        self.parts_s.append(now_s)

    def fail(self, code: str) -> None:
        """It went wrong; the first reason counts."""
        self.error = self.error or code

    def close(self, now_s: float) -> None:
        """Nothing follows."""
        if not self.done.done():
            self.end_s = self.end_s or now_s
            self.done.set_result(None)

    def sample(self, start_s: float) -> ClientSample:
        """What is kept of it, ``start_s`` being the start of the run."""
        parts_s = self.parts_s
        gaps = array("f", [(b - a) * 1e3 for a, b in pairwise(parts_s)])
        return ClientSample(
            index=self.index,
            due_s=min(self.due_s, self.sent_s) - start_s,
            sent_s=self.sent_s - start_s,
            first_s=parts_s[0] - start_s if parts_s else None,
            end_s=self.end_s - start_s,
            status=self.status,
            error=self.error,
            has_usage=self.has_usage,
            num_prompt_tokens=self.prompt_tokens,
            num_cached_tokens=self.cached_tokens,
            num_output_tokens=self.output_tokens if self.has_usage else self._counted(),
            num_parts=len(parts_s),
            gaps_ms=gaps.tobytes(),
            part_tokens=self.part_tokens.tobytes(),
        )

    def _counted(self) -> int:
        return sum(self.part_tokens) if self.part_tokens else len(self.parts_s)

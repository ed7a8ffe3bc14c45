"""Request with its answer, as a client sees them."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import InitVar, dataclass, field
from itertools import pairwise

import msgspec

UNFINISHED = "unfinished"


class ClientSample(msgspec.Struct, frozen=True, array_like=True):
    """Recorded values of a request. Times are seconds from the start of the run.

    ``due_s`` is the planned time of the request, from which its latencies are measured; ``sent_s``
    is the time of its first byte. ``first_s`` is None if no text came. ``error`` is empty after
    success, ``unfinished`` if the run ended first. ``gaps_ms`` (float32) are the times between the
    parts of the answer after the first, ``part_tokens`` (int32) the tokens of each part if the
    server reports them, else empty. ``num_output_tokens`` is the server's count, or, without
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


@dataclass(slots=True, eq=False)
class ClientExchange:
    """Request in progress. The connection reports to it; ``done`` is set at the end of the answer.

    Times are of ``time.perf_counter``, which all processes of a machine share.
    """

    index: int
    due_s: float
    loop: InitVar[asyncio.AbstractEventLoop]
    sent_s: float = field(init=False)
    end_s: float = 0.0
    status: int = 0
    error: str = ""
    finished: bool = False
    has_usage: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    parts_s: array[float] = field(default_factory=lambda: array("d"))
    part_tokens: array[int] = field(default_factory=lambda: array("i"))
    body: bytes = b""
    done: asyncio.Future[None] = field(init=False)

    def __post_init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.sent_s = self.due_s
        self.done = loop.create_future()

    def part(self, now_s: float) -> None:
        """Record the arrival of a part of the answer."""
        self.parts_s.append(now_s)

    def fail(self, code: str) -> None:
        """Record a failure; the first code counts."""
        self.error = self.error or code

    def close(self, now_s: float) -> None:
        """End the exchange."""
        if not self.done.done():
            self.end_s = self.end_s or now_s
            self.done.set_result(None)

    def sample(self, start_s: float) -> ClientSample:
        """Return the recorded values, with times from ``start_s``, the start of the run."""
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

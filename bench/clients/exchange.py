"""One request and its answer, as a client sees them."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import InitVar, dataclass, field
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


@dataclass(slots=True, eq=False)
class ClientExchange:
    """A request on its way. The connection reports to it; ``done`` is set when nothing follows.

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

"""Clients of the simulated system: frames that they have read, and frames that they must read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from millrace.gateway.streams.stream import Client, OpenStream, TokenGaps
from millrace.schemas.frames import Cancelled, Done, Expired, Failed, TerminalFrame
from millrace.schemas.jobs import Job

# Possible failures of a request whose workers keep dying, or whose answer was lost.
_FAILURES = frozenset(
    {
        *("poison", "engine_killed", "too_many_attempts", "too_many_deliveries"),
        *("answer_lost", "request_timeout"),
    }
)


@dataclass(frozen=True)
class Question:
    """A request and its whole answer, which follows from its seed."""

    job: Job
    token_ids: tuple[int, ...]
    text: str


@dataclass
class Asked:
    """A question on its way through the system.

    ``is_accepted`` once the queue has confirmed it; ``is_refused`` without confirmation, though it
    may be stored. ``origin`` is the gateway to which its frames are addressed, ``holder`` the
    gateway of its client. ``may_be_cancelled``: it was cancelled. ``wrongs`` lists the errors
    found.
    """

    question: Question
    origin: str
    holder: str
    wrongs: list[str]
    is_accepted: bool = False
    is_refused: bool = False
    has_left: bool = False
    num_moves: int = 0
    may_be_cancelled: bool = False
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    terminals: list[TerminalFrame] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.question.job.request_id

    @property
    def is_open(self) -> bool:
        """A client waits for it."""
        has_client = bool(self.question.job.reply) and not self.has_left
        return has_client and self.is_accepted and not self.is_answered

    @property
    def is_answered(self) -> bool:
        return bool(self.terminals)

    def wrong(self, what: str) -> None:
        self.wrongs.append(f"{self.request_id}: {what}")

    def forget_tail(self, num_tokens: int) -> None:
        """Drop the last frames, as if they had not arrived from the gateway."""
        num_kept = max(0, len(self.token_ids) - num_tokens)
        del self.token_ids[num_kept:]
        self.texts = self.texts[:num_kept]

    def read(self, first_index: int, token_ids: list[int], text: str) -> None:
        """New tokens came."""
        if first_index != len(self.token_ids):
            self.wrong(f"index {first_index} came when it had {len(self.token_ids)} tokens")
        if self.terminals:
            self.wrong("tokens came behind the end")
        self.token_ids += token_ids
        self.texts += ["" for _ in token_ids[1:]] + [text]
        if tuple(self.token_ids) != self.question.token_ids[: len(self.token_ids)]:
            self.wrong("the tokens are not those of its seed")

    def end(self, frame: TerminalFrame) -> None:
        """The end came."""
        self.terminals.append(frame)
        if len(self.terminals) > 1:
            self.wrong(f"it ended {len(self.terminals)} times")
        match frame:
            case Done():
                if tuple(self.token_ids) != self.question.token_ids:
                    self.wrong(f"it is done with {len(self.token_ids)} tokens")
            case Cancelled():
                if not self.may_be_cancelled:
                    self.wrong("it was cancelled by nobody")
            case Expired():
                if self.question.job.deadline_ns is None:
                    self.wrong("it expired without a deadline")
            case Failed(code=code) if code in _FAILURES:
                pass
            case _:
                self.wrong(f"it ended with {frame}")


class Holder(Protocol):
    """Gateway as a reader sees it."""

    def soon(self, callback: Callable[[], None]) -> None: ...

    def now_s(self) -> float: ...

    def finished(self, stream: OpenStream) -> None: ...


class Reader(Client):
    """Connection of one client at one gateway."""

    def __init__(self, gateway: Holder, asked: Asked) -> None:
        super().__init__(limit_bytes=1 << 30)
        self._gateway = gateway
        self._asked = asked
        self.is_open = True

    def wake(self, stream: OpenStream) -> None:
        self._gateway.soon(lambda: self._take(stream))

    def drop(self, reason: str) -> None:
        self._asked.wrong(f"its gateway dropped it: {reason}")

    def close(self) -> None:
        """The connection is gone: nothing of it is read any more."""
        self.is_open = False

    def _take(self, stream: OpenStream) -> None:
        if not self.is_open:
            return
        progress = stream.read(self._gateway.now_s(), TokenGaps())
        first, count = progress.first_index, progress.num_tokens
        if count:
            self._asked.read(first, stream.reader.token_ids[first : first + count], progress.text)
        terminal = stream.reader.terminal
        if terminal is not None:
            self.is_open = False
            self._asked.end(terminal)
            self._gateway.finished(stream)

"""Open stream: the reader of a request's frames, its client, and the statistics of its delivery."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from typing import NamedTuple

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from millrace.bus.frame_reader import Outcome, Progress, StreamReader
from millrace.runtime.histogram import PER_TOKEN_S, Histogram
from millrace.schemas.control import CancelReason
from millrace.schemas.frames import Cancelled, Delta, Done, Expired, Frame, Shed, Usage
from millrace.schemas.jobs import Job
from millrace.schemas.records import STALL_MS, ClientEnd, Status

_STALL_S = STALL_MS / 1e3
_UNDER_STALL_S = math.nextafter(_STALL_S, 0.0)


class StreamPhase(IntEnum):
    """Client state of a stream. DETACHED may be skipped. No phase is entered again, as a returning
    client gets a new stream.
    """

    ATTACHED = 0  # a client reads the stream
    DETACHED = 1  # no client is connected, and one may resume the stream
    ABORTED = 2  # the client has left; only the end is awaited


class Cancellation(NamedTuple):
    """Requested cancellation; the stream stops waiting for the worker after ``give_up_s``
    (monotonic).
    """

    reason: CancelReason
    give_up_s: float


@dataclass(slots=True)
class ReplayState:
    """State of replays. ``is_needed`` is set once frames may have been missed. A stream that
    ``is_foreign`` has its frames sent to another live gateway, so that each update must be
    requested. No query is sent while one ``is_asked``, nor before ``not_before_s`` (monotonic).
    ``num_fruitless`` workers in a row answered that they send the missing frames from
    ``from_index`` on, which the client still lacks; the first of them at ``fruitless_since_s``.
    ``over_since_s`` is when the request was found to be over while its end is missing here; None:
    not found to be over.
    """

    is_needed: bool = False
    is_foreign: bool = False
    is_asked: bool = False
    not_before_s: float = 0.0
    from_index: int = -1
    num_fruitless: int = 0
    fruitless_since_s: float = 0.0
    over_since_s: float | None = None

    def note_answer(self, next_index: int, now_s: float) -> None:
        """Note that a worker sends the missing frames from ``next_index`` on."""
        self.over_since_s = None
        if next_index == self.from_index:
            self.num_fruitless += 1
            return
        self.from_index = next_index
        self.num_fruitless, self.fruitless_since_s = 0, now_s


@dataclass(slots=True)
class DeliveryFigures:
    """Statistics of a delivery over all connections of the client, in the terms of
    ``DeliveryRecord``: from ``received_s`` (monotonic), which may be before this gateway got the
    request, to ``last_token_s``; ``intake_s`` precedes ``received_s``. ``num_delivered`` counts
    only the tokens delivered here.
    """

    received_s: float
    intake_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_delivered: int = 0
    num_replays: int = 0
    num_resumes: int = 0
    num_stalls: int = 0
    stalled_s: float = 0.0
    longest_gap_s: float = 0.0
    unnoted_gap_s: float = 0.0

    def note_gap(self, gap_s: float) -> None:
        """Count a gap between two deliveries. A gap of up to ``unnoted_gap_s`` changes nothing,
        which spares most tokens the call.
        """
        is_stall = gap_s >= _STALL_S
        self.count_gaps_on(
            self.num_stalls + is_stall,
            self.stalled_s + (gap_s if is_stall else 0.0),
            max(self.longest_gap_s, gap_s),
        )

    def count_gaps_on(self, num_stalls: int, stalled_s: float, longest_gap_s: float) -> None:
        """Set the counts of gaps so far."""
        self.num_stalls = num_stalls
        self.stalled_s = stalled_s
        self.longest_gap_s = longest_gap_s
        self.unnoted_gap_s = min(longest_gap_s, _UNDER_STALL_S)


class TokenGaps(Collector):
    """Prometheus histogram of the time between tokens as clients get them. Tokens that arrive
    together share their gap.
    """

    def __init__(self) -> None:
        self._tally = Histogram(PER_TOKEN_S)

    def add(self, gap_s: float, num_tokens: int) -> None:
        """Add ``num_tokens`` that arrived ``gap_s`` after the tokens before them."""
        self._tally.add(gap_s / num_tokens, num_tokens)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "millrace_inter_token_latency_seconds",
            "Time between tokens as clients get them",
        )
        self._tally.add_to(family)
        yield family


# An attribute of an enum is slower to look up, and each frame does so.
_ATTACHED, _, _ABORTED = StreamPhase


class Client(ABC):
    """Client of one or several streams, and the amount of text that waits for it.

    ``sending_since_s`` is the monotonic time at which an unfinished write began.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.pending_bytes = 0
        self.sending_since_s: float | None = None

    @abstractmethod
    def wake(self, stream: OpenStream) -> None:
        """Wake the client for data of the stream. Must return at once."""

    @abstractmethod
    def drop(self, reason: str) -> None:
        """Disconnect a client that does not read. Must return at once."""

    def go_away(self) -> None:
        """Disconnect the client because this gateway shuts down; it may resume at another one."""
        self.drop(ClientEnd.GOING_AWAY)


@dataclass(slots=True, eq=False)
class OpenStream:
    """Job that this gateway answers, from before it is published until its end is recorded.

    The table of streams feeds it; its client takes from it. ``outcome`` is its end for the client:
    a ``Status`` value, or a ``ClientEnd``. It is ``accepted`` once the queue has its job, at
    ``stream_sequence`` if this gateway published it. ``owner`` leads the client from the stream to
    its own objects, until the end is recorded. A stream with ``from_index`` was begun by another
    connection: the client has the tokens before that. While it is DETACHED, at most until
    ``detached_until_s``, no client gets its output. Without a frame, time alone changes nothing
    about it before ``look_at_s`` (monotonic).

    A copy (``is_copy``) is read beside the stream itself, for another client with the same request:
    it settles, records and cancels nothing. A stream that ``was_counted`` is read after its end was
    recorded: no metric counts it again.
    """

    job: Job
    client: Client
    opened_s: float
    _: KW_ONLY
    owner: object = None
    from_index: int = 0
    phase: StreamPhase = field(default=StreamPhase.ATTACHED, init=False)
    detached_until_s: float | None = field(default=None, init=False)
    is_copy: bool = field(default=False, init=False)
    was_counted: bool = field(default=False, init=False)
    is_ready: bool = field(default=False, init=False)
    accepted: bool = field(default=False, init=False)
    stream_sequence: int | None = field(default=None, init=False)
    cancellation: Cancellation | None = field(default=None, init=False)
    outcome: str = field(default="", init=False)
    replay: ReplayState = field(default_factory=ReplayState, init=False)
    reader: StreamReader = field(init=False)
    delivery: DeliveryFigures = field(init=False)
    last_frame_s: float = field(init=False)
    look_at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.reader = StreamReader(self.from_index)
        self.delivery = DeliveryFigures(self.opened_s)
        self.last_frame_s = self.look_at_s = self.opened_s

    def _enter(self, phase: StreamPhase) -> bool:
        """Enter a later phase; return whether the phase changed."""
        if phase <= self.phase:
            return False
        self.phase = phase
        return True

    @property
    def request_id(self) -> str:
        return self.job.request_id

    @property
    def ended(self) -> bool:
        return self.reader.terminal is not None

    @property
    def num_seen(self) -> int:
        """Return the number of tokens that the client has, including tokens from another
        connection.
        """
        return min(self.from_index, self.reader.next_index) + self.delivery.num_delivered

    def feed(self, frame: Frame, now_s: float) -> Outcome:
        """Read one frame and wake the client if there is something for it."""
        self.last_frame_s = now_s
        reader = self.reader
        before = reader.pending_bytes
        outcome = reader.feed(frame)
        if outcome is Outcome.NOTHING or outcome is Outcome.GAP:
            return outcome
        if self.phase is _ABORTED:
            reader.take()
            return outcome
        client = self.client
        client.pending_bytes += reader.pending_bytes - before
        if client.pending_bytes > client.limit_bytes and type(frame) is Delta:
            client.drop(ClientEnd.SLOW_CLIENT)
        elif not self.is_ready:
            self.is_ready = True
            client.wake(self)
        return outcome

    def read(self, now_s: float, gaps: TokenGaps) -> Progress:
        """Return the waiting progress; later progress wakes the client again."""
        self.is_ready = False
        self.client.pending_bytes -= self.reader.pending_bytes
        progress = self.reader.take()
        if progress.num_tokens and self.phase is _ATTACHED:
            delivery = self.delivery
            delivery.num_delivered += progress.num_tokens
            if delivery.last_token_s is None:
                delivery.first_token_s = now_s
            else:
                gap_s = now_s - delivery.last_token_s
                if not (self.is_copy or self.was_counted):
                    gaps.add(gap_s, progress.num_tokens)
                if gap_s > delivery.unnoted_gap_s:
                    delivery.note_gap(gap_s)
            delivery.last_token_s = now_s
        return progress

    def note_delivered(self, num_tokens: int, now_s: float) -> None:
        """Count tokens that the client was given without reading them one by one."""
        if self.phase is _ATTACHED:
            delivery = self.delivery
            delivery.num_delivered += num_tokens
            if delivery.first_token_s is None:
                delivery.first_token_s = now_s
            delivery.last_token_s = now_s

    def change_client(self, client: Client) -> None:
        """Move waiting and future progress to ``client``."""
        self.client.pending_bytes -= self.reader.pending_bytes
        self.client = client
        self.look_at_s = 0.0
        client.pending_bytes += self.reader.pending_bytes
        self.is_ready = True
        client.wake(self)

    def detach(self, until_s: float | None) -> None:
        """Detach the client; another may attach until ``until_s`` (monotonic; None: at any
        time).
        """
        if self._enter(StreamPhase.DETACHED):
            self.detached_until_s = until_s
            self.look_at_s = 0.0

    def abort(self, outcome: str) -> bool:
        """Abort after the client has left for good: later frames are read and dropped. Return
        whether it was not aborted before.
        """
        if not self._enter(StreamPhase.ABORTED):
            return False
        self.outcome = self.outcome or outcome
        self.client.pending_bytes -= self.reader.pending_bytes
        self.reader.take()
        return True

    def wake(self) -> None:
        if not self.is_ready and self.phase is not _ABORTED:
            self.is_ready = True
            self.client.wake(self)


def status_of(stream: OpenStream) -> Status:
    """Return the status of an ended request."""
    match stream.reader.terminal:
        case Done():
            return Status.DONE
        case Cancelled():
            return Status.CANCELLED
        case Expired():
            return Status.EXPIRED
        case Shed():
            return Status.SHED
        case _:
            return Status.FAILED


_COUNTS = [name for name in Usage.__struct_fields__ if name.endswith("_tokens")]


def usage_so_far(stream: OpenStream) -> Usage | None:
    """Return the known usage of a stream's job; None if unknown. A prompt that another choice pays
    for counts no tokens.
    """
    reader = stream.reader
    if reader.usage is not None:
        return reader.usage
    if reader.started is None:
        return None
    is_paid = not stream.job.shares_prompt
    return Usage(
        prompt_tokens=reader.started.num_prompt_tokens * is_paid,
        cached_tokens=reader.started.num_cached_tokens * is_paid,
        completion_tokens=reader.next_index,
    )


def total_usage(usages: Iterable[Usage | None]) -> Usage:
    """Return the sum of each count; None counts nothing."""
    total = dict.fromkeys(_COUNTS, 0)
    for usage in filter(None, usages):
        for name in _COUNTS:
            total[name] += getattr(usage, name)
    return Usage(**total)


class DetachedClient(Client):
    """Substitute for a client that has left, so that the end is noticed."""

    def __init__(self, on_wake: Callable[[], None]) -> None:
        super().__init__(limit_bytes=2**62)
        self._on_wake = on_wake

    def wake(self, _stream: OpenStream) -> None:
        self._on_wake()

    def drop(self, reason: str) -> None:
        """Do nothing: there is no connection to close."""


# For streams that have ended, and for streams that are read without waking.
NULL_CLIENT = DetachedClient(lambda: None)

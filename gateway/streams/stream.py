"""One open stream: the reader of a request's frames, and the client that they are for."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from bus.frame_reader import Outcome, Progress, StreamReader
from gateway.streams.token_gaps import TokenGaps
from schemas.control import CancelReason
from schemas.frames import Cancelled, Delta, Done, Expired, Frame, Shed
from schemas.jobs import Job
from schemas.records import STALL_MS, Status

_STALL_S = STALL_MS / 1e3
_UNDER_STALL_S = math.nextafter(_STALL_S, 0.0)


class Client(ABC):
    """The far end of one or several streams, and how much text waits for it.

    ``sending_since_s`` is the monotonic time at which a write began that is not through yet.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.pending_bytes = 0
        self.sending_since_s: float | None = None

    @abstractmethod
    def wake(self, stream: OpenStream) -> None:
        """The stream has something to take. Must return at once."""

    @abstractmethod
    def drop(self, reason: str) -> None:
        """The client does not read: part with it. Must return at once."""

    def go_away(self) -> None:
        """This gateway shuts down: part with the client, which may go on at another one."""
        self.drop("going_away")


class OpenStream:
    """A job that this gateway answers, from before it is published until its end is recorded.

    The table of streams feeds it; its client takes from it. ``outcome`` is how it ended for the
    client: a ``Status`` value, or what became of the client (``disconnect``, ``slow_client``).
    ``stream_sequence`` is the job's place in the queue, if this gateway published it.
    ``owner`` is whatever the client needs to find its way from the stream to what it is a part of,
    until its end is recorded.
    A stream ``from_index`` is one that another connection began: the client has the tokens before
    that. It is ``foreign`` if its frames go to another gateway that lives, so that each news of it
    has to be asked for. While it is ``unattended`` it waits for somebody, at most until
    ``held_until_s``, and what is taken of it nobody sees.

    One that ``is_copy`` is read beside the stream itself, for somebody else who asked the same:
    nothing is settled, recorded or cancelled because of it.

    What the client saw is counted over all connections that it had
    (``gateway.streams.delivery_statistics``): from
    ``received_s``, which may be before this gateway was asked, to ``last_delivery_s``, in the terms
    of ``DeliveryRecord``. ``num_delivered`` are only the tokens that were given out here.
    """

    __slots__ = (
        "accepted",
        "cancel_reason",
        "client",
        "client_gone",
        "first_text_s",
        "foreign",
        "from_index",
        "held_until_s",
        "is_copy",
        "is_ready",
        "job",
        "last_delivery_s",
        "last_frame_s",
        "longest_gap_s",
        "must_probe",
        "num_delivered",
        "num_replays",
        "num_resumes",
        "num_stalls",
        "opened_s",
        "outcome",
        "owner",
        "reader",
        "received_s",
        "remove_at_s",
        "replay_after_s",
        "replaying",
        "stalled_s",
        "stream_sequence",
        "unattended",
        "unnoted_gap_s",
    )

    def __init__(
        self,
        job: Job,
        client: Client,
        now_s: float,
        *,
        owner: object = None,
        from_index: int = 0,
    ) -> None:
        self.job = job
        self.client = client
        self.owner = owner
        self.foreign = False
        self.held_until_s: float | None = None
        self.unattended = False
        self.is_copy = False
        self.from_index = from_index
        self.reader = StreamReader(from_index)
        self.accepted = False
        self.client_gone = False
        self.cancel_reason: CancelReason | None = None
        self.is_ready = False
        self.must_probe = False
        self.replaying = False
        self.num_replays = 0
        self.stream_sequence: int | None = None
        self.num_delivered = 0
        self.outcome = ""
        self.opened_s = now_s
        self.received_s = now_s
        self.last_frame_s = now_s
        self.replay_after_s = 0.0
        self.remove_at_s = 0.0
        self.first_text_s: float | None = None
        self.last_delivery_s: float | None = None
        self.num_resumes = 0
        self.num_stalls = 0
        self.stalled_s = 0.0
        self.longest_gap_s = 0.0
        self.unnoted_gap_s = 0.0

    @property
    def request_id(self) -> str:
        return self.job.request_id

    @property
    def ended(self) -> bool:
        return self.reader.terminal is not None

    @property
    def num_seen(self) -> int:
        """Tokens that the client has, those that another connection gave it among them."""
        return min(self.from_index, self.reader.next_index) + self.num_delivered

    def feed(self, frame: Frame, now_s: float) -> Outcome:
        """Read one frame and wake the client if there is something for it."""
        self.last_frame_s = now_s
        reader = self.reader
        before = reader.pending_bytes
        outcome = reader.feed(frame)
        if outcome is Outcome.NOTHING or outcome is Outcome.GAP:
            return outcome
        if self.client_gone:
            reader.take()
            return outcome
        client = self.client
        client.pending_bytes += reader.pending_bytes - before
        if client.pending_bytes > client.limit_bytes and type(frame) is Delta:
            client.drop("slow_client")
        elif not self.is_ready:
            self.is_ready = True
            client.wake(self)
        return outcome

    def read(self, now_s: float, gaps: TokenGaps) -> Progress:
        """What waits for the client, which is woken again for whatever follows."""
        self.is_ready = False
        self.client.pending_bytes -= self.reader.pending_bytes
        progress = self.reader.take()
        if progress.num_tokens and not self.unattended:
            self.num_delivered += progress.num_tokens
            if self.last_delivery_s is None:
                self.first_text_s = now_s
            else:
                gap_s = now_s - self.last_delivery_s
                gaps.add(gap_s, progress.num_tokens)
                if gap_s > self.unnoted_gap_s:
                    self.note_gap(gap_s)
            self.last_delivery_s = now_s
        return progress

    def note_gap(self, gap_s: float) -> None:
        """Take in a gap between two deliveries. One of up to ``unnoted_gap_s`` changes nothing,
        which spares most tokens the call."""
        is_stall = gap_s >= _STALL_S
        self.count_gaps_on(
            self.num_stalls + is_stall,
            self.stalled_s + (gap_s if is_stall else 0.0),
            max(self.longest_gap_s, gap_s),
        )

    def count_gaps_on(self, num_stalls: int, stalled_s: float, longest_gap_s: float) -> None:
        """So much there was until now."""
        self.num_stalls = num_stalls
        self.stalled_s = stalled_s
        self.longest_gap_s = longest_gap_s
        self.unnoted_gap_s = min(longest_gap_s, _UNDER_STALL_S)

    def change_client(self, client: Client) -> None:
        """What waits, and all that comes, is for ``client`` from now on."""
        self.client.pending_bytes -= self.reader.pending_bytes
        self.client = client
        client.pending_bytes += self.reader.pending_bytes
        self.is_ready = True
        client.wake(self)

    def abort(self, outcome: str) -> None:
        """The client is gone; what still comes is read and thrown away."""
        self.client_gone = True
        self.outcome = self.outcome or outcome
        self.client.pending_bytes -= self.reader.pending_bytes
        self.reader.take()

    def wake(self) -> None:
        if not self.is_ready and not self.client_gone:
            self.is_ready = True
            self.client.wake(self)


def status_of(stream: OpenStream) -> Status:
    """How the request ended. It must have."""
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

"""One open stream: the reader of a request's frames, and the client that they are for."""

from __future__ import annotations

from abc import ABC, abstractmethod

from millrace.bus.frame_reader import Outcome, Progress, StreamReader
from millrace.gateway.streams.state import Cancellation, DeliveryFigures, Phase, ReplayState
from millrace.gateway.streams.token_gaps import TokenGaps
from millrace.schemas.frames import Cancelled, Delta, Done, Expired, Frame, Shed
from millrace.schemas.jobs import Job
from millrace.schemas.records import ClientEnd, Status

# An attribute of an enum takes longer to look up, and each frame does so.
_ATTACHED, _, _ABORTED = Phase


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
        self.drop(ClientEnd.GOING_AWAY)


class OpenStream:
    """A job that this gateway answers, from before it is published until its end is recorded.

    The table of streams feeds it; its client takes from it. ``outcome`` is how it ended for the
    client: a ``Status`` value, or one of ``ClientEnd``. It
    is ``accepted`` once the queue has its job, at ``stream_sequence`` if this gateway published it.
    ``owner`` is whatever the client needs to find its way from the stream to what it is a part of,
    until its end is recorded. A stream ``from_index`` is one that another connection began: the
    client has the tokens before that. While it is DETACHED, at most until ``detached_until_s``,
    nobody sees what is taken of it. Unless a frame comes, time alone changes nothing about it
    before ``look_at_s`` (monotonic).

    One that ``is_copy`` is read beside the stream itself, for somebody else who asked the same:
    nothing is settled, recorded or cancelled because of it.
    """

    __slots__ = (
        "accepted",
        "cancellation",
        "client",
        "delivery",
        "detached_until_s",
        "from_index",
        "is_copy",
        "is_ready",
        "job",
        "last_frame_s",
        "look_at_s",
        "opened_s",
        "outcome",
        "owner",
        "phase",
        "reader",
        "replay",
        "stream_sequence",
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
        self.phase = Phase.ATTACHED
        self.detached_until_s: float | None = None
        self.is_copy = False
        self.from_index = from_index
        self.reader = StreamReader(from_index)
        self.is_ready = False
        self.accepted = False
        self.stream_sequence: int | None = None
        self.cancellation: Cancellation | None = None
        self.replay = ReplayState()
        self.outcome = ""
        self.opened_s = self.last_frame_s = self.look_at_s = now_s
        self.delivery = DeliveryFigures(now_s)

    def _enter(self, phase: Phase) -> bool:
        """The one transition of phases: only forward; whether it was one."""
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
        """Tokens that the client has, those that another connection gave it among them."""
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
        """What waits for the client, which is woken again for whatever follows."""
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
                gaps.add(gap_s, progress.num_tokens)
                if gap_s > delivery.unnoted_gap_s:
                    delivery.note_gap(gap_s)
            delivery.last_token_s = now_s
        return progress

    def note_delivered(self, num_tokens: int, now_s: float) -> None:
        """The client is given so many tokens that were not read one by one."""
        if self.phase is _ATTACHED:
            delivery = self.delivery
            delivery.num_delivered += num_tokens
            if delivery.first_token_s is None:
                delivery.first_token_s = now_s
            delivery.last_token_s = now_s

    def change_client(self, client: Client) -> None:
        """What waits, and all that comes, is for ``client`` from now on."""
        self.client.pending_bytes -= self.reader.pending_bytes
        self.client = client
        self.look_at_s = 0.0
        client.pending_bytes += self.reader.pending_bytes
        self.is_ready = True
        client.wake(self)

    def detach(self, until_s: float | None) -> None:
        """Nobody is connected; somebody may come before ``until_s`` (monotonic; None: at any
        time)."""
        if self._enter(Phase.DETACHED):
            self.detached_until_s = until_s
            self.look_at_s = 0.0

    def abort(self, outcome: str) -> bool:
        """The client is gone for good; what still comes is read and thrown away. Whether it was not
        before."""
        if not self._enter(Phase.ABORTED):
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

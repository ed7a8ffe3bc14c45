"""Table of open streams: frames come from one subscription, and each stream's end is reported
exactly once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from itertools import chain

from msgspec.structs import replace

from millrace.bus.api import Bus
from millrace.bus.frame_reader import Outcome
from millrace.bus.transport import Subscription
from millrace.gateway.streams.fleet_view import FleetView
from millrace.gateway.streams.replays import Replays, RunningRequestReader
from millrace.gateway.streams.stream import Cancellation, Client, OpenStream, StreamPhase
from millrace.runtime.clock import Clock
from millrace.runtime.tasks import Tasks
from millrace.schemas.config import GatewayConfig
from millrace.schemas.control import Cancel, CancelReason, ResumePoint
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import Cancelled, Failed, Frame, TerminalFrame
from millrace.schemas.jobs import Job
from millrace.schemas.records import ClientEnd

_log = logging.getLogger(__name__)
_SWEEP_S = 0.25
# Maximum silence of a waiting stream before its state is looked up.
_LOOK_UP_S = 10.0
_CANCEL_INTERVAL_S = 1.0
_CANCEL_BOUND_S = 15.0
_LAST_CANCELS_S = 0.5
TAKEN_OVER = Failed(code="taken_over", message="Another connection goes on with this request.")


class _NotYet:
    """Placeholder of a subscription in progress."""

    async def close(self) -> None:
        return


_NOT_YET = _NotYet()


class StreamTable:
    """Table that owns every open stream of this gateway, and the copies that other clients read.

    A stream leaves the table when its client has taken its end (``finish``); once the client has
    left, when the terminal frame is read or ``_CANCEL_BOUND_S`` have passed; or when another
    gateway has taken it over. ``on_end`` is called once for each stream that was accepted and was
    not taken over. ``on_frame`` never waits: it runs on the bus's read path.
    """

    def __init__(
        self,
        bus: Bus,
        config: GatewayConfig,
        gateway_id: str,
        fleet: FleetView,
        clock: Clock,
        on_end: Callable[[OpenStream], None],
        generations: RunningRequestReader | None = None,
    ) -> None:
        self._bus = bus
        self._config = config
        self._gateway_id = gateway_id
        self._clock = clock
        self._on_end = on_end
        self._replays = Replays(
            bus, gateway_id, fleet, clock, generations, self.on_frame, self._end
        )
        self._streams: dict[str, OpenStream] = {}
        self._copies: dict[str, list[OpenStream]] = {}  # by the ids of their jobs
        self._subscriptions: list[Subscription] = []
        self._proxy_subscriptions: dict[str, dict[str, Subscription]] = {}
        self._tasks = Tasks()
        self._sweeper = Tasks()
        self._has_streams = asyncio.Event()

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[OpenStream]:
        return chain(self._streams.values(), chain.from_iterable(self._copies.values()))

    @property
    def num_served(self) -> int:
        """Return the number of streams with a connected client."""
        return sum(stream.phase is StreamPhase.ATTACHED for stream in self)

    async def start(self) -> None:
        """Subscribe to frames and to queries about streams; probe after every reconnect."""
        self._subscriptions = [
            await self._bus.frames.subscribe(self._gateway_id, self.on_frame),
            await self._serve_resume_points(self._gateway_id),
        ]
        self._bus.on_reconnect(self._on_reconnect)
        self._sweeper.repeat(self._sweep, _SWEEP_S, self._clock, "sweep streams")

    async def close(self) -> None:
        """Send the last cancels, then stop."""
        await self._sweeper.close()
        await self._tasks.close(_LAST_CANCELS_S)
        proxies = (standing.values() for standing in self._proxy_subscriptions.values())
        for subscription in [*self._subscriptions, *chain.from_iterable(proxies)]:
            await subscription.close()
        self._subscriptions = []
        self._proxy_subscriptions = {}
        await self._tasks.close()

    def get(self, request_id: str) -> OpenStream | None:
        return self._streams.get(request_id)

    def open(
        self,
        job: Job,
        client: Client,
        received_s: float,
        owner: object = None,
        from_index: int = 0,
    ) -> OpenStream:
        """Open a stream for a job that is about to be published; ``received_s`` is monotonic."""
        # The prompt is not needed here any more.
        job = replace(job, prompt_token_ids=())
        stream = OpenStream(job, client, received_s, owner=owner, from_index=from_index)
        self._streams[job.request_id] = stream
        self._has_streams.set()
        return stream

    def take_over(self, job: Job, client: Client, owner: object, from_index: int) -> OpenStream:
        """Open a stream for a job that was published before; the client has its tokens before
        ``from_index``. Call ``follow`` next.
        """
        stream = self.open(job, client, self._clock.monotonic(), owner, from_index)
        stream.accepted = True
        return stream

    def copy(
        self, job: Job, client: Client, owner: object, *, is_foreign: bool | None = None
    ) -> OpenStream:
        """Open a copy for another client of a job that was published before, from its first token
        on; the original stream stays. ``is_foreign`` None: as the original stream, which is here.
        """
        main = self._streams.get(job.request_id)
        if is_foreign is None:
            is_foreign = main is None or main.replay.is_foreign
        stream = OpenStream(job, client, self._clock.monotonic(), owner=owner)
        stream.accepted = True
        stream.is_copy = True
        self._copies.setdefault(job.request_id, []).append(stream)
        self._has_streams.set()
        self.follow(stream, is_foreign=is_foreign)
        return stream

    def follow(self, stream: OpenStream, *, is_foreign: bool = True) -> None:
        """Request all frames of a job that was published before, and updates, too, if its frames
        are sent to another gateway (``is_foreign``).
        """
        stream.replay.is_needed = True
        stream.replay.is_foreign = is_foreign
        self._ask_replay(stream)

    def hand_off(self, stream: OpenStream) -> None:
        """Hand a stream off to another connection, here or at another gateway: nothing is settled,
        and a connected client is told.
        """
        self._remove(stream)
        stream.reader.end(TAKEN_OVER)
        stream.wake()

    async def subscribe_as_proxy_for(self, gateway_id: str, *, is_dead: bool) -> None:
        """Stand in for another gateway whose streams were taken over: report the tokens of their
        clients and, if it is dead, receive its frames, until these streams have ended. Raises the
        errors of a subscription, and can be called again then.
        """
        if gateway_id == self._gateway_id:
            return
        wanted = ("points", "frames") if is_dead else ("points",)
        standing = self._proxy_subscriptions.setdefault(gateway_id, {})
        self._has_streams.set()
        for kind in wanted:
            if kind in standing:
                continue
            standing[kind] = _NOT_YET
            try:
                standing[kind] = (
                    await self._serve_resume_points(gateway_id)
                    if kind == "points"
                    else await self._bus.frames.subscribe(gateway_id, self.on_frame)
                )
            except BaseException:
                del standing[kind]
                raise
            if self._proxy_subscriptions.get(gateway_id) is not standing:
                await standing[kind].close()  # all of its streams ended in the meantime

    async def _serve_resume_points(self, gateway_id: str) -> Subscription:
        control, holds = self._bus.control, self._streams.__contains__
        return await control.serve_resume_points(gateway_id, self.resume_point, holds)

    def accept(self, stream: OpenStream, stream_sequence: int | None = None) -> None:
        """Accept a stream whose job is stored in the queue: from now on it ends in a terminal frame
        and a record.
        """
        stream.accepted = True
        stream.stream_sequence = stream_sequence
        if stream.ended and stream.phase is StreamPhase.ABORTED:
            self.finish(stream)
        elif stream.cancellation is not None:
            self._send_cancel(stream, stream.cancellation)

    def finish(self, stream: OpenStream) -> None:
        """Record the end of a stream whose client has taken it, or has left."""
        if self._remove(stream) and not stream.is_copy:
            self._on_end(stream)

    def discard(self, stream: OpenStream) -> None:
        """Discard a stream whose job was not stored; nothing is settled."""
        self._remove(stream)

    def _remove(self, stream: OpenStream) -> bool:
        """Remove a stream; return whether it was there, since another stream of the same request
        may have replaced it.
        """
        request_id = stream.request_id
        if stream.is_copy:
            copies = self._copies.get(request_id, [])
            if stream not in copies:
                return False
            copies.remove(stream)
            if not copies:
                del self._copies[request_id]
            return True
        if self._streams.get(request_id) is not stream:
            return False
        del self._streams[request_id]
        return True

    def cancel(self, stream: OpenStream, reason: CancelReason) -> None:
        """Cancel the job of a stream; the terminal frame still comes from its worker."""
        if stream.ended or stream.cancellation is not None:
            return
        stream.cancellation = Cancellation(reason, self._clock.monotonic() + _CANCEL_BOUND_S)
        stream.look_at_s = 0.0
        if stream.accepted:
            self._send_cancel(stream, stream.cancellation)

    def abort(self, stream: OpenStream, outcome: str) -> None:
        """Abort a stream without a client: cancel its job, and keep the stream until its end is
        known.
        """
        if not stream.abort(outcome):
            return
        if stream.is_copy:
            self._remove(stream)
        elif not stream.ended:
            self.cancel(stream, CancelReason.DISCONNECT)
        elif stream.accepted:
            self.finish(stream)

    def on_frame(self, request_id: str, frame: Frame) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._feed(stream, frame)
        if self._copies:  # usually empty
            for copy in list(self._copies.get(request_id, ())):
                self._feed(copy, frame)

    def _feed(self, stream: OpenStream, frame: Frame) -> None:
        outcome = stream.feed(frame, self._clock.monotonic())
        if outcome is Outcome.GAP:
            self._ask_replay(stream)
        elif outcome is Outcome.END and stream.phase is StreamPhase.ABORTED and stream.accepted:
            self.finish(stream)

    def resume_point(self, request_id: str) -> ResumePoint | None:
        """Return the tokens that the client has; None for a stream that is not here."""
        stream = self._streams.get(request_id)
        if stream is None or stream.ended:
            return None
        if stream.phase is StreamPhase.ABORTED or stream.cancellation is not None:
            return ResumePoint(open=False)
        return ResumePoint(token_ids=tuple(stream.reader.token_ids))

    async def _sweep(self) -> None:
        """Check the streams for conditions that depend on time."""
        if not self._streams and not self._copies and not self._proxy_subscriptions:
            self._has_streams.clear()
            await self._has_streams.wait()
            return
        now_s = self._clock.monotonic()
        for stream in [stream for stream in self if stream.look_at_s <= now_s]:
            try:
                self._look_after(stream, now_s)
                stream.look_at_s = self._next_look_s(stream, now_s)
            except Exception:  # noqa: BLE001 (it is told, and the others go on)
                _log.exception("a stream failed", extra={"request_id": stream.request_id})
        await self._close_idle_proxies()

    def _look_after(self, stream: OpenStream, now_s: float) -> None:
        config, replay = self._config, stream.replay
        silent_s = now_s - max(stream.last_frame_s, replay.not_before_s)
        sending_since_s = stream.client.sending_since_s
        if (
            stream.phase is not StreamPhase.ABORTED
            and sending_since_s is not None
            and now_s - sending_since_s > config.client_stall_timeout_s
        ):
            stream.client.drop(ClientEnd.SLOW_CLIENT)
        elif stream.ended:
            return
        elif (
            stream.phase is StreamPhase.DETACHED
            and stream.detached_until_s is not None
            and now_s >= stream.detached_until_s
            and stream.request_id not in self._copies
        ):
            self.abort(stream, ClientEnd.DISCONNECTED)
        elif stream.cancellation is not None:
            self._sweep_cancelled(stream, stream.cancellation, now_s)
        elif now_s - stream.opened_s > config.request_timeout_s + _SWEEP_S:
            self._time_out(stream)
        elif (
            replay.is_needed or stream.reader.started is not None or stream.reader.waits_for_missing
        ):
            if silent_s > config.replay_probe_s:
                self._ask_replay(stream)
        elif stream.accepted and silent_s > _LOOK_UP_S and self._replays.is_due(stream):
            self._tasks.spawn(self._replays.look_up(stream), "look a stream up")

    def _next_look_s(self, stream: OpenStream, now_s: float) -> float:
        """Return the earliest time at which time alone may change the stream. Until then it is not
        checked, since a check costs as much as sending a token.
        """
        if stream.cancellation is not None:
            return now_s
        config = self._config
        due_s = (stream.client.sending_since_s or now_s) + config.client_stall_timeout_s
        if stream.ended:
            return due_s
        heard_s = max(stream.last_frame_s, stream.replay.not_before_s)
        if stream.phase is StreamPhase.DETACHED and stream.detached_until_s is not None:
            due_s = min(due_s, stream.detached_until_s)
        return min(
            due_s,
            heard_s + min(config.replay_probe_s, _LOOK_UP_S),
            stream.opened_s + config.request_timeout_s,
        )

    def _time_out(self, stream: OpenStream) -> None:
        self._send_cancel_to_bus(stream, CancelReason.DEADLINE)
        message = f"No end after {self._config.request_timeout_s:g} s; it was cancelled."
        self._end(stream, Failed(code="request_timeout", message=message, retryable=True))

    def _sweep_cancelled(
        self, stream: OpenStream, cancellation: Cancellation, now_s: float
    ) -> None:
        if not stream.accepted:
            return
        if now_s >= cancellation.give_up_s:
            self._end(stream, Cancelled(num_tokens=stream.reader.next_index))
        elif now_s >= stream.replay.not_before_s:
            if stream.is_copy:
                self._ask_replay(stream)  # its end may have been sent to the others only
            self._send_cancel(stream, cancellation)

    def _end(self, stream: OpenStream, frame: TerminalFrame) -> None:
        stream.reader.end(frame)
        stream.wake()
        if stream.phase is StreamPhase.ABORTED and stream.accepted:
            self.finish(stream)

    def _send_cancel(self, stream: OpenStream, cancellation: Cancellation) -> None:
        stream.replay.not_before_s = self._clock.monotonic() + _CANCEL_INTERVAL_S
        self._send_cancel_to_bus(stream, cancellation.reason)

    def _send_cancel_to_bus(self, stream: OpenStream, reason: CancelReason) -> None:
        cancel = Cancel(request_id=stream.request_id, reason=reason)
        self._tasks.spawn(self._publish_cancel(cancel), "cancel")

    async def _publish_cancel(self, cancel: Cancel) -> None:
        try:
            await self._bus.control.cancel(cancel)
        except (MillraceError, TimeoutError) as error:
            _log.warning(
                "a cancel could not be sent; retrying",
                extra={"request_id": cancel.request_id, "why": str(error)},
            )

    def _on_reconnect(self) -> None:
        for stream in list(self):
            stream.replay.is_needed = True
            self._ask_replay(stream)

    def _ask_replay(self, stream: OpenStream) -> None:
        if self._replays.is_due(stream):
            self._tasks.spawn(self._replays.ask(stream), "ask for a replay")

    async def _close_idle_proxies(self) -> None:
        """Stop standing in for gateways without remaining streams."""
        for gateway_id in list(self._proxy_subscriptions):
            # Evaluated anew each time: while one is closed, a stream of another may be taken over.
            if any(stream.job.reply == gateway_id for stream in self):
                continue
            for subscription in self._proxy_subscriptions.pop(gateway_id).values():
                await self._close_proxy(subscription)

    async def _close_proxy(self, subscription: Subscription) -> None:
        try:
            await subscription.close()
        except MillraceError as error:
            _log.warning(
                "a subscription for another gateway could not be closed",
                extra={"why": error.message},
            )

"""Flusher of frames to the bus: some at once, tokens in batches, few messages under load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from millrace.bus.frames import FrameStreams
from millrace.runtime.clock import Clock
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import Frame
from millrace.workers.host.generations.frames import pop_unflushed
from millrace.workers.host.generations.generation import Generation
from millrace.workers.host.generations.state import Listener

logger = logging.getLogger(__name__)


# The engine gathers tokens for as long itself (``workers.process.loop``). Tokens that arrive a
# moment after the others need not wait for the clock.
_SLACK_S = 0.002


class Flusher:
    """Sender of frames in order, in one envelope per listener if the listener reads envelopes.

    New tokens of marked generations are sent together, at most once every ``interval_s``. After a
    pause the next tokens are sent at once. The owner keeps ``run`` running while the flusher is in
    use.
    """

    def __init__(self, frames: FrameStreams, clock: Clock, interval_s: float) -> None:
        self._frames = frames
        self._clock = clock
        self._interval_s = interval_s
        self._last_flush_s = -interval_s
        self._marked: dict[Generation, None] = {}
        self._has_marked = asyncio.Event()
        self._outgoing: dict[Listener, list[tuple[str, Frame]]] = {}
        self._has_outgoing = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []

    def mark(self, generation: Generation) -> None:
        """Mark a generation whose new tokens are sent with the next flush."""
        if not self._marked:
            self._has_marked.set()
        self._marked[generation] = None

    def flush_now(self, generation: Generation, *after: Frame) -> None:
        """Send the generation's unsent tokens at once, then the frames ``after`` them."""
        self._marked.pop(generation, None)
        self.post(generation, [*pop_unflushed(generation), *after])

    def post(self, generation: Generation, frames: Sequence[Frame]) -> None:
        """Send frames to all listeners of a generation at once."""
        for listener in generation.delivery.listeners:
            self.post_to(listener, generation.request_id, frames)

    def post_to(self, listener: Listener, request_id: str, frames: Iterable[Frame]) -> None:
        """Send frames of a request to one listener at once."""
        outgoing = self._outgoing.get(listener)
        if outgoing is None:
            outgoing = self._outgoing[listener] = []
        outgoing.extend((request_id, frame) for frame in frames)
        self._has_outgoing.set()

    def forget(self, generation: Generation) -> None:
        """Send nothing more for a generation, and drop its frames that the bus does not have
        yet.
        """
        self._marked.pop(generation, None)
        for listener in generation.delivery.listeners:
            posted = self._outgoing.get(listener)
            if posted:
                posted[:] = [entry for entry in posted if entry[0] != generation.request_id]

    async def published(self) -> None:
        """Wait until the bus has all frames posted before this call."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._has_outgoing.set()
        await waiter

    async def run(self) -> None:
        """Send frames until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._flush_marked(), name="flush")
            group.create_task(self._send_posted(), name="send")

    async def _flush_marked(self) -> None:
        while True:
            await self._has_marked.wait()
            wait_s = self._last_flush_s + self._interval_s - self._clock.monotonic()
            if wait_s > _SLACK_S:
                await self._clock.sleep(wait_s)
            self._has_marked.clear()
            self._last_flush_s = self._clock.monotonic()
            marked, self._marked = self._marked, {}
            for generation in marked:
                self.post(generation, pop_unflushed(generation))

    async def _send_posted(self) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            outgoing, self._outgoing = self._outgoing, {}
            waiters, self._waiters = self._waiters, []
            for listener, frames in outgoing.items():
                if not await self._send(listener, frames) and len(frames) > 1:
                    # One of the frames is at fault; sending the others twice does no harm.
                    for frame in frames:
                        await self._send(listener, [frame])
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def _send(self, listener: Listener, frames: Sequence[tuple[str, Frame]]) -> bool:
        """Send frames and return whether the bus took them. A listener that sees a gap asks for a
        replay.
        """
        try:
            await self._frames.publish(
                listener.reply, frames, batch=listener.batch, as_json=listener.as_json
            )
        except MillraceError as error:
            logger.warning(
                "frames could not be sent", extra={"listener": listener.reply, "code": error.code}
            )
            return False
        return True

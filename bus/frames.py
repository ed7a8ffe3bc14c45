"""Frame streams over a transport: single frames, envelopes, JSON."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from millrace.bus import codec, subjects
from millrace.bus.transport import Message, Subscription, Transport
from millrace.schemas.errors import MalformedMessageError, PayloadTooLargeError
from millrace.schemas.frames import Addressed, Frame, FrameBatch
from millrace.schemas.jobs import Job

logger = logging.getLogger(__name__)


class FrameStreams:
    """Frame streams: single frames on ``tok.<reply>.<request>``, envelopes on ``tok.<reply>._``.

    Delivery is at most once and in order. It never waits for a reader. Messages that are not frames
    are dropped, and the stream goes on.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def publish(
        self,
        reply: str,
        frames: Sequence[tuple[str, Frame]],
        *,
        batch: bool = False,
        as_json: bool = False,
    ) -> None:
        """Send (request_id, frame) pairs to one listener; as one envelope if ``batch``.

        Frames sent while the server is unreachable may be lost: readers ask for a replay. Raises
        PayloadTooLargeError if a single frame exceeds the server's limit.
        """
        if batch and len(frames) > 1:
            await self._publish_envelope(reply, frames, as_json=as_json)
            return
        for request_id, frame in frames:
            await self._send(subjects.frames(reply, request_id), frame, as_json=as_json)

    async def answer(self, job: Job, *frames: Frame) -> None:
        """Publish frames to a job's listener, if it has one, in the job's encoding."""
        if job.reply:
            await self.publish(
                job.reply,
                [(job.request_id, frame) for frame in frames],
                batch=job.batch_frames,
                as_json=job.frames_as_json,
            )

    async def _publish_envelope(
        self, reply: str, frames: Sequence[tuple[str, Frame]], *, as_json: bool
    ) -> None:
        envelope = FrameBatch(tuple(Addressed(request_id, frame) for request_id, frame in frames))
        try:
            await self._send(subjects.envelope(reply), envelope, as_json=as_json)
        except PayloadTooLargeError:
            middle = len(frames) // 2
            for half in (frames[:middle], frames[middle:]):
                await self.publish(reply, half, batch=True, as_json=as_json)

    async def _send(self, subject: str, message: Frame | FrameBatch, *, as_json: bool) -> None:
        if as_json:
            await self._transport.publish(subject, codec.encode_json(message), codec.JSON_HEADERS)
        else:
            await self._transport.publish(subject, codec.encode(message))

    async def subscribe(self, reply: str, on_frame: Callable[[str, Frame], None]) -> Subscription:
        """Subscribe to all frames for ``reply``. Every listener of a name gets all of them."""
        envelope_subject = subjects.envelope(reply)

        def deliver(request_id: str, frame: Frame) -> None:
            try:
                on_frame(request_id, frame)
            except Exception:
                logger.exception("a frame's reader failed", extra={"request_id": request_id})

        def on_message(message: Message) -> None:
            try:
                if message.subject == envelope_subject:
                    batch = codec.FRAME_BATCH.decode(message.payload, message.content_type)
                    for addressed in batch.frames:
                        deliver(addressed.request_id, addressed.frame)
                    return
                request_id = subjects.last_token(message.subject)
                frame = codec.FRAME.decode(message.payload, message.content_type)
            except (MalformedMessageError, ValueError):
                logger.warning(
                    "dropped a message that is not a frame",
                    extra={"subject": message.subject, "size_bytes": len(message.payload)},
                )
                return
            deliver(request_id, frame)

        return await self._transport.subscribe(subjects.frames_of(reply), on_message)

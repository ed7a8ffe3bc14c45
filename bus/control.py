"""Commands, cancels, resume points, handovers, queue status and queries over a transport."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence

from millrace.bus import codec, subjects
from millrace.bus.codec import Codec, T
from millrace.bus.transport import Message, Subscription, Transport, listen, log_dropped
from millrace.runtime.tasks import Tasks
from millrace.schemas.control import (
    Cancel,
    Ended,
    HandedOver,
    Held,
    MoveStreams,
    Prefilled,
    Pulled,
    QueueStatus,
    ResultError,
    ResumePoint,
    TelemetryAnswer,
    TelemetryQuery,
    WhichHeld,
    WorkerCommand,
    WorkerReply,
)
from millrace.schemas.errors import BusForbiddenError, MalformedMessageError, MillraceError
from millrace.schemas.jobs import MAX_NAME_CHARACTERS, JobResult

logger = logging.getLogger(__name__)

# Payload of a handover request that only asks if the gateway is alive.
_ONLY_LOOKING = b"?"
_MAX_IDS_PER_QUESTION = 256


async def unless_forbidden(
    subscribing: Awaitable[Subscription], purpose: str
) -> list[Subscription]:
    """Return an optional subscription; none, with a warning, if the server forbids it.

    Permissions of the NATS server may be of an earlier version.
    """
    try:
        return [await subscribing]
    except BusForbiddenError as error:
        logger.warning(
            "this process cannot %s: no permission", purpose, extra={"reason": error.message}
        )
        return []


class _Server:
    """Subscription with the answers in preparation; closing it cancels them."""

    def __init__(self) -> None:
        self.subscription: Subscription | None = None
        self.answers = Tasks()

    async def close(self) -> None:
        if self.subscription is not None:
            await self.subscription.close()
        await self.answers.close()


class Control:
    """Control messages: requests to workers, gateways and schedulers, cancels and queue status.

    Subjects are ``ctl.*``, ``resume.*`` and ``handover.*``.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    # --- workers ---

    async def command(
        self, worker_id: str, command: WorkerCommand, timeout_s: float
    ) -> WorkerReply | None:
        """Send a command and return the worker's reply; None after ``timeout_s`` without one.

        Raises PayloadTooLargeError.
        """
        subject = subjects.worker_commands(worker_id)
        answer = await self._transport.request(subject, codec.encode(command), timeout_s)
        return self._read(codec.WORKER_REPLY, answer)

    async def serve_commands(
        self, worker_id: str, handler: Callable[[WorkerCommand], Awaitable[WorkerReply]]
    ) -> Subscription:
        """Serve a worker's commands.

        Handlers start in the order of the commands and may overlap.
        """

        async def answer(message: Message) -> None:
            try:
                command = codec.WORKER_COMMAND.decode(message.payload, message.content_type)
                reply = await handler(command)
            except MalformedMessageError as error:
                reply = WorkerReply(ok=False, reason="bad_request", message=error.message)
            except Exception as error:
                logger.exception("a command failed", extra={"worker_id": worker_id})
                reply = WorkerReply(ok=False, reason="failed", message=type(error).__name__)
            await self._answer(message, reply)

        return await self._serve(subjects.worker_commands(worker_id), answer)

    # --- cancels ---

    async def cancel(self, cancel: Cancel) -> None:
        """Tell every scheduler and worker to stop a request.

        Other programs may publish an empty message on the request's subject instead.
        """
        await self._transport.publish(subjects.cancel(cancel.request_id), codec.encode(cancel))

    async def subscribe_cancels(self, on_cancel: Callable[[Cancel], None]) -> Subscription:
        def read(message: Message) -> Cancel:
            request_id = subjects.last_token(message.subject)
            if not message.payload:
                return Cancel(request_id=request_id)
            cancel = codec.CANCEL.decode(message.payload, message.content_type)
            if cancel.request_id != request_id:
                raise MalformedMessageError("the cancel is not for the request in its subject")
            return cancel

        return await listen(self._transport, subjects.ALL_CANCELS, read, on_cancel)

    async def subscribe_owner_cancels(self, on_cancel: Callable[[Cancel], None]) -> Subscription:
        """Subscribe to cancels by tenants' services.

        NATS permissions restrict a service to its tenant's subjects. The payload is not read.
        """

        def read(message: Message) -> Cancel:
            tenant, request_id = _tenant_and_request(message.subject)
            if max(len(tenant), len(request_id)) > MAX_NAME_CHARACTERS:
                raise MalformedMessageError("No tenant and no job has a name that long.")
            return Cancel(request_id=request_id, tenant=tenant)

        return await listen(self._transport, subjects.ALL_OWNER_CANCELS, read, on_cancel)

    # --- results ---

    async def serve_results(
        self, handler: Callable[[str, str], Awaitable[JobResult]]
    ) -> Subscription:
        """Serve requests for stored results.

        The handler gets a tenant and a request id. It raises a MillraceError if there is no result.
        Several processes may serve: each request goes to one of them. The answer is JSON, like
        stored results, unless the request's Content-Type is MessagePack.
        """

        async def answer(message: Message) -> None:
            try:
                found = await handler(*_tenant_and_request(message.subject))
                await self._answer_result(message, found)
            except MillraceError as error:
                await self._answer_result(message, ResultError.of(error))
            except Exception as error:
                logger.exception("a result could not be looked up")
                failed = MillraceError(
                    f"The result could not be looked up: {type(error).__name__}."
                )
                await self._answer_result(message, ResultError.of(failed))

        subject, group = subjects.ALL_RESULT_REQUESTS, subjects.SCHEDULER_GROUP
        return await self._serve(subject, answer, group)

    async def _answer_result(self, message: Message, found: JobResult | ResultError) -> None:
        if not message.reply:
            return
        if codec.is_msgpack(message.content_type):
            payload, headers = codec.encode(found), codec.MSGPACK_HEADERS
        else:
            payload, headers = codec.encode_json(found), codec.JSON_HEADERS
        await self._transport.publish(message.reply, payload, headers)

    # --- ends ---

    async def publish_ended(self, ended: Ended) -> None:
        """Tell every scheduler which requests a worker no longer holds."""
        await self._transport.publish(subjects.ended(ended.worker_id), codec.encode(ended))

    async def subscribe_ended(self, on_ended: Callable[[Ended], None]) -> Subscription:
        return await listen(self._transport, subjects.ALL_ENDED, _decoding(codec.ENDED), on_ended)

    # --- moves ---

    async def publish_prefilled(self, prefilled: Prefilled) -> None:
        """Tell every scheduler which requests may go on at another worker."""
        subject = subjects.prefilled(prefilled.worker_id)
        await self._transport.publish(subject, codec.encode(prefilled))

    async def subscribe_prefilled(self, on_prefilled: Callable[[Prefilled], None]) -> Subscription:
        return await listen(
            self._transport, subjects.ALL_PREFILLED, _decoding(codec.PREFILLED), on_prefilled
        )

    async def publish_pulled(self, pulled: Pulled) -> None:
        """Tell a worker which requests no longer need its KV cache."""
        await self._transport.publish(subjects.pulled(pulled.worker_id), codec.encode(pulled))

    async def subscribe_pulled(
        self, worker_id: str, on_pulled: Callable[[Pulled], None]
    ) -> Subscription:
        """Subscribe to other workers' messages about one worker's KV cache."""

        return await listen(
            self._transport, subjects.pulled(worker_id), _decoding(codec.PULLED), on_pulled
        )

    async def move_streams(self, move: MoveStreams) -> None:
        """Ask the schedulers to move a worker's streams to other workers."""
        await self._transport.publish(subjects.move_streams(move.worker_id), codec.encode(move))

    async def subscribe_moves(self, on_move: Callable[[MoveStreams], None]) -> Subscription:
        return await listen(
            self._transport, subjects.ALL_MOVES, _decoding(codec.MOVE_STREAMS), on_move
        )

    # --- resume points ---

    async def resume_point(
        self, reply: str, request_id: str, timeout_s: float
    ) -> ResumePoint | None:
        """Ask which tokens the client has; None without an answer within ``timeout_s``."""
        answer = await self._transport.request(subjects.resume(reply, request_id), b"", timeout_s)
        return self._read(codec.RESUME_POINT, answer)

    async def serve_resume_points(
        self,
        reply: str,
        handler: Callable[[str], ResumePoint | None],
        holds: Callable[[str], bool] | None = None,
    ) -> Subscription:
        """Serve resume points for the streams of ``reply``.

        The handler gets a request id and returns None to stay silent. Several processes may serve
        one name: the first answer counts. ``holds`` answers ``held_requests``. A listener without
        ``holds`` is not asked.
        """

        async def answer(message: Message) -> None:
            if holds is None or not message.payload:
                await self._answer_known(message, handler)
                return
            question = self._read(codec.WHICH_HELD, message)
            held = tuple(filter(holds, question.request_ids)) if question is not None else ()
            if held:
                await self._answer(message, Held(request_ids=held))

        return await self._serve(subjects.resumes_of(reply), answer)

    async def held_requests(
        self, reply: str, request_ids: Sequence[str], timeout_s: float
    ) -> frozenset[str]:
        """Return which requests of a gateway are held, by it or by a gateway that took them over.

        Raises BusUnavailableError without an answer.
        """
        held: set[str] = set()
        rest = list(request_ids)
        while rest:
            asked = rest[:_MAX_IDS_PER_QUESTION]
            payload = codec.encode(WhichHeld(request_ids=tuple(asked)))
            message = await self._transport.probe(
                subjects.resume(reply, asked[0]), payload, timeout_s
            )
            answer = self._read(codec.HELD, message)
            if answer is None:
                rest = rest[len(asked) :]
                continue
            # A gateway of an older version answers for the request in the subject.
            answered = set(answer.request_ids) & set(asked) or {asked[0]}
            held |= answered
            rest = [request_id for request_id in rest if request_id not in answered]
        return frozenset(held)

    async def is_held(self, reply: str, request_id: str, timeout_s: float) -> bool:
        """Return whether a gateway (also of an older version) or another listener holds a request.

        Raises BusUnavailableError if that is unknown.
        """
        subject = subjects.resume(reply, request_id)
        return await self._transport.probe(subject, b"", timeout_s) is not None

    # --- handovers ---

    async def hand_over(
        self, gateway_id: str, request_id: str, timeout_s: float
    ) -> HandedOver | None:
        """Ask a gateway to hand over a stream.

        Returns what it had read of the stream, or None if it does not hold it. Without a listener
        this returns at once.
        """
        subject = subjects.handover(gateway_id, request_id)
        answer = await self._transport.request(subject, b"", timeout_s)
        return self._read(codec.HANDED_OVER, answer)

    async def is_gateway_there(self, gateway_id: str, request_id: str, timeout_s: float) -> bool:
        """Return whether a gateway is alive. It keeps its stream.

        Without a listener this returns at once.
        """
        subject = subjects.handover(gateway_id, request_id)
        answer = await self._transport.request(subject, _ONLY_LOOKING, timeout_s)
        return self._read(codec.HANDED_OVER, answer) is not None

    async def serve_handovers(
        self, gateway_id: str, handler: Callable[[str], HandedOver | None]
    ) -> Subscription:
        """Serve handovers. The handler gets a request id and returns None to stay silent."""

        async def answer(message: Message) -> None:
            if message.payload == _ONLY_LOOKING:
                await self._answer(message, HandedOver())
            else:
                await self._answer_known(message, handler)

        return await self._serve(subjects.handovers_of(gateway_id), answer)

    # --- queue status ---

    async def publish_queue_status(self, status: QueueStatus) -> None:
        await self._transport.publish(subjects.queue_status(status.model), codec.encode(status))

    async def subscribe_queue_status(
        self, on_status: Callable[[QueueStatus], None]
    ) -> Subscription:
        return await listen(
            self._transport, subjects.ALL_QUEUE_STATUS, _decoding(codec.QUEUE_STATUS), on_status
        )

    # --- telemetry ---

    async def query_telemetry(
        self, query: TelemetryQuery, timeout_s: float
    ) -> TelemetryAnswer | None:
        answer = await self._transport.request(subjects.TELEMETRY, codec.encode(query), timeout_s)
        return self._read(codec.TELEMETRY_ANSWER, answer)

    async def serve_telemetry(
        self, handler: Callable[[TelemetryQuery], Awaitable[TelemetryAnswer]]
    ) -> Subscription:
        """Serve telemetry queries. Several processes may serve: each query goes to one of them."""

        async def answer(message: Message) -> None:
            try:
                query = codec.TELEMETRY_QUERY.decode(message.payload, message.content_type)
                found = await handler(query)
            except MalformedMessageError as error:
                found = TelemetryAnswer(error=error.message)
            except Exception as error:
                logger.exception("a telemetry query failed")
                found = TelemetryAnswer(error=type(error).__name__)
            await self._answer(message, found)

        return await self._serve(subjects.TELEMETRY, answer, group=subjects.TELEMETRY_GROUP)

    # --- shared ---

    async def _serve(
        self,
        subject: str,
        answer: Callable[[Message], Coroutine[None, None, None]],
        group: str = "",
    ) -> Subscription:
        server = _Server()

        def on_message(message: Message) -> None:
            server.answers.spawn(answer(message), f"answer {subject}")

        server.subscription = await self._transport.subscribe(subject, on_message, group)
        return server

    async def _answer_known(
        self, message: Message, handler: Callable[[str], object | None]
    ) -> None:
        try:
            known = handler(subjects.last_token(message.subject))
        except Exception:
            logger.exception("a request could not be answered", extra={"subject": message.subject})
            return
        if known is not None:
            await self._answer(message, known)

    async def _answer(self, message: Message, reply: object) -> None:
        if not message.reply:
            return
        encoded = codec.encoded(reply, as_json=codec.is_json(message.content_type))
        await self._transport.publish(message.reply, *encoded)

    def _read(self, kind: Codec[T], message: Message | None) -> T | None:
        if message is None:
            return None
        try:
            return kind.decode(message.payload, message.content_type)
        except MalformedMessageError:
            log_dropped(message)
            return None


def _decoding(kind: Codec[T]) -> Callable[[Message], T]:
    return lambda message: kind.decode(message.payload, message.content_type)


def _tenant_and_request(subject: str) -> tuple[str, str]:
    """Return the tenant and request id at a subject's end. Raises MalformedMessageError."""
    try:
        tenant, request_id = subjects.tenant_and_request(subject)
    except ValueError:
        tenant = request_id = ""
    if not tenant or not request_id:
        raise MalformedMessageError(
            "The subject must end in a tenant and a request id, each percent-encoded as one token: "
            "letters, digits, - and _ stay, a dot is %2E (in capitals)."
        )
    return tenant, request_id

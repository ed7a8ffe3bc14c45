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

# In a request for a handover: nothing is to be let go of.
_ONLY_LOOKING = b"?"
_MAX_IDS_PER_QUESTION = 256


async def unless_forbidden(
    subscribing: Awaitable[Subscription], purpose: str
) -> list[Subscription]:
    """A subscription that a part can do without; none, with a warning, if the permissions of the
    NATS server are of an earlier version and forbid it."""
    try:
        return [await subscribing]
    except BusForbiddenError as error:
        logger.warning(
            "this process cannot %s: no permission", purpose, extra={"reason": error.message}
        )
        return []


class _Server:
    """A subscription and the answers that are being made for it; closing cancels those."""

    def __init__(self) -> None:
        self.subscription: Subscription | None = None
        self.answers = Tasks()

    async def close(self) -> None:
        if self.subscription is not None:
            await self.subscription.close()
        await self.answers.close()


class Control:
    """Requests to workers, gateways and schedulers, cancels and queue status for everybody, on
    ``ctl.*``, ``resume.*`` and ``handover.*``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    # --- workers ---

    async def command(
        self, worker_id: str, command: WorkerCommand, timeout_s: float
    ) -> WorkerReply | None:
        """A worker's answer, or None if it gave none in time. Raises PayloadTooLargeError for a
        command that the server would not take."""
        subject = subjects.worker_commands(worker_id)
        answer = await self._transport.request(subject, codec.encode(command), timeout_s)
        return self._read(codec.WORKER_REPLY, answer)

    async def serve_commands(
        self, worker_id: str, handler: Callable[[WorkerCommand], Awaitable[WorkerReply]]
    ) -> Subscription:
        """Handlers start in the order of the commands and may overlap."""

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
        """Tell every scheduler and worker to stop a request. Others may publish an empty message on
        the request's subject instead."""
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
        """Cancels by the services of tenants. NATS permissions hold a service to its tenant's
        subjects; the payload is not read."""

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
        """Answer requests for stored results; the handler gets a tenant and a request id, and
        raises a MillraceError where there is no result. Several processes may serve; each request
        goes to one of them. The answer is JSON, as stored results are, unless the Content-Type of
        the request is MessagePack's."""

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
        """Tell every scheduler which requests a worker holds no more."""
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
        """Tell a worker which requests need nothing of its KV cache any more."""
        await self._transport.publish(subjects.pulled(pulled.worker_id), codec.encode(pulled))

    async def subscribe_pulled(
        self, worker_id: str, on_pulled: Callable[[Pulled], None]
    ) -> Subscription:
        """What others say of the KV cache of one worker."""

        return await listen(
            self._transport, subjects.pulled(worker_id), _decoding(codec.PULLED), on_pulled
        )

    async def move_streams(self, move: MoveStreams) -> None:
        """Tell every scheduler to have others go on with what a worker runs."""
        await self._transport.publish(subjects.move_streams(move.worker_id), codec.encode(move))

    async def subscribe_moves(self, on_move: Callable[[MoveStreams], None]) -> Subscription:
        return await listen(
            self._transport, subjects.ALL_MOVES, _decoding(codec.MOVE_STREAMS), on_move
        )

    # --- resume points ---

    async def resume_point(
        self, reply: str, request_id: str, timeout_s: float
    ) -> ResumePoint | None:
        """What the client has, or None if nobody answered in time."""
        answer = await self._transport.request(subjects.resume(reply, request_id), b"", timeout_s)
        return self._read(codec.RESUME_POINT, answer)

    async def serve_resume_points(
        self,
        reply: str,
        handler: Callable[[str], ResumePoint | None],
        holds: Callable[[str], bool] | None = None,
    ) -> Subscription:
        """Answer for the streams of ``reply``, whosever name that is; the handler gets a request
        id, None stays silent. Several may serve one name: the first answer is taken. ``holds``
        answers ``held_requests``; a listener without it is not asked."""

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
        """Ask which requests of a gateway are held, by this gateway or by a gateway that took them
        over. Raises BusUnavailableError without an answer."""
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
        """Whether a gateway, also of an older version, or another listener answers for a request.
        Raises BusUnavailableError if that cannot be known."""
        subject = subjects.resume(reply, request_id)
        return await self._transport.probe(subject, b"", timeout_s) is not None

    # --- handovers ---

    async def hand_over(
        self, gateway_id: str, request_id: str, timeout_s: float
    ) -> HandedOver | None:
        """Ask the gateway that holds a stream to let go of it; what it had read of it, or None if
        it does not hold it. That nobody is there is known at once."""
        subject = subjects.handover(gateway_id, request_id)
        answer = await self._transport.request(subject, b"", timeout_s)
        return self._read(codec.HANDED_OVER, answer)

    async def is_gateway_there(self, gateway_id: str, request_id: str, timeout_s: float) -> bool:
        """Whether the gateway that holds a stream is alive; it goes on holding it. That nobody is
        there is known at once."""
        subject = subjects.handover(gateway_id, request_id)
        answer = await self._transport.request(subject, _ONLY_LOOKING, timeout_s)
        return self._read(codec.HANDED_OVER, answer) is not None

    async def serve_handovers(
        self, gateway_id: str, handler: Callable[[str], HandedOver | None]
    ) -> Subscription:
        """Let go of streams for those who ask; the handler gets a request id, None stays silent."""

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
        """Several processes may serve; each query goes to one of them."""

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
            logger.exception("a question went unanswered", extra={"subject": message.subject})
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
    """Raises MalformedMessageError for a subject that does not end in a tenant and a request id."""
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

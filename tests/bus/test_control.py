"""Commands, cancels, resume points, status and queries, on memory and on nats-server alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import pytest

from millrace.bus import codec, subjects
from millrace.bus.api import Bus
from millrace.schemas.control import (
    Cancel,
    CancelReason,
    Dispatch,
    Drain,
    Ended,
    HandedOver,
    MoveStreams,
    Prefilled,
    Pulled,
    QueueStatus,
    Replay,
    ResultError,
    ResumePoint,
    SetRole,
    TelemetryAnswer,
    TelemetryQuery,
    WorkerCommand,
    WorkerReply,
)
from millrace.schemas.engines import WorkerRole
from millrace.schemas.errors import PayloadTooLargeError, ResultNotReadyError
from millrace.schemas.jobs import Job, JobResult
from tests.bus.conftest import Broker
from tests.support.waiting import eventually

JOB = Job(request_id="r1", model="demo", prompt_token_ids=(1, 2))
COMMANDS: list[WorkerCommand] = [
    Dispatch(job=JOB, epoch=1, lease="$JS.ACK.x", resume_token_ids=(5,)),
    Cancel(request_id="r1", reason=CancelReason.DEADLINE, below_epoch=2),
    Replay(request_id="r1", from_index=4, reply="g"),
    Drain(reason="update"),
    SetRole(role=WorkerRole.PREFILL, from_role=WorkerRole.DECODE),
]


class TestCommands:
    async def test_are_answered(self, bus: Bus, broker: Broker) -> None:
        got: list[WorkerCommand] = []

        async def handle(command: WorkerCommand) -> WorkerReply:
            got.append(command)
            return WorkerReply(ok=False, reason="full", message=f"{len(got)}")

        await (await broker.connect("worker")).control.serve_commands("w.1", handle)
        for number, command in enumerate(COMMANDS, start=1):
            reply = await bus.control.command("w.1", command, timeout_s=5.0)
            assert reply == WorkerReply(ok=False, reason="full", message=f"{number}")
        assert got == COMMANDS

    async def test_nobody_there_is_known_at_once(self, bus: Bus) -> None:
        started_s = time.monotonic()
        assert await bus.control.command("gone", Drain(), timeout_s=5.0) is None
        assert time.monotonic() - started_s < 1.0

    async def test_no_answer_in_time(self, bus: Bus) -> None:
        async def handle(command: WorkerCommand) -> WorkerReply:
            await asyncio.Event().wait()
            return WorkerReply(ok=True)

        subscription = await bus.control.serve_commands("w", handle)
        assert await bus.control.command("w", Drain(), timeout_s=0.05) is None
        await subscription.close()

    async def test_a_slow_command_does_not_hold_up_the_next(self, bus: Bus) -> None:
        release = asyncio.Event()

        async def handle(command: WorkerCommand) -> WorkerReply:
            if isinstance(command, Drain):
                await release.wait()
            else:
                release.set()
            return WorkerReply(ok=True)

        await bus.control.serve_commands("w", handle)
        slow = asyncio.ensure_future(bus.control.command("w", Drain(), timeout_s=5.0))
        await asyncio.sleep(0.01)
        assert await bus.control.command("w", Cancel(request_id="r"), timeout_s=5.0)
        assert await slow == WorkerReply(ok=True)

    async def test_a_failing_handler_still_answers(self, bus: Bus) -> None:
        async def handle(command: WorkerCommand) -> WorkerReply:
            raise RuntimeError("secret prompt")

        await bus.control.serve_commands("w", handle)
        reply = await bus.control.command("w", Drain(), timeout_s=5.0)
        assert reply == WorkerReply(ok=False, reason="failed", message="RuntimeError")

    async def test_a_command_too_large(self, bus: Bus) -> None:
        job = Job(request_id="r", model="m", prompt="x" * bus.max_payload_bytes)
        with pytest.raises(PayloadTooLargeError):
            await bus.control.command("w", Dispatch(job=job, epoch=1, lease="l"), timeout_s=1.0)


class TestBroadcasts:
    async def test_cancels_reach_everybody(self, bus: Bus, broker: Broker) -> None:
        seen: list[list[Cancel]] = [[], []]
        for cancels in seen:
            other = await broker.connect("listener")
            await other.control.subscribe_cancels(cancels.append)
        cancel = Cancel(request_id="r.1 *", reason=CancelReason.DISCONNECT)
        await bus.control.cancel(cancel)
        await eventually(lambda: seen == [[cancel], [cancel]])

    async def test_cancels_of_others(self, bus: Bus, broker: Broker) -> None:
        seen: list[Cancel] = []
        await bus.control.subscribe_cancels(seen.append)
        as_json = {"Content-Type": "application/json"}
        body = msgspec.json.encode(Cancel(request_id="r2"))
        await broker.publish("ctl.cancel.r3", body, as_json)
        await broker.publish("ctl.cancel.r3", b"nonsense")
        await broker.publish("ctl.cancel.r1", b"")
        await broker.publish("ctl.cancel.r2", body, as_json)
        await eventually(lambda: len(seen) == 2)
        assert seen == [Cancel(request_id="r1"), Cancel(request_id="r2")]

    async def test_cancels_of_services(self, bus: Bus, broker: Broker) -> None:
        seen: list[Cancel] = []
        own: list[Cancel] = []
        await bus.control.subscribe_owner_cancels(seen.append)
        await bus.control.subscribe_cancels(own.append)
        await broker.publish("ctl.cancel.%.r1", b"")
        await broker.publish("ctl.cancel.acme.r%zz", b"")
        await broker.publish(f"ctl.cancel.acme.{'r' * 129}", b"")
        await broker.publish(f"ctl.cancel.{'a' * 129}.r1", b"")
        await broker.publish("ctl.cancel.acme.r%2E1", b'{"reason": "superseded"}')
        await broker.publish("ctl.cancel.a%20b.r2", b"")
        await eventually(lambda: len(seen) == 2)
        assert seen == [
            Cancel(request_id="r.1", tenant="acme"),
            Cancel(request_id="r2", tenant="a b"),
        ]
        assert not own

    async def test_queue_status_and_ends(self, bus: Bus, broker: Broker) -> None:
        statuses: list[QueueStatus] = []
        ends: list[Ended] = []
        other = await broker.connect("listener")
        await other.control.subscribe_queue_status(statuses.append)
        await other.control.subscribe_ended(ends.append)
        status = QueueStatus(model="m/1", num_queued=3, bound=9, num_workers=2)
        ended = Ended(worker_id="w/1", request_ids=("a", "b"))
        await bus.control.publish_queue_status(status)
        await bus.control.publish_ended(ended)
        await eventually(lambda: (statuses, ends) == ([status], [ended]))

    async def test_prefilled_pulled_and_move_messages_reach_their_subscribers(
        self, bus: Bus, broker: Broker
    ) -> None:
        prefilled: list[Prefilled] = []
        pulled: list[Pulled] = []
        moves: list[MoveStreams] = []
        other = await broker.connect("listener")
        await other.control.subscribe_prefilled(prefilled.append)
        await other.control.subscribe_pulled("w/1", pulled.append)
        await other.control.subscribe_moves(moves.append)
        request_ids = ("a", "b")
        await bus.control.publish_prefilled(Prefilled(worker_id="w/1", request_ids=request_ids))
        for worker_id in ("w/2", "w/1"):
            await bus.control.publish_pulled(Pulled(worker_id=worker_id, request_ids=request_ids))
        await bus.control.move_streams(MoveStreams(worker_id="w/1", to_worker_id="w/2"))
        await eventually(lambda: bool(prefilled and pulled and moves))
        assert prefilled == [Prefilled(worker_id="w/1", request_ids=request_ids)]
        assert pulled == [Pulled(worker_id="w/1", request_ids=request_ids)]
        assert moves == [MoveStreams(worker_id="w/1", to_worker_id="w/2")]


class TestResumePoints:
    async def test_resume_points_are_returned_if_known(self, bus: Bus, broker: Broker) -> None:
        points = {"r.1": ResumePoint(token_ids=(4, 5)), "r2": ResumePoint(open=False)}
        gateway = await broker.connect("gateway")
        await gateway.control.serve_resume_points("g", points.get)
        assert await bus.control.resume_point("g", "r.1", 5.0) == points["r.1"]
        assert await bus.control.resume_point("g", "r2", 5.0) == points["r2"]
        assert await bus.control.resume_point("g", "r3", 0.05) is None
        assert await bus.control.resume_point("elsewhere", "r.1", 5.0) is None

    async def test_any_listener_may_have_the_resume_point(self, bus: Bus, broker: Broker) -> None:
        known = [{"r1": ResumePoint(token_ids=(1,))}, {"r2": ResumePoint(token_ids=(2, 3))}]
        for points in known:
            gateway = await broker.connect("gateway")
            await gateway.control.serve_resume_points("g", points.get)
        for points in known:
            for request_id, point in points.items():
                assert await bus.control.resume_point("g", request_id, 5.0) == point
        assert await bus.control.resume_point("g", "r3", 0.05) is None

    async def test_held_requests_are_found_at_all_gateways(self, bus: Bus, broker: Broker) -> None:
        """Two gateways each hold half of 598 requests, and no gateway holds the last two."""
        request_ids = [f"r.{number}" for number in range(600)]
        for remainder in (0, 1):
            held = {name for name in request_ids[:598] if int(name[2:]) % 2 == remainder}
            gateway = await broker.connect("gateway")
            await gateway.control.serve_resume_points("g", lambda _: None, held.__contains__)
        found = await bus.control.held_requests("g", request_ids, 0.2)
        assert found == frozenset(request_ids[:598])
        assert await bus.control.held_requests("elsewhere", request_ids, 5.0) == frozenset()

    async def test_a_gateway_that_knows_no_such_question_answers_for_one(
        self, bus: Bus, broker: Broker
    ) -> None:
        points = {"r1": ResumePoint(token_ids=(1,)), "r2": ResumePoint()}
        gateway = await broker.connect("gateway")
        await gateway.control.serve_resume_points("g", points.get)
        assert await bus.control.held_requests("g", ["r1", "r3"], 0.05) == frozenset({"r1"})
        assert await bus.control.is_held("g", "r2", 5.0)
        assert not await bus.control.is_held("g", "r3", 0.05)
        assert not await bus.control.is_held("elsewhere", "r2", 5.0)

    async def test_a_failing_handler_is_silent(self, bus: Bus) -> None:
        def fail(request_id: str) -> ResumePoint | None:
            raise KeyError(request_id)

        await bus.control.serve_resume_points("g", fail)
        assert await bus.control.resume_point("g", "r1", 0.05) is None


def _letting_go_of(streams: dict[str, HandedOver]) -> Callable[[str], HandedOver | None]:
    return lambda request_id: streams.pop(request_id, None)


class TestHandovers:
    async def test_the_holder_hands_a_stream_over_once(self, bus: Bus, broker: Broker) -> None:
        held = {"r 1": HandedOver(token_ids=(4, 5)), "r2": HandedOver()}
        for streams in (held, dict[str, HandedOver]()):
            gateway = await broker.connect("gateway")
            await gateway.control.serve_handovers("g.1", _letting_go_of(streams))
        assert await bus.control.hand_over("g.1", "r 1", 5.0) == HandedOver(token_ids=(4, 5))
        assert await bus.control.hand_over("g.1", "r 1", 0.05) is None
        assert await bus.control.hand_over("g.1", "r2", 5.0) == HandedOver()

    async def test_nobody_there_is_known_at_once(self, bus: Bus) -> None:
        started_s = time.monotonic()
        assert await bus.control.hand_over("gone", "r1", timeout_s=5.0) is None
        assert time.monotonic() - started_s < 1.0

    async def test_a_gateway_that_left_is_not_waited_for(self, bus: Bus) -> None:
        subscription = await bus.control.serve_handovers("g", lambda _: None)
        await subscription.close()
        started_s = time.monotonic()
        assert await bus.control.hand_over("g", "r1", timeout_s=5.0) is None
        assert time.monotonic() - started_s < 1.0


class TestResults:
    async def test_are_answered_by_one_in_json_or_messagepack(
        self, bus: Bus, broker: Broker
    ) -> None:
        asked: list[tuple[str, str]] = []
        result = JobResult(request_id="r.1", tenant="a b", model="m", status="done", text="ok")

        async def find(tenant: str, request_id: str) -> JobResult:
            asked.append((tenant, request_id))
            if request_id == "failing":
                raise KeyError("a secret prompt")
            if request_id != "r.1":
                raise ResultNotReadyError(request_id)
            return result

        for _ in range(2):
            await bus.control.serve_results(find)
        subject = subjects.result_request("a b", "r.1")
        as_json = await broker.request(subject)
        assert as_json == (codec.encode_json(result), codec.JSON)
        as_json = await broker.request(subject, "application/json; charset=utf-8")
        assert as_json == (codec.encode_json(result), codec.JSON)
        as_msgpack = await broker.request(subject, "application/msgpack")
        assert as_msgpack == (codec.encode(result), codec.MSGPACK)
        assert asked == [("a b", "r.1")] * 3
        for request, code, retryable in (
            (subjects.result_request("a b", "r2"), "result_not_ready", True),
            (subjects.result_request("a b", "failing"), "internal_error", False),
            ("ctl.result.acme.r%zz", "malformed_message", False),
            ("ctl.result.%.r1", "malformed_message", False),
            ("ctl.result.acme.%", "malformed_message", False),
        ):
            payload, _ = await broker.request(request)
            error = msgspec.json.decode(payload, type=ResultError).error
            assert (error.code, error.retryable) == (code, retryable)
            assert "secret" not in error.message


class TestTelemetry:
    async def test_each_query_goes_to_one(self, bus: Bus, broker: Broker) -> None:
        asked: list[TelemetryQuery] = []

        async def answer(query: TelemetryQuery) -> TelemetryAnswer:
            asked.append(query)
            return TelemetryAnswer(rows_json=b'[{"a":1}]')

        for number in range(2):
            other = await broker.connect(f"telemetry-{number}")
            await other.control.serve_telemetry(answer)
        query = TelemetryQuery(name="tokens", params={"minutes": 5})
        found = await bus.control.query_telemetry(query, 5.0)
        assert found == TelemetryAnswer(rows_json=b'[{"a":1}]')
        assert asked == [query]

    async def test_a_failing_query(self, bus: Bus) -> None:
        async def answer(query: TelemetryQuery) -> TelemetryAnswer:
            raise KeyError(query.name)

        await bus.control.serve_telemetry(answer)
        found = await bus.control.query_telemetry(TelemetryQuery(name="x"), 5.0)
        assert found == TelemetryAnswer(error="KeyError")

"""Invariants that hold at every moment or once the system is at rest."""

from __future__ import annotations

import msgspec

from millrace.bus import subjects
from millrace.bus.codec import JOB_RESULT, JSON
from millrace.schemas.frames import Failed
from millrace.schemas.records import RequestRecord, Status
from millrace.workers.engine_like import EngineFailedError
from tests.protocol.clients import Asked
from tests.protocol.system import System
from tests.scheduler.integrity import check_integrity

# Notices announce ends; a missed end is found within half a minute.
_REST_WITHIN_S = 90.0
_LOOK_EVERY_S = 1.0
_END_WITHIN_S = 300.0


def check_now(system: System) -> None:
    """Check the invariants that hold at every moment."""
    assert not system.wrongs, system.wrongs
    for worker in system.workers.values():
        process = worker.process
        failure = process.failure
        is_allowed = failure is None or isinstance(failure, EngineFailedError)
        assert is_allowed, f"{process.name} ended with {failure!r}"
    for scheduler in system.schedulers.values():
        failure = scheduler.process.failure
        assert failure is None, f"{scheduler.process.name} ended with {failure!r}"
        if scheduler.process.is_alive:
            check_integrity(scheduler.scheduler.state.fleet)
            check_integrity(scheduler.scheduler.state.prefixes)
            for model_queue in scheduler.scheduler.model_queues.values():
                check_integrity(model_queue.queue)
    for worker in system.workers.values():
        if worker.process.is_alive:
            worker.engine.check_integrity()
    records(system)


def records(system: System) -> dict[str, RequestRecord]:
    """The records by request; each has at most one once they are known by their identity."""
    found: dict[str, RequestRecord] = {}
    for logged in system.broker.outbox.messages():
        if logged.subject == "rec.request":
            record = msgspec.msgpack.decode(logged.payload, type=RequestRecord)
            assert record.request_id not in found, f"{record.request_id} has two records"
            found[record.request_id] = record
    return found


def come_to_rest(system: System) -> None:
    """Run without further faults until all requests have ended and no trace of them remains."""
    deadline_s = system.clock.monotonic() + _END_WITHIN_S
    while unfinished := _unfinished(system):
        assert system.clock.monotonic() < deadline_s, f"no end of {unfinished}"
        system.pass_s(_LOOK_EVERY_S)
        check_now(system)
    _check_ends(system)
    deadline_s = system.clock.monotonic() + _REST_WITHIN_S
    while left := _left_behind(system):
        assert system.clock.monotonic() < deadline_s, f"left behind: {left}"
        system.pass_s(_LOOK_EVERY_S)
    check_now(system)


def _unfinished(system: System) -> list[str]:
    known = records(system)
    waiting = [f"{asked.request_id} for its client" for asked in system.open_questions()]
    unrecorded = [
        f"{asked.request_id} for a record"
        for asked in system.asked.values()
        if asked.is_accepted and asked.request_id not in known
    ]
    stored = [f"{job.subject}, {job.sequence}" for job in system.broker.jobs._jobs.values()]
    unsettled = [
        f"{asked.request_id} for its acceptance"
        for asked in system.asked.values()
        if not asked.is_accepted and not asked.is_refused
    ]
    return [*waiting, *unrecorded, *stored, *unsettled]


def _check_ends(system: System) -> None:
    known = records(system)
    for asked in system.asked.values():
        codes = [one.code for one in asked.terminals if isinstance(one, Failed)]
        # A gateway that took the request over knows its end from the index alone. The worker may
        # have died, or Redis been away, before the index had it.
        assert "request_timeout" not in codes or asked.num_moves, f"{asked.request_id} hung"
        record = known.get(asked.request_id)
        if record is not None:
            _check_record(asked, record)
            if asked.question.job.store_result:
                _check_result(system, asked, record)
    assert known.keys() <= system.asked.keys(), "records of unknown requests"


def _check_record(asked: Asked, record: RequestRecord) -> None:
    job, num_tokens = asked.question.job, len(asked.question.token_ids)
    claim = f"{asked.request_id} is recorded as {record.status.value}"
    match record.status:
        case Status.DONE:
            assert record.completion_tokens == num_tokens, f"{claim} with too few tokens"
        case Status.CANCELLED:
            assert asked.may_be_cancelled, claim
        case Status.EXPIRED:
            assert job.deadline_ns is not None, claim
        case Status.SHED:
            raise AssertionError(claim)
        case Status.FAILED:
            assert record.error_code, claim
    assert record.tenant == job.tenant, "a record of another tenant's"


def _check_result(system: System, asked: Asked, record: RequestRecord) -> None:
    job = asked.question.job
    stored = system.broker.results.get(subjects.result(job.tenant, job.request_id))
    assert stored is not None, f"{asked.request_id} has no result"
    result = JOB_RESULT.decode(stored, JSON)
    if result.status == Status.DONE:
        assert result.token_ids == asked.question.token_ids, f"{asked.request_id}: other tokens"
        assert result.text == asked.question.text, f"{asked.request_id}: another text"


def _left_behind(system: System) -> list[str]:
    left: list[str] = []
    for name, scheduler in system.schedulers.items():
        if not scheduler.process.is_alive:
            continue
        context = scheduler.scheduler.state
        left += [
            f"{name} has {scheduled.request_id} {scheduled.phase.name}"
            for scheduled in context.job_table
        ]
        for view in context.fleet.of_model("demo"):
            left += [f"{name} thinks {view.worker_id} runs {runs}" for runs in view.runs]
        for model, model_queue in scheduler.scheduler.model_queues.items():
            left += [f"{name} queues {scheduled.request_id}" for scheduled in model_queue.queue]
            for is_batch in (True, False):
                if model_queue.num_here(is_batch=is_batch):
                    left.append(f"{name} prepares {model_queue.num_here(is_batch=is_batch)}")
            backlog = scheduler.scheduler.pullers[model].backlog
            left += [
                f"{name} has a window of {line}"
                for line in backlog.tenant_queues()
                if backlog.of(line).num_here or backlog.num_waiting(line)
            ]
    for name, worker in system.workers.items():
        if not worker.process.is_alive:
            continue
        requests, stats = worker.worker.requests, worker.engine.stats
        if requests.num_running or requests.num_ending:
            left.append(f"{name} runs {requests.num_running} and ends {requests.num_ending}")
        if stats.num_running or stats.num_waiting or stats.num_free_blocks != stats.num_blocks:
            left.append(f"the engine of {name} holds something")
    for name, gateway in system.gateways.items():
        if not gateway.process.is_alive:
            continue
        left += [f"{name} has a stream of {stream.request_id}" for stream in gateway.table]
    return left

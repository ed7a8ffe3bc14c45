"""Permissions on subjects, on a real nats-server with the accounts of deploy/nats."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from millrace.bus import subjects
from millrace.bus.control import unless_forbidden
from millrace.bus.job_queue import TenantQueue
from millrace.bus.nats import accounts, connect
from millrace.bus.nats.permissions import Part, inbox_of, service_inbox
from millrace.bus.orphans import OrphanWatch
from millrace.schemas.control import Cancel, NameLease
from millrace.schemas.errors import BusForbiddenError
from millrace.schemas.jobs import Job, JobResult, Source, Tier
from tests.support.manual_clock import ManualClock
from tests.support.nats.users import ACME, NatsWithUsers, nats_with_users
from tests.support.repository import ROOT
from tests.support.waiting import eventually

DEPLOY = ROOT / "deploy" / "nats"
USERS = {
    "G": "gateway",
    "S": "scheduler",
    "W": "worker",
    "T": "telemetry",
    "O": "operator",
    "A": "service-acme",
}
TENANT_QUEUE = TenantQueue("m/1", Tier.FREE, "acme")
API = "$JS.API"

# Subject; who may publish there; who may hear it.
TABLE = (
    (subjects.job(TENANT_QUEUE), "SOA", "S"),
    (subjects.job(TENANT_QUEUE._replace(tier=Tier.BATCH)), "SOA", "S"),
    (subjects.job(TENANT_QUEUE._replace(tier=Tier.PRO)), "SO", "S"),
    (subjects.job(TENANT_QUEUE._replace(tenant="shop")), "SO", "S"),
    (subjects.job(TENANT_QUEUE._replace(tenant=None)), "SO", "S"),
    (subjects.job(TENANT_QUEUE.twin), "GS", ""),
    (subjects.stored_job(subjects.job(TENANT_QUEUE)), "", "SO"),
    (subjects.dead_job("poison"), "S", ""),
    (subjects.frames("gw-1", "r"), "SW", "GO"),
    (subjects.envelope("gw-1"), "SW", "GO"),
    (subjects.frames("acme", "r"), "SW", "GOA"),
    (subjects.frames("shop", "r"), "SW", "GO"),
    (subjects.worker_commands("w"), "GSO", "W"),
    (subjects.cancel("r"), "GSO", "SW"),
    (subjects.owner_cancel("acme", "r"), "A", "SW"),
    (subjects.owner_cancel("shop", "r"), "", "SW"),
    (subjects.result_request("acme", "r"), "OA", "S"),
    (subjects.result_request("shop", "r"), "O", "S"),
    (subjects.ended("w"), "W", "S"),
    (subjects.prefilled("w"), "W", "S"),
    (subjects.pulled("w"), "W", "W"),
    (subjects.move_streams("w"), "O", "S"),
    (subjects.resume("gw-1", "r"), "SW", "GO"),
    (subjects.resume("acme", "r"), "SW", "GOA"),
    (subjects.handover("gw-1", "r"), "G", "G"),
    (subjects.queue_status("m/1"), "S", "GWO"),
    (subjects.heartbeat("w"), "W", "GSTO"),
    (subjects.prefix_report("w"), "W", "S"),
    (subjects.worker_entry("w"), "W", ""),
    (subjects.worker_name("w"), "W", ""),
    (subjects.role_turn("m"), "S", ""),
    (subjects.TELEMETRY, "GO", "T"),
    (subjects.result("acme", "r"), "SW", "GOA"),
    (subjects.result("shop", "r"), "SW", "GO"),
    (subjects.REQUEST_RECORD, "SW", ""),
    (subjects.DELIVERY_RECORD, "G", ""),
    (subjects.REFUSAL_RECORD, "G", ""),
    (subjects.WORKER_RECORD, "W", ""),
    (subjects.TRANSCRIPT_RECORD, "W", ""),
    (subjects.object_entry("acme", "f"), "G", ""),
    (subjects.object_chunks("u"), "G", ""),
    (subjects.batch_state("acme", "b"), "G", ""),
    (subjects.open_batch("acme", "b"), "G", ""),
    ("$KV.others.x", "", ""),
    ("anything.else", "", ""),
    ("jobs.m.free.acme.more.tokens", "", ""),
    ("$SYS.REQ.SERVER.PING", "", ""),
    (f"{API}.INFO", "O", ""),
    (f"{API}.STREAM.NAMES", "O", ""),
    (f"{API}.STREAM.CREATE.JOBS", "GSWTO", ""),
    (f"{API}.STREAM.CREATE.OTHERS", "O", ""),
    (f"{API}.STREAM.UPDATE.JOBS", "GSO", ""),
    (f"{API}.STREAM.UPDATE.RESULTS", "SO", ""),
    (f"{API}.STREAM.DELETE.JOBS", "O", ""),
    (f"{API}.STREAM.PURGE.JOBS", "O", ""),
    (f"{API}.STREAM.PURGE.FILES", "GO", ""),
    (f"{API}.STREAM.INFO.JOBS", "GSO", ""),
    (f"{API}.STREAM.INFO.KV_workers", "SO", ""),
    (f"{API}.STREAM.INFO.BATCHES", "GSO", ""),
    (f"{API}.STREAM.INFO.OUTBOX", "STO", ""),
    (f"{API}.STREAM.MSG.GET.JOBS", "GSWO", ""),
    (f"{API}.STREAM.MSG.GET.FILES", "GO", ""),
    (f"{API}.STREAM.MSG.GET.OUTBOX", "O", ""),
    (f"{API}.STREAM.MSG.GET.RESULTS", "O", ""),
    (f"{API}.STREAM.MSG.DELETE.JOBS", "GSWO", ""),
    (f"{API}.STREAM.MSG.DELETE.OUTBOX", "GO", ""),
    (f"{API}.STREAM.MSG.DELETE.KV_workers", "O", ""),
    (f"{API}.STREAM.MSG.GET.KV_workers", "WO", ""),
    (f"{API}.CONSUMER.CREATE.JOBS.line-x", "SO", ""),
    (f"{API}.CONSUMER.MSG.NEXT.JOBS.line-x", "SO", ""),
    (f"{API}.CONSUMER.PAUSE.JOBS.line-x", "SO", ""),
    (f"{API}.CONSUMER.CREATE.OUTBOX.bridge", "TO", ""),
    (f"{API}.CONSUMER.CREATE.OUTBOX.other", "O", ""),
    (f"{API}.CONSUMER.MSG.NEXT.OUTBOX.bridge", "TO", ""),
    (f"{API}.CONSUMER.CREATE.RESULTS.x", "O", ""),
    (f"{API}.CONSUMER.CREATE.KV_workers.x", "O", ""),
    (f"{API}.DIRECT.GET.RESULTS", "O", ""),
    (f"{API}.DIRECT.GET.RESULTS.{subjects.result('acme', 'r')}", "GSWOA", ""),
    (f"{API}.DIRECT.GET.RESULTS.{subjects.result('shop', 'r')}", "GSWO", ""),
    (f"{API}.DIRECT.GET.FILES", "GO", ""),
    (f"{API}.DIRECT.GET.KV_workers", "GSWTO", ""),
    (f"{API}.DIRECT.GET.OUTBOX", "O", ""),
    ("$JS.ACK.JOBS.line-x.1.1.1.1.0", "SW", ""),
    ("$JS.ACK.OUTBOX.bridge.1.1.1.1.0", "T", ""),
    (f"{inbox_of(Part.GATEWAY)}.x.1", "G", "G"),
    (f"{inbox_of(Part.SCHEDULER)}.x.1", "S", "S"),
    (f"{inbox_of(Part.WORKER)}.x.1", "W", "W"),
    (f"{inbox_of(Part.TELEMETRY)}.x.1", "T", "T"),
    (f"{inbox_of(Part.OPERATOR)}.x.1", "O", "O"),
    (f"{service_inbox('acme')}.x.1", "A", "A"),
    (f"{service_inbox('shop')}.x.1", "", ""),
    ("_INBOX.x.1", "", ""),
)
# Wildcards that no user may subscribe to, as they match other users' messages.
TOO_WIDE = (">", "_INBOX.>", "$JS.>", "jobs.>", "rec.>", "files.>", "batches.>", "$KV.>")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsWithUsers]:
    with nats_with_users(tmp_path_factory.mktemp("nats")) as made:
        yield made


class Tried:
    """Attempts of one user, and the server's errors."""

    def __init__(self, client: Client, errors: list[str]) -> None:
        self._client = client
        self._errors = errors

    async def refused(self, action: str, tried: list[str]) -> set[str]:
        """Try subjects, and return the subjects that the server refused."""
        for subject in tried:
            if action == "publish":
                await self._client.publish(subject, b"")
            else:
                await self._client.subscribe(subject)
        # The first flush may overtake what is still buffered.
        await self._client.flush()
        await self._client.flush()
        found = {error.split('"')[1] for error in self._errors if f"for {action}" in error}
        assert found <= {subject.lower() for subject in tried}
        return found


async def attempt(server: NatsWithUsers, user: str) -> Tried:
    errors: list[str] = []

    async def on_error(error: Exception) -> None:
        errors.append(str(error).lower())

    client = await nats.connect(server.url_of(user), error_cb=on_error, allow_reconnect=False)
    return Tried(client, errors)


def test_the_checked_in_accounts_are_the_generated_ones() -> None:
    stale = "run: python -m millrace.bus.nats.accounts > deploy/nats/accounts.conf"
    assert (DEPLOY / "accounts.conf").read_text() == accounts.text(), stale
    example = accounts.parse_service("acme=free,batch")
    command = "python -m millrace.bus.nats.accounts --service acme=free,batch"
    stale = f"run: {command} > deploy/nats/with-service.conf"
    assert (DEPLOY / "with-service.conf").read_text() == accounts.text([example]), stale
    assert "include ./accounts.conf" in (DEPLOY / "nats.conf").read_text()


def test_the_table_has_every_family() -> None:
    patterns = [value for name, value in vars(subjects).items() if name.startswith("ALL_")]
    flat = [one for value in patterns for one in ([value] if isinstance(value, str) else value)]
    for pattern in flat:
        assert any(matches(pattern, subject) for subject, _, _ in TABLE), pattern


def matches(pattern: str, subject: str) -> bool:
    wanted, found = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, found = wanted[:-1], found[: len(wanted) - 1]
    return len(wanted) == len(found) and all(
        one in ("*", other) for one, other in zip(wanted, found, strict=True)
    )


@pytest.mark.parametrize("letter", USERS)
async def test_each_may_use_its_own_subjects_and_no_other(
    server: NatsWithUsers, letter: str
) -> None:
    tried = await attempt(server, USERS[letter])
    refused = await tried.refused("publish", [subject for subject, _, _ in TABLE])
    assert refused == {s.lower() for s, publishers, _ in TABLE if letter not in publishers}
    heard = [subject for subject, _, _ in TABLE]
    refused = await tried.refused("subscription", [*heard, *TOO_WIDE])
    expected = {s.lower() for s, _, hearers in TABLE if letter not in hearers}
    assert refused == expected | {subject.lower() for subject in TOO_WIDE}


@pytest.mark.parametrize("part", Part)
async def test_each_part_connects_with_its_own_permissions(
    server: NatsWithUsers, part: Part, caplog: pytest.LogCaptureFixture
) -> None:
    bus = await connect(server.config_of(part.value), "test", part=part)
    assert bus.connected
    await bus.close()
    assert not [entry for entry in caplog.records if entry.levelno >= logging.WARNING]


async def test_a_wrong_permission_says_so_at_once(
    server: NatsWithUsers, caplog: pytest.LogCaptureFixture
) -> None:
    bus = await connect(server.config_of("telemetry"), "test", part=Part.TELEMETRY)
    job = Job(request_id="r1", model="demo", prompt="hi", tenant="acme")
    async with asyncio.timeout(5.0):
        with pytest.raises(BusForbiddenError, match=r"publish to jobs\.demo\.free\.acme") as raised:
            await bus.jobs.publish(job)
        assert (raised.value.code, raised.value.retryable) == ("bus_forbidden", False)
        with pytest.raises(BusForbiddenError, match=r"subscribe to ctl\.cancel"):
            await bus.control.subscribe_cancels(lambda _: None)
    for _ in range(3):
        await bus.control.cancel(Cancel(request_id="r1"))
    await bus.outbox.last_sequence()  # an answer, so the server has read what came before

    def forbidden() -> list[str]:
        return [
            str(entry.__dict__["subject"])
            for entry in caplog.records
            if "forbids a subject to this process" in entry.message
            and entry.levelno == logging.ERROR
        ]

    await eventually(lambda: "ctl.cancel.r1" in forbidden())
    assert sorted(forbidden()) == ["ctl.cancel.*", "ctl.cancel.r1", "jobs.demo.free.acme"]
    await bus.close()


async def test_without_the_permission_to_ask_no_request_is_an_orphan(
    server: NatsWithUsers, caplog: pytest.LogCaptureFixture
) -> None:
    """Accounts that predate the question about orphans do not permit workers to ask it."""
    bus = await connect(server.config_of("telemetry"), "test", part=Part.TELEMETRY)
    jobs = [
        Job(request_id=f"r{number}", model="m", prompt="", reply="gw-1", source=Source.HTTP)
        for number in (1, 2)
    ]
    found: list[str] = []
    clock = ManualClock()
    watch = OrphanWatch(bus, clock, lambda: jobs, found.append)
    watch.grace_s = 4.0
    for _ in range(5):
        await watch.look()
        clock.skip(2.0)
    assert found == []
    assert caplog.text.count("no permission") == 1
    await bus.close()


async def test_connecting_as_another_part_raises_an_error(server: NatsWithUsers) -> None:
    with pytest.raises(BusForbiddenError, match=r"subscribe to _INBOX\.gateway"):
        await connect(server.config_of("worker"), "test", part=Part.GATEWAY)


async def test_a_worker_holds_its_name_and_a_scheduler_sees_its_silence(
    server: NatsWithUsers,
) -> None:
    worker = await connect(server.config_of("worker"), "test", part=Part.WORKER)
    assert await worker.workers.hold_name("w", NameLease(holder="w-1"), 0)
    assert await worker.workers.name_holder("w") is not None
    await worker.close()
    scheduler = await connect(server.config_of("scheduler"), "test", part=Part.SCHEDULER)
    assert await scheduler.workers.silences_s() == {}
    await scheduler.close()


async def test_a_service_reads_its_own_results_only(server: NatsWithUsers) -> None:
    scheduler = await connect(server.config_of("scheduler"), "test", part=Part.SCHEDULER)
    for tenant in ("acme", "shop"):
        await scheduler.results.store(
            JobResult(request_id="r1", tenant=tenant, model="m", status="done", text=tenant)
        )
    await scheduler.close()
    config = server.config_of(ACME.user)
    service = await connect(
        type(config)(url=config.url, inbox_prefix=service_inbox("acme")), "service"
    )
    found = await service.results.fetch("acme", "r1")
    assert found is not None
    assert found.text == "acme"
    with pytest.raises(BusForbiddenError):
        await service.results.fetch("shop", "r1")
    with pytest.raises(BusForbiddenError):
        await service.jobs.publish(Job(request_id="x", model="m", prompt="x", tenant="shop"))
    await service.close()


@pytest.mark.parametrize(
    "body",
    [
        {"last_by_subj": "results.shop.secret"},
        {"seq": 1},
        {"multi_last": ["results.shop.*"]},
        {"next_by_subj": "results.>", "seq": 1, "batch": 10},
    ],
)
async def test_a_service_cannot_name_anothers_result_in_the_body_of_its_own_request(
    server: NatsWithUsers, body: dict[str, Any]
) -> None:
    scheduler = await connect(server.config_of("scheduler"), "test", part=Part.SCHEDULER)
    for tenant in ("shop", "acme"):
        result = JobResult(request_id="secret", tenant=tenant, model="m", status="done")
        await scheduler.results.store(result)
    await scheduler.close()
    client = await nats.connect(server.url_of(ACME.user), inbox_prefix=service_inbox("acme"))
    inbox = await client.subscribe(f"{service_inbox('acme')}.x")
    for subject in ("results.acme.secret", "results.acme.*"):
        await client.publish(
            f"{API}.DIRECT.GET.RESULTS.{subject}", json.dumps(body).encode(), reply=inbox.subject
        )
        answer = await inbox.next_msg(5.0)
        assert b"shop" not in answer.data
        assert (answer.headers or {}).get("Status") == "408"
    await client.close()


async def test_a_service_asks_for_its_results_and_cancels_by_requests_of_its_own_library(
    server: NatsWithUsers,
) -> None:
    """The service of a tenant uses plain nats-py and none of our code."""
    cancels: list[Cancel] = []
    asked: list[tuple[str, str]] = []

    async def find(tenant: str, request_id: str) -> JobResult:
        asked.append((tenant, request_id))
        return JobResult(request_id=request_id, tenant=tenant, model="m", status="done")

    scheduler = await connect(server.config_of("scheduler"), "test", part=Part.SCHEDULER)
    worker = await connect(server.config_of("worker"), "test", part=Part.WORKER)
    await scheduler.control.serve_results(find)
    for part in (scheduler, worker):
        await part.control.subscribe_owner_cancels(cancels.append)
        await part.control.subscribe_cancels(cancels.append)
    errors: list[str] = []

    async def on_error(error: Exception) -> None:
        errors.append(str(error))

    client = await nats.connect(
        server.url_of(ACME.user), inbox_prefix=service_inbox("acme"), error_cb=on_error
    )
    answer = await client.request("ctl.result.acme.r%2E1", b"", 5.0)
    assert json.loads(answer.data)["request_id"] == "r.1"
    await scheduler.results.store(await find("acme", "direct"))
    asked.clear()
    stored = await client.jetstream().get_last_msg("RESULTS", "results.acme.direct", direct=True)
    assert json.loads(stored.data or b"")["request_id"] == "direct"
    refused = ("ctl.cancel.r1", "ctl.cancel.shop.r1", "ctl.result.shop.r1", "ctl.cancel.acme.r.1")
    for subject in refused:
        await client.publish(subject, b"", reply="_INBOX.service.acme.x")
    await client.publish("ctl.cancel.acme.r%2E1", b"")
    await eventually(lambda: len(cancels) == 2 and len(errors) == len(refused))
    assert cancels == [Cancel(request_id="r.1", tenant="acme")] * 2
    assert not asked, "the service itself reads what is stored"
    assert sorted(error.split('"')[1] for error in errors) == sorted(refused)
    await client.close()
    for part in (scheduler, worker):
        await part.close()


async def test_permissions_of_an_earlier_version_let_a_scheduler_start(
    server: NatsWithUsers, caplog: pytest.LogCaptureFixture
) -> None:
    telemetry = await connect(server.config_of("telemetry"), "test", part=Part.TELEMETRY)
    hearing = telemetry.control.subscribe_owner_cancels(lambda _: None)
    assert await unless_forbidden(hearing, "hear cancels of services") == []
    assert "this process cannot hear cancels of services: no permission" in caplog.text
    await telemetry.close()

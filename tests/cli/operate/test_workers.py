"""``millrace workers`` on a real bus, with scripted workers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from millrace.bus import nats
from millrace.bus.api import Bus
from millrace.bus.nats.permissions import Part
from millrace.cli.main import main
from millrace.schemas.config import NatsConfig
from millrace.schemas.control import (
    Drain,
    MoveStreams,
    SetRole,
    WorkerCommand,
    WorkerReply,
    WorkerStatus,
)
from millrace.schemas.engines import WorkerRole
from millrace.schemas.transfer import TransferEndpoint


@pytest.fixture
async def bus(nats_config: NatsConfig) -> AsyncIterator[Bus]:
    bus = await nats.connect(nats_config, "test", part=Part.SCHEDULER)
    yield bus
    await bus.close()


def _status(name: str, **changes: object) -> WorkerStatus:
    status = WorkerStatus(
        worker_id=f"{name}-1",
        name=name,
        model="demo",
        max_num_sequences=4,
        num_running=3,
        num_blocks=100,
        num_free_blocks=75,
        started_ns=1,
        sent_ns=time.time_ns(),
    )
    return msgspec.structs.replace(status, **changes)


async def millrace(*arguments: str, nats_url: str) -> int:
    """The command, as a person runs it, beside the test's own loop."""
    return await asyncio.to_thread(main, ["workers", *arguments, "--nats", nats_url])


async def test_list(bus: Bus, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert await millrace("list", nats_url=nats_config.url) == 0
    assert capsys.readouterr().out == "no worker is there\n"
    endpoint = TransferEndpoint(layout="l", token="secret")
    await bus.workers.announce(_status("worker-1", role=WorkerRole.PREFILL, transfer=endpoint))
    await bus.workers.announce(_status("worker-2", draining=True))
    await bus.workers.announce(_status("dead", sent_ns=1))
    assert await millrace("list", nats_url=nats_config.url) == 0
    heading, first, second = capsys.readouterr().out.splitlines()
    assert " ".join(heading.split()) == "worker model role state running waiting KV moves"
    assert " ".join(first.split()) == "worker-1 demo prefill serving 3 of 4 0 25% pulled"
    assert " ".join(second.split()) == "worker-2 demo both draining 3 of 4 0 25% computed again"
    assert await millrace("list", "--json", nats_url=nats_config.url) == 0
    shown = capsys.readouterr().out
    assert [worker["name"] for worker in json.loads(shown)] == ["worker-1", "worker-2"]
    assert "secret" not in shown


async def test_list_says_how_many_devices_a_group_has(
    bus: Bus, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    await bus.workers.announce(_status("worker-1", num_devices=4))
    await bus.workers.announce(_status("worker-2"))
    assert await millrace("list", nats_url=nats_config.url) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[2] for line in lines] == ["devices", "4", "1"]


async def test_drain_waits_until_the_worker_is_empty(
    bus: Bus, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[WorkerCommand] = []

    async def obey(command: WorkerCommand) -> WorkerReply:
        commands.append(command)
        await bus.workers.announce(_status("worker-1", draining=True, num_running=0))
        return WorkerReply(ok=True)

    await bus.control.serve_commands("worker-1-1", obey)
    await bus.workers.announce(_status("worker-1"))
    assert await millrace("drain", "worker-1", nats_url=nats_config.url) == 0
    assert commands == [Drain(reason="millrace workers drain")]
    assert capsys.readouterr().out == "worker-1 takes no new work\nworker-1 is empty\n"


async def test_drain_says_what_stays(
    bus: Bus, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    async def obey(command: WorkerCommand) -> WorkerReply:
        return WorkerReply(ok=True)

    await bus.control.serve_commands("worker-1-1", obey)
    await bus.workers.announce(_status("worker-1"))
    url = nats_config.url
    assert await millrace("drain", "worker-1", "--timeout", "0.3", nats_url=url) == 1
    assert "3 requests are still there" in capsys.readouterr().out


async def test_move_tells_the_schedulers_and_counts_what_left(
    bus: Bus, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    moves: list[MoveStreams] = []

    def on_move(move: MoveStreams) -> None:
        moves.append(move)
        moved = _status("worker-1", num_running=0)
        tasks.append(asyncio.create_task(bus.workers.announce(moved)))

    tasks: list[asyncio.Task[None]] = []
    await bus.control.subscribe_moves(on_move)
    for name in ("worker-1", "worker-2"):
        await bus.workers.announce(_status(name))
    url = nats_config.url
    assert await millrace("move", "worker-1", "--to", "worker-2", nats_url=url) == 0
    assert moves == [MoveStreams(worker_id="worker-1-1", to_worker_id="worker-2-1")]
    assert capsys.readouterr().out == "3 of 3 requests left worker-1 to worker-2\n"


async def test_role_tells_the_worker_and_says_what_it_was(
    bus: Bus, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[WorkerCommand] = []

    async def obey(command: WorkerCommand) -> WorkerReply:
        commands.append(command)
        return WorkerReply(ok=True)

    await bus.control.serve_commands("worker-1-1", obey)
    await bus.workers.announce(_status("worker-1", role=WorkerRole.DECODE))
    url = nats_config.url
    assert await millrace("role", "worker-1", "prefill", nats_url=url) == 0
    assert capsys.readouterr().out == "the role of worker-1 is prefill; it was decode\n"
    assert await millrace("role", "worker-1", "decode", nats_url=url) == 0
    assert capsys.readouterr().out == "the role of worker-1 is decode; as before\n"
    assert commands == [SetRole(role=WorkerRole.PREFILL), SetRole(role=WorkerRole.DECODE)]


async def test_role_says_why_a_worker_keeps_its_own(
    bus: Bus, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refuse(_: WorkerCommand) -> WorkerReply:
        return WorkerReply(ok=False, reason="no_roles", message="roles are not for vllm")

    await bus.control.serve_commands("worker-1-1", refuse)
    for name in ("worker-1", "worker-2"):
        await bus.workers.announce(_status(name))
    url = nats_config.url
    assert await millrace("role", "worker-1", "prefill", nats_url=url) == 2
    error = capsys.readouterr().err
    assert "The role of worker-1 cannot be changed: roles are not for vllm" in error
    assert await millrace("role", "worker-2", "prefill", nats_url=url) == 2
    assert "it does not answer" in capsys.readouterr().err


async def test_names_that_nobody_has_and_workers_of_other_models(
    bus: Bus, nats_config: NatsConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    await bus.workers.announce(_status("worker-1"))
    await bus.workers.announce(_status("worker-2", model="other"))
    url = nats_config.url
    assert await millrace("drain", "worker-3", nats_url=url) == 2
    assert "There is no worker 'worker-3'. Workers: worker-1, worker-2." in capsys.readouterr().err
    assert await millrace("move", "worker-1", "--to", "worker-2", nats_url=url) == 2
    assert "not to worker-2, which serves other" in capsys.readouterr().err

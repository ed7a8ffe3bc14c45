"""A look with the command line changes nothing of a cluster: no stream, bucket or consumer is
created, changed or removed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import nats as nats_client
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from millrace.bus import nats, subjects
from millrace.bus.api import Bus
from millrace.bus.nats.permissions import Part
from millrace.cli.main import main
from millrace.runtime.binaries import nats_server_path
from millrace.schemas.config import NatsConfig
from millrace.schemas.jobs import JobResult
from tests.support.nats.cluster import nats_cluster
from tests.support.servers import NatsServer

_READS = ("STREAM.INFO.", "STREAM.MSG.GET.", "DIRECT.GET.", "CONSUMER.INFO.", "CONSUMER.NAMES.")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with nats_cluster(tmp_path_factory.mktemp("cluster")) as url:
        yield url


def config_of(url: str, **settings: Any) -> NatsConfig:
    return NatsConfig(url=url, connect_timeout_s=20.0, **settings)


@contextlib.asynccontextmanager
async def connected(url: str, part: Part, **settings: Any) -> AsyncIterator[Bus]:
    bus = await nats.connect(config_of(url, **settings), "test", part=part)
    try:
        yield bus
    finally:
        await bus.close()


class Observer:
    """Observer of a server's streams and of every request to JetStream's API."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.requests: list[str] = []

    async def note(self, message: Msg) -> None:
        self.requests.append(message.subject.removeprefix("$JS.API."))

    async def ask(self, request: str) -> dict[str, Any]:
        answer = await self._client.request(f"$JS.API.{request}", b"", timeout=5.0)
        found: dict[str, Any] = msgspec.json.decode(answer.data)
        return found

    async def streams(self) -> dict[str, dict[str, Any]]:
        """The configuration of every stream, of which buckets and object stores are kinds, with
        the names of its consumers."""
        found = {}
        for name in (await self.ask("STREAM.NAMES"))["streams"] or ():
            config = (await self.ask(f"STREAM.INFO.{name}"))["config"]
            consumers = (await self.ask(f"CONSUMER.NAMES.{name}"))["consumers"]
            found[name] = {**config, "consumers": consumers}
        return found

    async def changes(self) -> list[str]:
        """The requests so far that are no reads."""
        await self._client.flush()
        return [one for one in self.requests if not one.startswith(_READS)]


@contextlib.asynccontextmanager
async def observed(url: str) -> AsyncIterator[Observer]:
    client = await nats_client.connect(url.split(","))
    observer = Observer(client)
    try:
        yield observer
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def recording(url: str) -> AsyncIterator[Observer]:
    """Records requests; a client of its own, so that the observer's requests do not count."""
    client = await nats_client.connect(url.split(","))
    recorder = Observer(client)
    await client.subscribe("$JS.API.>", cb=recorder.note)
    await client.flush()
    try:
        yield recorder
    finally:
        await client.close()


class BareNatsServer(NatsServer):
    """Server without JetStream."""

    def command(self) -> list[str]:
        return [str(nats_server_path()), "-a", "127.0.0.1", "-p", str(self.port)]


async def millrace(*arguments: str) -> int:
    return await asyncio.to_thread(main, list(arguments))


async def test_looks_change_nothing_of_a_cluster(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = JobResult(request_id="r1", tenant="local", model="demo", status="done", text="Hello")
    async with (
        connected(cluster, Part.SCHEDULER, replicas=3, results_ttl_s=3_600.0) as bus,
        observed(cluster) as observer,
    ):
        await bus.results.store(result)
        before = await observer.streams()
        assert set(before) == set(subjects.STREAMS)
        assert {one["num_replicas"] for one in before.values()} == {3}
        async with recording(cluster) as recorder:
            at = ("--nats", cluster)
            assert await millrace("top", "--once", *at) == 0
            assert await millrace("workers", "list", *at) == 0
            assert await millrace("workers", "drain", "nobody", *at) == 2
            assert await millrace("result", "r1", *at) == 0
            assert await millrace("publish", "--prompt", "Hi", "--no-wait", *at) == 0
            assert await recorder.changes() == []
            assert "STREAM.INFO.JOBS" in recorder.requests, "what is recorded"
        assert await observer.streams() == before
    assert "Hello" in capsys.readouterr().out


async def test_parts_with_other_settings_shrink_nothing(cluster: str) -> None:
    async with connected(cluster, Part.SCHEDULER, replicas=3), observed(cluster) as observer:
        before = await observer.streams()
        for part in (Part.WORKER, Part.GATEWAY, Part.TELEMETRY):
            async with connected(cluster, part, max_stored_jobs=7, results_ttl_s=60.0) as bus:
                await bus.storage.failed_streams()
                await bus.storage.admit_jobs(admit=False)
                await bus.storage.admit_jobs(admit=True)
            assert await observer.streams() == before, part
        async with recording(cluster) as recorder, connected(cluster, Part.SCHEDULER):
            assert not [one for one in recorder.requests if "UPDATE" in one]
        assert await observer.streams() == before


async def test_a_look_at_a_server_without_streams_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with NatsServer(tmp_path) as server:
        for command in (
            ("top", "--once"),
            ("workers", "list"),
            ("publish", "--prompt", "Hi"),
            ("result", "r1"),
        ):
            assert await millrace(*command, "--nats", server.url) == 2
            error = capsys.readouterr().err
            assert error.startswith(
                f"millrace {command[0]}: No Millrace system uses the NATS server"
            )
            assert server.url in error
        async with observed(server.url) as observer:
            assert await observer.streams() == {}


async def test_a_server_without_jetstream_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_NATS__CONNECT_TIMEOUT_S", "0.5")
    with BareNatsServer(tmp_path) as server:
        assert await millrace("top", "--once", "--nats", server.url) == 2
    assert "its JetStream does not. Enable JetStream" in capsys.readouterr().err

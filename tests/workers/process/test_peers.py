"""Engines in processes of their own that exchange blocks and are killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from millrace.engine.types import EngineOutput, EngineRequest
from millrace.schemas.config import EngineConfig
from millrace.schemas.sampling import SamplingParams
from millrace.schemas.transfer import KvSource
from millrace.workers.process.engine_process import EngineClient
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.engine.warm_fixture import warm_processes as warm_processes
from tests.support.waiting import eventually

_CONFIG = EngineConfig(num_blocks=64, num_threads=1, device="cpu", max_num_sequences=8)
_PROMPT = tuple(range(20, 110))


pytestmark = pytest.mark.usefixtures("warm_processes")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


class Peer:
    """Client with all reports of its engine's process."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.outputs: list[EngineOutput] = []
        client.on_outputs = lambda outputs, _: self.outputs.extend(outputs)

    async def ask(self, request_id: str, source: Peer | None = None) -> list[int]:
        """Return the tokens of a request, for which another engine may have blocks."""
        self.add(request_id, source)
        return await self.answer(request_id)

    def add(
        self, request_id: str, source: Peer | None = None, prompt: tuple[int, ...] = _PROMPT
    ) -> None:
        endpoint = None if source is None else source.client.transfer_endpoint
        self.client.add(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True),
                kv_source=None
                if endpoint is None
                else KvSource(worker_id="peer", endpoint=endpoint),
            )
        )

    def of(self, request_id: str) -> list[EngineOutput]:
        return [output for output in self.outputs if output.request_id == request_id]

    async def answer(self, request_id: str) -> list[int]:
        await eventually(lambda: any(o.finished for o in self.of(request_id)))
        return [token for output in self.of(request_id) for token in output.token_ids]

    def num_pulled(self, request_id: str) -> int:
        return max(output.num_pulled_tokens for output in self.of(request_id))


@asynccontextmanager
async def _peers(checkpoint: Path, count: int, **config: object) -> AsyncIterator[list[Peer]]:
    settings = msgspec.structs.replace(_CONFIG, **config)
    clients = [await EngineClient.start(checkpoint, settings) for _ in range(count)]
    try:
        yield [Peer(client) for client in clients]
    finally:
        for client in clients:
            await client.close()


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of sockets, which is this test's alone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "millrace"


@pytest.mark.parametrize("address", ["", "127.0.0.1:0"])
async def test_blocks_go_to_a_process_that_lacks_them(
    checkpoint: Path, address: str, sockets: Path
) -> None:
    async with _peers(checkpoint, 2, transfer_address=address) as (source, other):
        expected = await source.ask("r")
        endpoint = source.client.transfer_endpoint
        assert endpoint is not None
        assert endpoint.layout == other.client.transfer_endpoint.layout  # type: ignore[union-attr]
        if address:
            source.client.transfer_endpoint = msgspec.structs.replace(endpoint, host="elsewhere")
        assert await other.ask("r", source) == expected
        assert other.num_pulled("r") == 80
        assert other.client.stats.num_pulled_blocks == 5
        # It rests, but is told that the other one has read what it lent.
        source.add("again")
        await source.answer("again")
        assert source.client.stats.num_served_blocks == 5
        assert len(list(sockets.glob("*.sock"))) == 2
    assert not list(sockets.glob("*.sock")), "they are removed at the end"


async def test_a_source_that_is_killed_costs_no_token(checkpoint: Path, sockets: Path) -> None:
    async with _peers(checkpoint, 2) as (source, other):
        expected = await source.ask("r")
        # It stands still while it is asked, and dies.
        os.kill(source.client.pid, signal.SIGSTOP)
        other.add("r", source)
        other.add("meanwhile", prompt=_PROMPT[50:])
        assert len(await other.answer("meanwhile")) == 12, "others go on"
        assert not other.of("r")
        os.kill(source.client.pid, signal.SIGKILL)
        assert await other.answer("r") == expected
        assert other.client.stats.num_failed_pulls == 1
        assert other.client.stats.num_free_blocks == 64
        await asyncio.wait_for(source.client.wait_closed(), 5.0)
        assert len(list(sockets.glob("*.sock"))) == 2
        # What it left is removed by the next that begins.
        async with _peers(checkpoint, 1):
            assert len(list(sockets.glob("*.sock"))) == 2


async def test_a_source_that_is_killed_between_asking_and_reading_costs_no_token(
    checkpoint: Path,
) -> None:
    """The source's memory is mapped already, and the connection to it is open."""
    async with _peers(checkpoint, 2) as (source, other):
        expected = await source.ask("r")
        other.add("short", source, _PROMPT[:30])
        await other.answer("short")
        assert other.num_pulled("short") == 16
        os.kill(source.client.pid, signal.SIGSTOP)
        other.add("r", source)
        other.add("meanwhile", prompt=_PROMPT[50:])
        assert len(await other.answer("meanwhile")) == 12
        os.kill(source.client.pid, signal.SIGKILL)
        assert await other.answer("r") == expected
        assert other.num_pulled("r") == 0


async def test_a_source_that_stands_still_is_waited_for_a_while(checkpoint: Path) -> None:
    async with _peers(checkpoint, 2) as (source, other):
        expected = await source.ask("r")
        os.kill(source.client.pid, signal.SIGSTOP)
        assert await other.ask("r", source) == expected
        os.kill(source.client.pid, signal.SIGCONT)
        assert other.client.stats.num_failed_pulls in (0, 1), "it may still be on its way"
        assert await source.ask("again") == expected


@pytest.mark.parametrize("config", [{"transfer": False}, {"prefix_cache": False}])
async def test_engine_that_serves_no_blocks_reports_it(
    checkpoint: Path, config: dict[str, bool]
) -> None:
    async with _peers(checkpoint, 1, **config) as (alone,):
        assert alone.client.transfer_endpoint is None
        assert len(await alone.ask("r")) == 12

"""Blocks pulled from another worker's engine: the same tokens, whatever becomes of the peer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.schemas.config import EngineConfig
from millrace.schemas.transfer import KvSource
from millrace.workers.engine.engine import Engine
from millrace.workers.engine.kv.block_identity import block_identity
from millrace.workers.engine.runners import load_runner
from millrace.workers.engine.types import EngineOutput, EngineRequest
from tests.workers.engine.support import drain, prompt, request, tokens_by_request

HISTORY = prompt(1, 90)  # five blocks and a part
BLOCK_BYTES = 3 * 16 * 2 * 2 * 16 * 4
_WITHIN_S = 30.0


class World:
    """Engines of one checkpoint with a clock that is set by hand; those that are not asked step on
    a thread, as in a process of their own."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.now_s = 0.0
        self.model = model
        self.folder = folder
        self._engines: list[Engine] = []

    def start(self, *, transfer: bool = True, address: str = "", **config: Any) -> Engine:
        settings = EngineConfig(
            **{"num_blocks": 24, "device": "cpu", "transfer": transfer, **config}
        )
        runner = load_runner(self.model, settings)
        engine = Engine(runner, settings, monotonic=lambda: self.now_s)
        identity = block_identity(
            self.model, settings, runner.cache, is_row_exact=runner.is_row_exact
        )
        engine._tiers.exchange_with_peers(identity, address, self.folder)
        self._engines.append(engine)
        return engine

    def source(self, engine: Engine, num_tokens: int = 0, **endpoint: Any) -> KvSource:
        """``engine`` as one that has blocks."""
        told = engine.transfer_endpoint
        assert told is not None
        return KvSource(
            worker_id="peer",
            endpoint=msgspec.structs.replace(told, **endpoint),
            num_tokens=num_tokens,
        )

    def pull(
        self, engine: Engine, source: KvSource, peer: Engine, asked: EngineRequest | None = None
    ) -> tuple[list[int], EngineOutput]:
        """The tokens of a request, whose blocks ``source`` says are with ``peer``, which rests
        meanwhile; and its first output."""
        asked = asked or request("r", HISTORY)
        engine.add(msgspec.structs.replace(asked, kv_source=source))
        with resting(peer):
            outputs = drain(engine)
        peer.rest()
        peer.check_integrity()
        return tokens_by_request(outputs)["r"], next(o for o in outputs if o.started)

    def close(self) -> None:
        for engine in self._engines:
            assert engine._tiers.exchange is not None
            engine._tiers.exchange.close()


class resting:  # noqa: N801 (a context)
    """``rest`` is called whenever there is something to do, as the engine's process does."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_over = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_over:
            self._engine._bell.wait(_WITHIN_S)
            self._engine.rest()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._engine.wake()
        self._thread.join()


@pytest.fixture
def world(llama: tuple[Path, Any], tmp_path: Path) -> Iterator[World]:
    made = World(llama[0], tmp_path / "peers")
    yield made
    made.close()


def _ask(engine: Engine, asked: EngineRequest | None = None) -> list[int]:
    engine.add(asked or request("r", HISTORY))
    return tokens_by_request(drain(engine))["r"]


@pytest.mark.parametrize("address", ["", "127.0.0.1:0"])
@pytest.mark.parametrize("offload_s", [30.0, 0.0])
def test_a_prefix_that_a_peer_has_is_not_computed(
    world: World, address: str, offload_s: float
) -> None:
    peer = world.start(address=address, idle_offload_s=offload_s)
    expected = _ask(peer)
    world.now_s = 10.0
    peer._tables.offload_idle(world.now_s)
    assert bool(peer.stats().num_used_host_blocks) == (offload_s == 0.0)
    source = world.source(peer, host="elsewhere") if address else world.source(peer)
    engine = world.start()
    tokens, started = world.pull(engine, source, peer)
    assert tokens == expected
    assert (started.num_cached_tokens, started.num_pulled_tokens) == (80, 80)
    stats = engine.stats()
    assert stats.num_pulled_blocks == 5
    assert stats.num_pulled_bytes == 5 * BLOCK_BYTES
    assert stats.num_failed_pulls == 0
    assert peer.stats().num_served_blocks == 5
    # Again: what is here is not pulled.
    tokens, started = world.pull(engine, source, peer)
    assert tokens == expected
    assert started.num_pulled_tokens == 0
    assert engine.stats().num_pulled_blocks == 5

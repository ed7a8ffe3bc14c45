"""Engines that exchange blocks, in one process."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from millrace.engine.kv.block_identity import transfer_identity
from millrace.engine.step.engine import Engine
from millrace.engine.step.runners import load_runner
from millrace.engine.types import EngineOutput, EngineRequest
from millrace.schemas.transfer import KvSource
from tests.engine.support import drain, prompt, request, resolved, tokens_by_request

HISTORY = prompt(1, 90)  # five blocks and a part
BLOCK_BYTES = 3 * 16 * 2 * 2 * 16 * 4
_WITHIN_S = 30.0


class World:
    """Engines of one checkpoint with a clock that is set by hand. Engines without requests step on
    a thread, as in a process of their own."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.now_s = 0.0
        self.model = model
        self.folder = folder
        self._engines: list[Engine] = []

    def _clock_s(self) -> float:
        """Return the time; each call adds 1 µs, which is negligible beside steps by hand."""
        self.now_s += 1e-6
        return self.now_s

    def start(self, *, address: str = "", lends_cache: bool = True, **config: Any) -> Engine:
        """Start another engine; without ``lends_cache`` its cache is in memory of its own."""
        given: dict[str, Any] = {"num_blocks": 24, "device": "cpu", "transfer": True}
        settings = resolved(self.model, **given | config)
        runner = load_runner(self.model, msgspec.structs.replace(settings, transfer=lends_cache))
        engine = Engine(runner, settings, monotonic=self._clock_s)
        identity = transfer_identity(
            self.model, settings, runner.cache, is_row_exact=runner.is_row_exact
        )
        engine._tiers.exchange_with_peers(
            identity, address or None, self.folder, settings.transfer_transport
        )
        # A computing time of 0 means unknown, so that everything is pulled.
        engine._tiers.arrivals._compute_s = lambda _num_tokens: 0.0
        self._engines.append(engine)
        return engine

    def source(self, engine: Engine, num_tokens: int = 0, **endpoint: Any) -> KvSource:
        """Return ``engine`` as a KV source."""
        own = engine.transfer_endpoint
        assert own is not None
        return KvSource(
            worker_id="peer",
            endpoint=msgspec.structs.replace(own, **endpoint),
            num_tokens=num_tokens,
        )

    def pull(
        self, engine: Engine, source: KvSource, peer: Engine, asked: EngineRequest | None = None
    ) -> tuple[list[int], EngineOutput]:
        """Return the tokens of a request and its first output. ``source`` places the request's
        blocks at ``peer``, which rests meanwhile."""
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
    """Context in which a thread calls ``rest`` at each wake-up, as the engine's process does."""

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


def ask(engine: Engine, asked: EngineRequest | None = None) -> list[int]:
    """Return the tokens of a request, of which no other engine has blocks."""
    engine.add(asked or request("r", HISTORY))
    return tokens_by_request(drain(engine))["r"]


def rest(engine: Engine) -> None:
    """Wait until the engine has no transfer in flight."""
    until_s = time.monotonic() + _WITHIN_S
    while engine.rest() is not None:
        engine._bell.wait(1.0)
        assert time.monotonic() < until_s

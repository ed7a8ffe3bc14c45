"""Engines that share an object store, in one process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from obstore.store import ObjectStore

from millrace.engine.kv.block_file import block_file
from millrace.engine.kv.block_identity import block_identity
from millrace.engine.kv.objects.block_objects import BlockObjects
from millrace.engine.step.engine import Engine
from millrace.engine.step.runners import load_runner
from millrace.engine.types import EngineOutput
from tests.engine.support import drain, prompt, request, resolved, tokens_by_request

BLOCK_BYTES = 3 * 16 * 2 * 2 * 16 * 4
BLOCKS_PER_OBJECT = 2
HISTORY = prompt(1, 90)  # five blocks and a part
_WITHIN_S = 30.0


class World:
    """Engines of one checkpoint with a clock that is set by hand, each as in a fresh process."""

    def __init__(self, model: Path, store: ObjectStore) -> None:
        self.now_s = 0.0
        self.model = model
        self.store = store

    def start(self, *, store: ObjectStore | None = None, **config: Any) -> Engine:
        settings = resolved(
            self.model,
            **{"num_blocks": 24, "device": "cpu", "object_cache_min_tokens": 32, **config},
        )
        runner = load_runner(self.model, settings)
        engine = Engine(runner, settings, monotonic=lambda: self.now_s)
        exact = runner.is_row_exact
        identity = block_identity(self.model, settings, runner.cache, is_row_exact=exact)
        store = store or self.store
        engine._tiers.keep_in_store(
            BlockObjects(store, store, identity, BLOCK_BYTES, BLOCKS_PER_OBJECT * BLOCK_BYTES),
            settings,
        )
        if settings.disk_cache_path is not None:
            engine.keep_on_disk(block_file(self.model, settings, runner.cache, is_row_exact=exact))
        # A computing time of 0 means unknown, so that everything is brought.
        engine._tiers.arrivals._compute_s = lambda _num_tokens: 0.0
        return engine

    def rest(self, engine: Engine, for_s: float = 100.0) -> None:
        """Let the engine be idle until all blocks are written."""
        self.now_s += for_s
        until_s = time.monotonic() + _WITHIN_S
        while engine.rest() is not None:
            engine._bell.wait(0.01)
            assert time.monotonic() < until_s
        engine.check_integrity()


def ask(engine: Engine, token_ids: list[int] = HISTORY, **fields: Any) -> tuple[list[int], int]:
    """Run a request; return its tokens, and how many tokens of the prompt were found."""
    engine.add(request("r", token_ids, **fields))
    outputs: list[EngineOutput] = drain(engine)
    found = next(o for o in outputs if o.started).num_cached_tokens
    return tokens_by_request(outputs)["r"], found

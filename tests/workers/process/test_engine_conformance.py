"""Conformance of the engine in a process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.workers.engine_like import EngineLike
from millrace.workers.process.engine_process import EngineClient
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.workers.conformance import EngineConformance, running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineLike]:
    path = write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")
    config = EngineConfig(num_threads=1, device="cpu", max_num_sequences=4, num_blocks=256)
    async with running(await EngineClient.start(path, config)) as engine:
        yield engine


class TestOwnEngine(EngineConformance):
    kind = EngineKind.REAL

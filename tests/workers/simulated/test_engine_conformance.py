"""Conformance of the simulated engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from millrace.runtime.clock import SystemClock
from millrace.schemas.config import EngineConfig, SimulationConfig
from millrace.schemas.engines import EngineKind
from millrace.workers.engine_like import EngineLike
from millrace.workers.simulated.engine import SimulatedEngine
from tests.workers.conformance import EngineConformance, running
from tests.workers.scripted import served_model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineLike]:
    config = EngineConfig(
        kind=EngineKind.SIMULATED,
        simulation=SimulationConfig(prefill_tokens_per_s=100_000.0, step_ms=0.5),
        max_num_sequences=4,
        num_blocks=256,
    )
    model = served_model(tmp_path_factory.mktemp("model"))
    async with running(await SimulatedEngine.start(model, config, SystemClock())) as engine:
        yield engine


class TestSimulatedEngine(EngineConformance):
    kind = EngineKind.SIMULATED

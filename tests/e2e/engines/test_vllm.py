"""The whole system on vLLM: one command, the demo model's checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.schemas.engines import EngineKind
from tests.e2e.engines.checks import EngineSystemChecks
from tests.support.system import System

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(reason="starts a server of another project"),
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    arguments = ("--port", "0", "--engine", "vllm", "--model", "demo")
    running = System(tmp_path_factory.mktemp("vllm"), arguments, starts_within_s=400.0).start()
    yield running
    assert running.stop() == 0


class TestVllm(EngineSystemChecks):
    kind = EngineKind.VLLM
    program = "vllm"

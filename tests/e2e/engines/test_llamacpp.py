"""The whole system on llama.cpp's server: one command, a GGUF file of the demo model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.support.gguf_files import write_gguf
from schemas.engines import EngineKind
from tests.e2e.engines.checks import EngineSystemChecks
from tests.support.repository import ROOT
from tests.support.system import System

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.llamacpp]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("llamacpp")
    model = write_gguf(folder / "demo.gguf", ROOT / "registry" / "demo" / "model", "float32")
    # Near ties among tokens would be decided by how many were computed together.
    exact = "--cache-type-k f32 --cache-type-v f32 --flash-attn off"
    arguments = (
        *("--port", "18400", "--engine", "llamacpp", "--model", str(model)),
        *("--engine-arguments", exact),
    )
    running = System(folder / "data", arguments).start()
    yield running
    assert running.stop() == 0


class TestLlamaCpp(EngineSystemChecks):
    kind = EngineKind.LLAMACPP
    program = "llama-server"

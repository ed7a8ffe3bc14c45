"""The whole system on llama.cpp's server: one command, a GGUF file of the demo model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.support.processes import read
from millrace.schemas.engines import EngineKind
from tests.e2e.clients import ask_sse
from tests.e2e.engines.checks import QUESTION, EngineSystemChecks
from tests.support.gguf_files import write_gguf
from tests.support.repository import ROOT
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(reason="starts a server of another project"),
    pytest.mark.llamacpp,
]


def on_llamacpp(folder: Path) -> tuple[str, ...]:
    """The arguments of ``millrace up`` for the demo model, whose file is written to ``folder``."""
    model = write_gguf(folder / "demo.gguf", ROOT / "registry" / "demo" / "model", "float32")
    # Near ties among tokens would be decided by how many were computed together.
    exact = "--cache-type-k f32 --cache-type-v f32 --flash-attn off"
    return ("--engine", "llamacpp", "--model", str(model), "--engine-arguments", exact)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("llamacpp")
    running = System(folder / "data", ("--port", "0", *on_llamacpp(folder))).start()
    yield running
    assert running.stop() == 0


class TestLlamaCpp(EngineSystemChecks):
    kind = EngineKind.LLAMACPP
    program = "llama-server"


_NUM_STREAMS = 6
_SCALED = {
    "worker": {"max_num_waiting": 0, "engine": {"max_num_sequences": 2}},
    "scheduler": {
        "autoscale": {
            "target_wait_s": 0.2,
            "cold_start_s": 1.0,
            "scale_down_after_s": 1.0,
            "idle_s": 2.0,
        }
    },
}


async def test_llamacpp_workers_scale_with_the_load(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text(json.dumps(_SCALED))
    arguments = (
        *("--port", "0", "--autoscale", "0:2", "--config", str(settings)),
        *on_llamacpp(tmp_path),
    )
    scaled = System(tmp_path / "data", arguments).start()
    try:
        async with httpx.AsyncClient(base_url=scaled.http, timeout=60.0) as http:
            asked = [
                asyncio.create_task(
                    ask_sse(http, QUESTION, seed=n, max_tokens=450, ignore_eos=True)
                )
                for n in range(_NUM_STREAMS)
            ]
            await eventually(lambda: _num_servers(scaled) == 2, timeout_s=30.0)
            answers = await asyncio.gather(*asked)
            assert [answer.completion_tokens for answer in answers] == [450] * _NUM_STREAMS
            assert len({answer.text for answer in answers}) == 1
            await eventually(lambda: _num_servers(scaled) == 0, timeout_s=30.0)
            assert "first token" in (await ask_sse(http, QUESTION)).text.lower()
            assert _num_servers(scaled) == 1
    finally:
        assert scaled.stop() == 0


def _num_servers(system: System) -> int:
    # By what is read at once: a process that is listed may have ended before it is asked.
    return sum(reading.role == "llama-server" for reading in read(system.processes()).values())

"""Engine on an OpenAI-compatible server: llama.cpp's, by its /v1/completions alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from millrace.registry.catalogue import Catalogue
from millrace.registry.served import ServedModel
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.frames import FinishReason
from millrace.workers.engine_like import EngineLike
from millrace.workers.servers.server_engine import ServerEngine
from millrace.workers.servers.starting import start_server_engine
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.gguf_files import write_gguf
from tests.support.waiting import eventually
from tests.workers.conformance import PROMPT, EngineConformance, Heard, request, running
from tests.workers.servers.llamacpp_server import llamacpp_server

pytestmark = [
    pytest.mark.slow(reason="starts another project's server with a real model"),
    pytest.mark.llamacpp,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """Return a model so large that a test can cancel a request before it is over."""
    checkpoint = write_checkpoint(
        tmp_path_factory.mktemp("checkpoint") / "tiny",
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
    )
    file = write_gguf(checkpoint.parent / "tiny.gguf", checkpoint, "float32")
    catalogue = Catalogue({}).with_model(str(file))
    return ServedModel.load(catalogue, catalogue.names()[0])


@asynccontextmanager
async def _attached(model: ServedModel, url: str, **changes: Any) -> AsyncIterator[ServerEngine]:
    config = EngineConfig(kind=EngineKind.OPENAI, url=url, max_num_sequences=2, **changes)
    engine = await start_server_engine(model, config, SystemClock())
    try:
        yield engine
    finally:
        await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    model: ServedModel, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineLike]:
    folder = tmp_path_factory.mktemp("server")
    async with (
        llamacpp_server(model, folder) as (url, _),
        _attached(model, f"{url}/v1") as started,
        running(started) as engine,
    ):
        yield engine


class TestOpenAi(EngineConformance):
    kind = EngineKind.OPENAI

    async def test_text_of_the_engine_is_the_server_s(
        self, engine: ServerEngine, model: ServedModel
    ) -> None:
        heard = Heard(engine)
        engine.add(request("r", max_tokens=25))
        await heard.ended("r")
        url = engine._client.url
        body = {
            "prompt": model.tokenizer.decode(PROMPT),
            "max_tokens": 25,
            "temperature": 0.0,
            "seed": 7,
        }
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/completions", json=body) as answer,
        ):
            [choice] = (await answer.json())["choices"]
        end = heard.end("r")
        assert end is not None
        assert model.tokenizer.decode(heard.tokens("r")) == choice["text"]
        assert end.finish_reason == FinishReason(choice["finish_reason"])


async def test_a_cancel_frees_the_slot(model: ServedModel, tmp_path: Path) -> None:
    async with (
        llamacpp_server(model, tmp_path) as (url, _),
        _attached(model, url) as engine,
    ):
        heard = Heard(engine)
        for number in range(8):
            engine.add(request(f"r{number}", max_tokens=100))
        await eventually(lambda: bool(heard.outputs), timeout_s=30.0)
        for number in range(8):
            engine.cancel(f"r{number}")

        async def is_idle() -> bool:
            async with aiohttp.ClientSession() as session, session.get(f"{url}/slots") as answer:
                return not any(slot["is_processing"] for slot in await answer.json())

        await eventually(is_idle)


async def test_a_server_that_is_killed_ends_the_engine(model: ServedModel, tmp_path: Path) -> None:
    async with (
        llamacpp_server(model, tmp_path) as (url, process),
        _attached(model, url) as engine,
    ):
        heard = Heard(engine)
        for number in range(8):
            engine.add(request(f"r{number}", max_tokens=100))
        process.kill()
        assert "no longer answers" in await engine.wait_closed()
        assert all(output.error is None for output in heard.outputs)

"""Claude Code against errors: it ends at once, says why, or asks again for less."""

from __future__ import annotations

import asyncio
import copy
import os
from pathlib import Path

import pytest

from millrace.gateway.models import LoadedModels
from millrace.registry.catalogue import load_catalogue
from millrace.registry.served import ServedModel
from millrace.runtime.metrics_server import render
from millrace.schemas.config import GatewayConfig
from millrace.schemas.models.cards import ModelCard
from tests.clients.packages import need, npm_packages
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway

pytestmark = pytest.mark.slow(reason="Claude Code is a process of its own and starts in seconds")

_RUN_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def program() -> Path:
    need("npm")
    folder = npm_packages("claude-code", "@anthropic-ai/claude-code@2.1.332")
    return folder / "node_modules" / ".bin" / "claude"


async def _says(program: Path, front: RunningGateway, home: Path) -> tuple[str, int | None]:
    """Return the program's output for one question, and its exit status. It must end in time."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": front.url,
        "ANTHROPIC_API_KEY": "sk-none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    process = await asyncio.create_subprocess_exec(
        program,
        "-p",
        "hello",
        env=environment,
        cwd=home,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_RUN_TIMEOUT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode(), process.returncode


def _models(window_tokens: int) -> LoadedModels:
    """The demo's model with a window of so many tokens."""
    model = copy.copy(ServedModel.load(load_catalogue(""), "demo"))
    model.context_window_tokens = window_tokens
    card = ModelCard(id=MODEL, created=0, max_model_len=window_tokens)
    return LoadedModels({MODEL: card}, lambda _name: model)


async def test_a_wrong_key(program: Path, tmp_path: Path) -> None:
    async with running_gateway(GatewayConfig(auth="required")) as front:
        output, status = await _says(program, front, tmp_path)
        metrics = render(front.gateway.metrics.registry).decode()
    assert status == 1
    assert "Invalid API key" in output
    refused = [
        float(line.rpartition(" ")[2])
        for line in metrics.splitlines()
        if "invalid_api_key" in line and 'route="/v1/messages"' in line and "_total{" in line
    ]
    assert refused == [1.0], metrics  # it does not ask again


async def test_a_prompt_that_cannot_fit(program: Path, tmp_path: Path) -> None:
    async with running_gateway(models=_models(2_048)) as front:
        output, status = await _says(program, front, tmp_path)
    assert status == 1
    assert "Prompt is too long" in output
    assert "(limit 2048)" in output


async def test_it_lowers_max_tokens(program: Path, tmp_path: Path) -> None:
    async with running_gateway(models=_models(40_000)) as front:
        front.worker.script = lambda _job: ["It ", "turns."]
        output, status = await _says(program, front, tmp_path)
        wanted = [job.sampling.max_tokens or 0 for job in front.worker.jobs]
    assert status == 0, output
    assert "It turns." in output
    assert wanted
    assert max(wanted) < 32_000

"""The whole system on a server that runs already, by nothing but OpenAI's completions: llama.cpp's,
with the demo model."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from millrace.schemas.engines import EngineKind
from millrace.workers.servers.server_process import find_program
from tests.e2e.clients import Answer, ask_sse
from tests.e2e.engines.checks import QUESTION, EngineAnswerChecks
from tests.support.gguf_files import write_gguf
from tests.support.repository import ROOT
from tests.support.servers import free_port
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(reason="starts a server of another project"),
    pytest.mark.llamacpp,
]

_NUM_STREAMS = 20


class _Server:
    """Somebody's server, which can be killed and started again at the same port."""

    def __init__(self, folder: Path) -> None:
        model = write_gguf(folder / "demo.gguf", ROOT / "registry" / "demo" / "model", "float32")
        self.port = free_port()
        self._command = [
            *(str(find_program("llama-server", "", "llama.cpp")), "--model", str(model)),
            *("--port", str(self.port), "--parallel", "8", "--ctx-size", "8192", "--threads", "1"),
            *("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off", "--slots"),
        ]
        self.start()

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, stdout=quiet, stderr=quiet)

    async def is_amid_streams(self) -> bool:
        """Return whether at least three streams have 4 to 25 tokens."""
        async with httpx.AsyncClient() as http:
            slots = (await http.get(f"http://127.0.0.1:{self.port}/slots")).json()
        made: list[int] = [
            slot["next_token"][0]["n_decoded"] for slot in slots if slot["is_processing"]
        ]
        return sum(4 <= num_tokens <= 25 for num_tokens in made) >= 3

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Server]:
    running = _Server(tmp_path_factory.mktemp("server"))
    yield running
    running.kill()


@pytest.fixture(scope="module")
def system(server: _Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    arguments = (
        *("--port", "0", "--engine", "openai", "--model", "demo"),
        *("--engine-url", f"http://127.0.0.1:{server.port}/v1"),
    )
    running = System(tmp_path_factory.mktemp("openai") / "data", arguments).start()
    yield running
    assert running.stop() == 0


class TestOpenAi(EngineAnswerChecks):
    kind = EngineKind.OPENAI

    async def test_a_call_that_is_demanded_is_refused(self, http: httpx.AsyncClient) -> None:
        tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": QUESTION}],
            "tools": [tool],
            "tool_choice": "required",
        }
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "tool_choice"
        assert error["message"].startswith("The openai engine of this model")

    async def test_streams_go_on_behind_their_text_when_the_server_was_killed(
        self, server: _Server, system: System, http: httpx.AsyncClient
    ) -> None:
        def ask(number: int) -> asyncio.Task[Answer]:
            return asyncio.ensure_future(ask_sse(http, f"{QUESTION} {number}"))

        undisturbed = await asyncio.gather(*map(ask, range(_NUM_STREAMS)))
        log = system.data / "logs" / "worker-1.log"
        num_replaced = log.read_text().count("a new engine runs")
        tasks = [ask(number) for number in range(_NUM_STREAMS)]
        await eventually(server.is_amid_streams, timeout_s=30.0)
        server.kill()
        await eventually(lambda: "no longer answers" in log.read_text(), timeout_s=30.0)
        server.start()
        answers = await asyncio.wait_for(asyncio.gather(*tasks), timeout=120.0)
        assert log.read_text().count("a new engine runs") == num_replaced + 1
        assert [one.text for one in answers] == [one.text for one in undisturbed]

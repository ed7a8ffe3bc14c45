"""Workers change roles while streams run on both, and no token changes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.cli.main import main
from tests.e2e.clients import ask_sse
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(
        reason="swaps the roles of a system's workers; the scheduler's tests cover the decisions"
    ),
]

_LONG = "What is a KV cache? " * 40
_NUM_STREAMS = 6


async def _texts(http: httpx.AsyncClient) -> list[str]:
    """Long prompts of which none begins as another, half of them drawn."""
    answers = await asyncio.gather(
        *(
            ask_sse(
                http,
                f"{number} {_LONG}",
                max_tokens=300,
                ignore_eos=True,
                temperature=float(number % 2),
                seed=number,
            )
            for number in range(_NUM_STREAMS)
        )
    )
    return [answer.text for answer in answers]


def _workers(system: System, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["workers", *arguments, "--data", str(system.data)]) == 0
    return capsys.readouterr().out


def _listed(system: System, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    shown = json.loads(_workers(system, capsys, "list", "--json"))
    return {worker["name"]: worker.get("role", "both") for worker in shown}


async def test_an_operator_swaps_roles_while_streams_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--port", "0", "--workers", "prefill:1,decode:1", "--switch-roles")
    system = System(tmp_path / "data", arguments=arguments).start()
    try:
        before = {"worker-1": "prefill", "worker-2": "decode"}
        assert await asyncio.to_thread(_listed, system, capsys) == before
        async with httpx.AsyncClient(base_url=system.http, timeout=60.0) as http:
            running = asyncio.create_task(_texts(http))

            async def all_run() -> bool:
                return bool((await http.get("/healthz")).json()["open_streams"] >= _NUM_STREAMS)

            await eventually(all_run)
            for name, role in (("worker-2", "prefill"), ("worker-1", "decode")):
                output = await asyncio.to_thread(_workers, system, capsys, "role", name, role)
                assert output == f"the role of {name} is {role}; it was {before[name]}\n"
            assert not running.done(), "they ran all the while"
            after = {"worker-1": "decode", "worker-2": "prefill"}
            assert await asyncio.to_thread(_listed, system, capsys) == after
            assert await running == await _texts(http)
    finally:
        assert system.stop() == 0

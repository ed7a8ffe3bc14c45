"""Twenty LoRA adapters on two workers, asked for at once by the openai client, while others come
and go and a worker is killed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import transformers

from tests.engine.adapters.saved import save_adapter
from tests.support.repository import ROOT
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow(reason="makes 22 adapters and starts two engines")]

_NUM_ADAPTERS = 20
_TOKENS = 160
_QUESTION = "What is continuous batching?"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    model = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "registry/demo/model").eval()
    made = tmp_path_factory.mktemp("adapters")
    for number in range(_NUM_ADAPTERS + 2):
        save_adapter(
            made / f"a{number:02d}",
            model,
            seed=number,
            r=2 + number % 7,
            lora_alpha=8,
            strength=0.6,
        )
    return sorted(made.iterdir())


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, folders: list[Path]) -> Iterator[System]:
    named = [f"--adapter={folder.name}={folder}" for folder in folders[:_NUM_ADAPTERS]]
    arguments = ("--port", "0", "--workers", "2", *named)
    running = System(tmp_path_factory.mktemp("adapted"), arguments=arguments).start()
    yield running
    assert running.stop() == 0


async def _stream(client: openai.AsyncOpenAI, model: str) -> str:
    text, usage = "", None
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": _QUESTION}],
        max_tokens=_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        assert chunk.model == model
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert usage is not None
    assert usage.completion_tokens == _TOKENS
    return text


def _millrace(system: System, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "millrace", *arguments, "--data", str(system.data)],
        capture_output=True,
        check=True,
        timeout=60,
        text=True,
    ).stdout


async def test_streams_of_twenty_adapters_go_on_whatever_comes_and_goes(
    adapted: System, folders: list[Path]
) -> None:
    names = [folder.name for folder in folders[:_NUM_ADAPTERS]]
    client = openai.AsyncOpenAI(base_url=f"{adapted.http}/v1", api_key="none", timeout=120.0)
    async with client, httpx.AsyncClient(base_url=adapted.http, timeout=30.0) as http:
        listed = [card.id async for card in client.models.list()]
        assert listed == ["demo", *names]
        undisturbed = dict(
            zip(names, await asyncio.gather(*(_stream(client, n) for n in names)), strict=True)
        )
        assert len(set(undisturbed.values())) == _NUM_ADAPTERS
        tasks = [asyncio.create_task(_stream(client, f"demo:{name}")) for name in names]

        async def all_run() -> bool:
            return bool((await http.get("/healthz")).json()["open_streams"] >= _NUM_ADAPTERS)

        await eventually(all_run)
        killed = adapted.kill("worker-1")
        more = folders[_NUM_ADAPTERS]
        await asyncio.to_thread(_millrace, adapted, "adapters", "add", more.name, str(more))
        body = {"lora_name": names[0], "lora_path": str(folders[-1]), "load_inplace": True}
        answer = await http.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 200, answer.text
        await asyncio.to_thread(_millrace, adapted, "adapters", "remove", names[1])
        assert await _stream(client, more.name)
        published = await asyncio.to_thread(
            _millrace,
            adapted,
            "publish",
            "--adapter",
            names[2],
            "--prompt",
            _QUESTION,
            *("--max-tokens", "12", "--temperature", "0"),
        )
        assert undisturbed[names[2]].startswith(published.strip()[:20])
        texts = await asyncio.wait_for(asyncio.gather(*tasks), timeout=120.0)
        # What was taken before goes on with what it began with, token for token.
        assert dict(zip(names, texts, strict=True)) == undisturbed
        assert await _stream(client, names[0]) != undisturbed[names[0]]
        with pytest.raises(openai.NotFoundError):
            await _stream(client, names[1])
        await eventually(lambda: adapted.pid("worker-1") != killed)
    listed_rows = json.loads(_millrace(adapted, "adapters", "list", "--json"))
    assert len(listed_rows) == _NUM_ADAPTERS


async def test_the_records_say_which_adapter_it_was(adapted: System) -> None:
    query = (
        "SELECT adapter, any(model_served), countIf(device_us > 0), count() FROM requests "
        "WHERE status = 'done' AND adapter != '' GROUP BY adapter ORDER BY adapter"
    )

    def rows() -> list[list[str]]:
        shown = _millrace(adapted, "sql", query, "--format", "csv")
        return [line.split(",") for line in shown.strip().splitlines()[1:]]

    await eventually(lambda: len(rows()) >= _NUM_ADAPTERS, 30.0)
    for _adapter, model, measured, count in rows():
        assert (model.strip('"'), measured) == ("demo", count)

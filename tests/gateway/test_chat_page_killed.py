"""Chat page whose gateway is killed: another gateway on the port continues the answer."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.async_api import expect

from millrace.bus import nats
from millrace.bus.nats.permissions import Part
from millrace.schemas.config import NatsConfig
from tests.gateway.test_process import ready
from tests.support.chromium import chromium
from tests.support.echo_worker import EchoWorker
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.servers import RedisServer, free_port

pytestmark = pytest.mark.browser


class Valve(asyncio.Event):
    """Lets a few pass before it is set."""

    def __init__(self, num_free: int) -> None:
        super().__init__()
        self._num_free = num_free

    async def wait(self) -> Literal[True]:
        if self._num_free:
            self._num_free -= 1
            return True
        return await super().wait()


@pytest.fixture
async def worker(nats_config: NatsConfig) -> AsyncIterator[EchoWorker]:
    bus = await nats.connect(nats_config, "test", part=Part.SCHEDULER)
    made = EchoWorker(bus, "tiny", script=lambda _job: "abcdefgh")
    await made.start()
    yield made
    await made.close()
    await bus.close()


async def test_a_killed_gateway_costs_no_token(
    nats_config: NatsConfig, redis_server: RedisServer, worker: EchoWorker, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "tiny")
    catalogue = tmp_path / "models.yaml"
    catalogue.write_text("models:\n  tiny:\n    source: ./tiny\n")
    port = free_port()
    environment = {
        "MILLRACE_NATS__URL": nats_config.url,
        "MILLRACE_REDIS__URL": redis_server.url,
        "MILLRACE_CATALOGUE": str(catalogue),
        "MILLRACE_GATEWAY__PORT": str(port),
    }

    async def start() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "millrace.gateway"),
            env=os.environ | environment,
            stderr=asyncio.subprocess.PIPE,
        )

    worker.gate = Valve(3)
    first = await start()
    others: list[asyncio.subprocess.Process] = []
    try:
        await ready(first)
        async with chromium() as browser:
            page = await browser.new_page()
            await page.goto(f"http://127.0.0.1:{port}/")
            await expect(page.locator("#model")).to_be_enabled()
            others.append(await start())
            await ready(others[0])
            await page.locator("#prompt").fill("hello")
            await page.locator("#send").click()
            await expect(page.locator(".said")).to_have_text("abc")
            first.kill()
            await expect(page.locator("#connection")).to_have_attribute(
                "data-state", "open", timeout=20_000
            )
            worker.gate.set()
            await expect(page.locator(".said")).to_have_text("abcdefgh", timeout=20_000)
            await expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")
            await expect(page.locator(".facts")).to_contain_text("resumed once")
    finally:
        for process in (first, *others):
            if process.returncode is None:
                process.kill()
            await process.communicate()
    assert len(worker.jobs) == 1

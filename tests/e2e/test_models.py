"""``millrace status``, ``down``, ``logs`` and ``models`` on a running system."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.clients import ask_sse
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.repository import ROOT
from tests.support.system import System
from tests.support.waiting import eventually

pytestmark = pytest.mark.e2e

_PARTS = (
    *("nats", "redis", "kafka", "telemetry-1", "scheduler-1", "scheduler-2"),
    *("gateway-1", "gateway-2", "worker-1"),
)


class Millrace:
    """The command, as a person runs it beside a system."""

    def __init__(self, system: System) -> None:
        self.system = system

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "millrace.cli", *arguments, "--data", str(self.system.data)],
            capture_output=True,
            text=True,
            timeout=60.0,
            check=False,
        )

    def __call__(self, *arguments: str) -> str:
        """Run a command that must succeed, and return its output."""
        ran = self.run(*arguments)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    def refusal(self, *arguments: str) -> str:
        """Run a command that must fail, and return its error, which must be one line."""
        ran = self.run(*arguments)
        assert ran.returncode == 2, ran.stdout
        assert ran.stderr.startswith("millrace ")
        assert ran.stderr.count("\n") == 1
        return ran.stderr

    def status(self) -> Any:
        return json.loads(self.run("status", "--json").stdout)

    def becomes_well(self) -> None:
        """A part that does nothing wrong may take longer to say so than ``status`` waits."""
        asyncio.run(eventually(lambda: bool(self.status()["well"]), 20.0, "that all is well"))

    async def background(self, *arguments: str) -> str:
        return await asyncio.to_thread(self, *arguments)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def millrace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Millrace]:
    """Two gateways, two schedulers, and tokens that take a while."""
    folder = tmp_path_factory.mktemp("operated")
    settings = folder / "settings.yaml"
    simulation = {"step_ms": 100.0}
    worker = {"drain_timeout_s": 0.5, "engine": {"simulation": simulation}}
    settings.write_text(json.dumps({"worker": worker}))
    arguments = ("--port", "0", "--engine", "simulated", "--gateways", "2", "--schedulers", "2")
    running = System(folder / "data", (*arguments, "--config", str(settings))).start()
    yield Millrace(running)
    running.stop()


def test_status_tells_all_parts_and_models(millrace: Millrace) -> None:
    report = millrace.status()
    assert report["well"]
    assert report["state"] == "running"
    assert report["addresses"]["http"] == millrace.system.http
    assert "@" not in json.dumps(report["addresses"])
    parts = {part["name"]: part for part in report["parts"]}
    assert set(parts) == set(_PARTS)
    for name, part in parts.items():
        assert (part["pid"], part["health"]) == (millrace.system.pid(name), "ok")
    assert [model["name"] for model in report["models"]] == ["demo"]
    shown = millrace("status")
    assert all(name in shown for name in _PARTS)


async def test_status_tells_of_a_part_that_was_killed(millrace: Millrace) -> None:
    former = millrace.system.kill("worker-1")

    def is_back() -> bool:
        report = millrace.status()
        part = next(part for part in report["parts"] if part["name"] == "worker-1")
        return bool(report["well"] and part["restarts"] == 1 and part["pid"] != former)

    await eventually(is_back, timeout_s=30.0)
    lines = [line for line in millrace("logs", "up").splitlines() if "signal SIGKILL" in line]
    assert "worker-1 ended (signal SIGKILL); starting it again" in lines[0]
    assert "warning" in lines[0].lower()
    losses: list[dict[str, Any]] = []

    def are_stored() -> bool:
        losses[:] = millrace.system.sql(
            "SELECT name, model, cause, detail, observer, uniq(worker) OVER () AS workers "
            "FROM worker_losses_once WHERE name = 'worker-1' ORDER BY observer"
        )
        return len(losses) == 2

    await eventually(are_stored, 30.0, "a row of each part that saw the loss")
    of_keeper, of_scheduler = losses
    assert list(of_keeper.values()) == [
        "worker-1",
        "demo",
        "signal",
        "SIGKILL",
        "process_keeper",
        1,
    ]
    assert (of_scheduler["observer"], of_scheduler["workers"]) == ("scheduler", 1)
    assert of_scheduler["cause"] in ("silent", "replaced")


def test_status_of_a_part_that_stands_still(millrace: Millrace) -> None:
    pid = millrace.system.pid("telemetry-1")
    os.kill(pid, signal.SIGSTOP)
    try:
        ran = millrace.run("status")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ran.returncode == 1
    assert "does not answer" in ran.stdout


def test_a_dry_run_asks_the_store_that_runs(millrace: Millrace) -> None:
    assert "are up to date" in millrace("migrate", "--dry-run")


def test_logs_are_told_in_the_order_of_time(millrace: Millrace) -> None:
    lines = millrace("logs", "gateway", "scheduler-1", "-n", "1000").splitlines()
    parts = [line[13:24].strip() for line in lines if line[:2].isdigit()]
    assert set(parts) == {"gateway-1", "gateway-2", "scheduler-1"}
    times = [line[:12] for line in lines if line[:2].isdigit()]
    assert times == sorted(times)
    raw = millrace("logs", "gateway-1", "--raw", "-n", "1").splitlines()
    assert json.loads(raw[0])["component"] == "gateway"
    assert millrace("logs", "--since", "2100-01-01T00:00:00+00:00") == ""
    assert "no part 'gatevay'; there are logs of: " in millrace.refusal("logs", "gatevay")
    assert "neither a time such as 10m" in millrace.refusal("logs", "--since", "yesterday")


async def test_a_model_comes_and_goes(millrace: Millrace, tiny: Path) -> None:
    async with httpx.AsyncClient(base_url=millrace.system.http, timeout=60.0) as http:
        streaming = asyncio.create_task(ask_sse(http, "Go on.", max_tokens=120))
        output = await millrace.background("models", "add", "small", "--model", str(tiny))
        assert "small is served, by 1 worker" in output
        assert not streaming.done()
        for _ in range(20):  # whichever gateway it is
            async with httpx.AsyncClient(base_url=millrace.system.http) as other:
                listed = (await other.get("/v1/models")).json()["data"]
                assert {card["id"] for card in listed} == {"demo", "small"}
                answer = await other.post(
                    "/v1/completions", json={"model": "small", "prompt": "a", "max_tokens": 1}
                )
                assert answer.status_code == 200, answer.text
        assert "small" in await millrace.background("models", "list")
        assert "is taken" in millrace.refusal("models", "add", "small", "--model", str(tiny))
        # The demo model was not disturbed.
        assert (await streaming).completion_tokens == 120

        body = {"model": "small", "prompt": "a", "max_tokens": 100, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            lines = response.aiter_lines()
            await anext(lines)
            removing = asyncio.create_task(millrace.background("models", "remove", "small"))
            rest = [line async for line in lines if line.startswith("data: ")]
        assert "model_not_found" in rest[-1] or "model_not_found" in rest[-2]
        assert "small is removed; 1 worker drained" in await removing
        gone = await http.post("/v1/completions", json={"model": "small", "prompt": "a"})
        assert gone.status_code == 404
        assert (await ask_sse(http, "Still there?", max_tokens=2)).completion_tokens == 2
    assert {part["name"] for part in millrace.status()["parts"]} == set(_PARTS)


class Load:
    """Clients that ask for ``demo`` again and again, until ``stop``; none of them may fail."""

    def __init__(self, url: str, num_clients: int = 6) -> None:
        self.answered: list[str] = []
        self._stopping = asyncio.Event()
        self._client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=60.0, max_retries=0
        )
        self._tasks = [asyncio.create_task(self._run()) for _ in range(num_clients)]

    async def stream(self, num_tokens: int) -> str:
        """Return the version that answered, with the requested number of tokens."""
        stream = await self._client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Go on."}],
            max_tokens=num_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        models, usage = set(), None
        async for chunk in stream:
            models.add(chunk.model)
            usage = chunk.usage or usage
        assert usage is not None
        assert usage.completion_tokens == num_tokens
        (model,) = models  # never two of them
        return model

    async def _run(self) -> None:
        while not self._stopping.is_set():
            self.answered.append(await self.stream(2))

    async def has(self, version: str, *, alone: bool = False) -> None:
        """Wait until requests that come now are answered by a version, or by it ``alone``."""

        async def seen() -> bool:
            start = len(self.answered)
            await eventually(lambda: len(self.answered) >= start + 24, timeout_s=30.0)
            latest = set(self.answered[-12:])
            return latest == {version} if alone else version in latest

        await eventually(seen, timeout_s=60.0)

    async def stop(self) -> None:
        self._stopping.set()
        await asyncio.gather(*self._tasks)
        await self._client.close()


@pytest.mark.slow(reason="about 38 s of CPU; the registry and gateway tests cover rollouts")
async def test_versions_are_rolled_out_and_back_under_load(millrace: Millrace) -> None:
    load = Load(millrace.system.http)
    before = asyncio.create_task(load.stream(60))
    await load.has("demo", alone=True)
    promote = ("models", "promote", "demo@v2", "--min-requests", "3", "--canary", "30")
    output = await millrace.background(
        *promote,
        *("--model", str(ROOT / "registry" / "demo" / "model"), "--step", "40"),
        *("--interval", "1s", "--abort-if", "error_rate>0.5 or ttft_p99>60s"),
    )
    assert output.splitlines()[-3:] == [
        "demo@v2 answers 30 % of the requests for demo",
        "demo@v2 answers 70 % of the requests for demo",
        "demo@v2 answers for demo; demo may be retired",
    ]
    await load.has("demo@v2", alone=True)
    refusal = millrace.refusal("models", "retire", "demo@v2")
    assert "demo@v2 answers requests for demo" in refusal
    # What began with the old version ends with it; what begins now will end with the new one.
    assert await before == "demo"
    during = asyncio.create_task(load.stream(150))
    published = ("publish", "--model", "demo", "--prompt", "Go on.", "--max-tokens", "2")
    assert await millrace.background(*published)
    output = await millrace.background("models", "rollback", "demo")
    assert output == "aborted (by hand): demo answers for demo\n"
    await load.has("demo", alone=True)

    # The rollout aborts by itself if the version does badly.
    rule = ("--abort-if", "error_rate>0.5 or ttft_p50>1us", "--interval", "30s")
    ran = await asyncio.to_thread(millrace.run, *promote, *rule)
    assert ran.returncode == 1, ran.stderr
    last = ran.stdout.splitlines()[-1]
    assert re.fullmatch(
        r"aborted \(ttft_p50 is .* ms, over 0.001 ms\): demo answers for demo", last
    )
    await load.has("demo", alone=True)
    shown = json.loads(await millrace.background("models", "rollouts", "--json"))
    assert [one["rollout"]["state"] for one in shown] == ["aborted"]
    retiring = asyncio.create_task(millrace.background("models", "retire", "demo@v2"))
    assert await during == "demo@v2"
    assert "demo@v2 is removed; 1 worker drained" in await retiring
    await load.stop()
    assert set(load.answered) == {"demo", "demo@v2"}

    counted = "SELECT model_served, count() FROM requests WHERE model_requested = 'demo' "
    query = f"{counted} AND status = 'done' GROUP BY 1 ORDER BY 1"

    def versions() -> set[str]:
        shown = millrace("sql", query, "--format", "csv").splitlines()
        return {line.split(",")[0].strip('"') for line in shown[1:]}

    await eventually(lambda: versions() == {"demo", "demo@v2"}, timeout_s=30.0)


def test_an_impossible_change_disturbs_nothing(millrace: Millrace) -> None:
    for arguments, message in (
        (("add", "x", "--model", "/nowhere/at/all"), "does not exist"),
        (("add", "x", "--model", "/tmp"), "config.json"),
        (("add", "x y", "--model", "demo"), "text without spaces"),
        (("add", "auto", "--model", "demo"), "is reserved"),
        (("add", "demo@stable", "--model", "demo"), "The version stable"),
        (("promote", "demo@v9"), "There is no version 'demo@v9'"),
        (("promote", "demo@v9", "--abort-if", "slow>1"), "has no metric 'slow'"),
        (("rollback", "nope"), "There is no rollout of 'nope'"),
        (("retire", "demo@v9"), "There is no version 'demo@v9'"),
        (("add", "nope"), "There is no model 'nope'"),
        (("add", "x", "--model", "demo", "--workers", "0"), "--workers must be at least 1"),
        (("add", "x", "--model", "demo", "--engine-url", "http://a"), "go with --engine"),
        (("remove", "nope"), "there is no model 'nope'"),
        (("remove", "demo"), "demo is the only model"),
    ):
        assert message in millrace.refusal("models", *arguments)
    assert [model["name"] for model in millrace.status()["models"]] == ["demo"]
    millrace.becomes_well()


def test_a_model_whose_worker_does_not_come_up_is_not_added(
    millrace: Millrace, tiny: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"no weights")
    engine = ("--engine", "real")
    refusal = millrace.refusal("models", "add", "broken", "--model", str(broken), *engine)
    assert "broken was not added" in refusal
    assert {part["name"] for part in millrace.status()["parts"]} == set(_PARTS)
    millrace.becomes_well()


@pytest.mark.slow(reason="starts a second system; tests/cli covers down and remembered models")
def test_models_are_remembered_and_down_ends_all(millrace: Millrace, tiny: Path) -> None:
    """Last, since it stops the system."""
    # A model of the real engine besides models of the fake engine.
    millrace("models", "add", "kept", "--model", str(tiny), "--engine", "real", "--workers", "2")
    assert next(one for one in millrace.status()["models"] if one["name"] == "kept") == {
        "name": "kept",
        "source": str(tiny),
        "engine": "real",
        "state": "serving",
        "workers": 2,
        "added": True,
    }
    millrace("models", "remove", "demo")
    following = subprocess.Popen(
        [
            *(sys.executable, "-m", "millrace.cli", "logs", "--follow", "up"),
            *("--data", str(millrace.system.data)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    running = millrace.system.processes()
    assert "Stopped in" in millrace("down")
    assert millrace.system.stop() == 0  # it was told before
    assert not [process for process in running if process.is_running()]
    followed, _ = following.communicate(timeout=10.0)
    assert followed.rstrip().endswith("stopping")
    assert millrace.run("status").returncode == 3
    assert "Nothing runs on" in millrace("down")
    assert "Nothing runs on" in millrace.refusal("models", "list")

    millrace.system.start()
    assert [model["name"] for model in millrace.status()["models"]] == ["kept"]
    listed = httpx.get(f"{millrace.system.http}/v1/models").json()["data"]
    assert [(card["id"], card["engine"]["kind"]) for card in listed] == [("kept", "real")]

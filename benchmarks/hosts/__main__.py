"""``python -m benchmarks.hosts``: streams of clients while links between hosts fail.

Three hosts are network namespaces of this machine (needs root and ``ip``). Each has a nats-server
of one cluster with three copies, a gateway, a scheduler, and a worker with a simulated engine.
Clients outside stream chats with an ``Idempotency-Key`` over all gateways. In each round a host's
link is down for a while, or two hosts are separated while the third and the clients reach both.

Each round checks that each stream is whole (all tokens, ``[DONE]``) and that its key gives the same
answer again. Prints the longest silence of streams on unaffected hosts, and of the others.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import httpx
import msgspec
import yaml

from benchmarks.support.command import PartResult, run_command
from millrace.bus import nats
from millrace.bus.nats.permissions import Part
from millrace.runtime.binaries import nats_server_path, redis_server_path
from millrace.schemas.config import (
    Config,
    EngineConfig,
    GatewayConfig,
    MetricsConfig,
    NatsConfig,
    RedisConfig,
    SchedulerConfig,
    WorkerConfig,
)
from millrace.schemas.config.worker import SimulationConfig
from millrace.schemas.control import WorkerStatus
from millrace.schemas.engines import EngineKind
from tests.support.links.network import Network, NoNetworkError
from tests.support.waiting import eventually

MODEL = "demo"
HOSTS = (1, 2, 3)
NUM_HOSTS = _REDIS_HOST = 4
_NATS, _ROUTES, _GATEWAY, _REDIS = 4222, 6222, 8000, 6379
_START_TIMEOUT_S = 90.0
_STEP_MS = 80.0


def gateway_url(host: int) -> str:
    return f"http://{Network.address(host)}:{_GATEWAY}"


class HostedSystem:
    """System whose parts run until the network's block ends; ``logs`` has a file for each."""

    def __init__(self, network: Network, folder: Path) -> None:
        """Use a network of ``NUM_HOSTS``."""
        self.network = network
        self.logs = folder
        self.statuses: dict[str, WorkerStatus] = {}

    def start_servers(self) -> None:
        for host in HOSTS:
            self._start_nats(host)
        command = [str(redis_server_path()), "--port", str(_REDIS), "--save", ""]
        address = Network.address(_REDIS_HOST)
        bound = ["--bind", address, "--protected-mode", "no", "--dir", str(self.logs)]
        self.network.start(_REDIS_HOST, [*command, *bound], self._log("redis"))

    async def start_parts(self) -> None:
        """Start the parts, and return once every worker has sent a status."""
        url = ",".join(f"nats://{Network.address(host)}:{_NATS}" for host in HOSTS)
        config = NatsConfig(url=url, replicas=len(HOSTS), connect_timeout_s=30.0)
        bus = await nats.connect(config, "hosts", part=Part.SCHEDULER)
        await bus.workers.watch(self._note)
        for host in HOSTS:
            self._start_host(host, config)
        await eventually(lambda: len(self.statuses) == len(HOSTS), timeout_s=_START_TIMEOUT_S)
        await bus.close()

    def _note(self, status: WorkerStatus) -> None:
        self.statuses[status.name] = status

    def _start_host(self, host: int, config: NatsConfig) -> None:
        settings = Config(
            log_level="info",
            nats=config,
            redis=RedisConfig(url=f"redis://{Network.address(_REDIS_HOST)}:{_REDIS}/0"),
            gateway=GatewayConfig(
                host=Network.address(host), port=_GATEWAY, gateway_id=f"gateway-{host}", auth="none"
            ),
            scheduler=SchedulerConfig(models=(MODEL,), scheduler_id=f"scheduler-{host}"),
            worker=WorkerConfig(
                name=f"worker-{host}",
                engine=EngineConfig(
                    kind=EngineKind.SIMULATED, simulation=SimulationConfig(step_ms=_STEP_MS)
                ),
            ),
            metrics=MetricsConfig(port=0),
        )
        file = self.logs / f"host-{host}.yaml"
        file.write_text(yaml.safe_dump(msgspec.to_builtins(settings), sort_keys=False))
        for part in ("gateway", "scheduler", "workers"):
            command = [sys.executable, "-P", "-m", f"millrace.{part}", "--config", str(file)]
            self.network.start(host, command, self._log(f"{part}-{host}"))

    def _start_nats(self, host: int) -> None:
        address = Network.address(host)
        routes = ", ".join(f'"nats://{Network.address(other)}:{_ROUTES}"' for other in HOSTS)
        file = self.logs / f"nats-{host}.conf"
        file.write_text(
            f'server_name: nats-{host}\nlisten: "{address}:{_NATS}"\n'
            f'jetstream {{ store_dir: "{self.logs / f"store-{host}"}" }}\n'
            f'cluster {{ name: hosts, listen: "{address}:{_ROUTES}", routes: [{routes}] }}\n'
        )
        self.network.start(
            host, [str(nats_server_path()), "-c", str(file)], self._log(f"nats-{host}")
        )

    def _log(self, part: str) -> Path:
        return self.logs / f"{part}.log"


_READY_WITHIN_S = 60.0
_ROUND_LIMIT_S = 120.0
_STRIKE_AFTER_S = 4.0


class Event(msgspec.Struct, frozen=True):
    """Fault of the network, which ``mend`` undoes; it cuts off ``hosts``."""

    name: str
    strike: Callable[[Network], None]
    mend: Callable[[Network], None]
    hosts: tuple[int, ...] = ()


def _link_down(host: int) -> Event:
    return Event(
        f"link of host {host} down",
        lambda network: network.set_link(host, up=False),
        lambda network: network.set_link(host, up=True),
        (host,),
    )


EVENTS = (
    *map(_link_down, HOSTS),
    Event(
        "hosts 1 and 2 apart",
        lambda network: network.part(1, 2),
        lambda network: network.join(1, 2),
    ),
)


class Stream(msgspec.Struct):
    """Stream as a client read it.

    It has the ``text`` up to ``end``, which is ``[DONE]`` or the error. The client waited
    ``first_s`` for the first event; ``silence_s`` is the longest pause after that.
    """

    host: int
    key: str
    text: str = ""
    num_pieces: int = 0
    first_s: float = 0.0
    silence_s: float = 0.0
    end: str = ""


class RoundResult(msgspec.Struct, frozen=True):
    """Result of a round.

    ``first_s`` is the longest wait for a first token, and ``silence_s`` the longest pause, of
    streams over gateways of hosts that were not cut off.
    """

    event: str
    for_s: float
    num_streams: int
    first_s: float
    silence_s: float
    silence_of_cut_off_s: float
    wrongs: tuple[str, ...]


_NAMES = tuple(event.name for event in EVENTS)


def run(
    only: Sequence[str] = _NAMES,
    rounds: int = 1,
    for_s: float = 10.0,
    streams: int = 30,
    tokens: int = 250,
    logs: Path | None = None,
) -> PartResult:
    """Run each event of ``only`` for ``for_s``; ``logs`` is a folder for the parts' logs."""
    if unknown := set(only) - set(_NAMES):
        sys.exit(f"hosts: no such event: {', '.join(sorted(unknown))}")
    try:
        with Network(NUM_HOSTS) as network, tempfile.TemporaryDirectory() as folder:
            kept = logs or Path(folder)
            kept.mkdir(parents=True, exist_ok=True)
            results = asyncio.run(
                _run(HostedSystem(network, kept), only, rounds, for_s, streams, tokens)
            )
    except NoNetworkError as error:
        sys.exit(f"hosts: no network can be made here: {error}")
    return PartResult(results, not any(result.wrongs for result in results), "scheduler/hosts.json")


async def _run(
    system: HostedSystem,
    only: Sequence[str],
    rounds: int,
    for_s: float,
    num_streams: int,
    tokens: int,
) -> list[RoundResult]:
    system.start_servers()
    await system.start_parts()
    results = []
    async with httpx.AsyncClient(timeout=_ROUND_LIMIT_S, trust_env=False) as http:
        for host in HOSTS:
            ready = partial(_is_ready, http, host)
            await eventually(ready, _READY_WITHIN_S, f"the gateway of host {host}")
        for event in EVENTS:
            if event.name not in only:
                continue
            for _ in range(rounds):
                result = await _round(system, http, event, for_s, num_streams, tokens)
                results.append(result)
                print(
                    f"{event.name} for {result.for_s:g} s: {result.num_streams} streams, first "
                    f"token after {result.first_s:.1f} s, longest silence {result.silence_s:.1f} "
                    f"s, of hosts that were cut off {result.silence_of_cut_off_s:.1f} s",
                    flush=True,
                )
                for wrong in result.wrongs:
                    print(f"   WRONG: {wrong}")
    return results


async def _is_ready(http: httpx.AsyncClient, host: int) -> bool:
    try:
        return (await http.get(f"{gateway_url(host)}/healthz")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


async def _round(
    system: HostedSystem,
    http: httpx.AsyncClient,
    event: Event,
    for_s: float,
    num_streams: int,
    tokens: int,
) -> RoundResult:
    streams = [
        Stream(HOSTS[number % len(HOSTS)], uuid.uuid4().hex) for number in range(num_streams)
    ]
    reading = [asyncio.create_task(_read(http, stream, tokens)) for stream in streams]
    await asyncio.sleep(_STRIKE_AFTER_S)
    event.strike(system.network)
    try:
        await asyncio.sleep(for_s)
    finally:
        event.mend(system.network)
    _, late = await asyncio.wait(reading, timeout=_ROUND_LIMIT_S)
    for task in late:
        task.cancel()
    wrongs = [
        f"a stream of host {stream.host}: {stream.end or 'no end'} after {stream.num_pieces} pieces"
        for stream in streams
        if stream.end != "[DONE]"
    ]
    for stream in streams:
        if stream.end == "[DONE]":
            again = Stream(stream.host, stream.key)
            await _read(http, again, tokens)
            if (again.text, again.end) != (stream.text, stream.end):
                wrongs.append(f"{stream.key}: its key gives another answer")
    return RoundResult(
        event.name,
        for_s,
        len(streams),
        max(one.first_s for one in streams),
        max((one.silence_s for one in streams if one.host not in event.hosts), default=0.0),
        max((one.silence_s for one in streams if one.host in event.hosts), default=0.0),
        tuple(wrongs),
    )


async def _read(http: httpx.AsyncClient, stream: Stream, tokens: int) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Tell me of {stream.key}."}],
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    headers = {"Idempotency-Key": stream.key}
    last_s = time.monotonic()
    try:
        async with http.stream(
            "POST", f"{gateway_url(stream.host)}/v1/chat/completions", json=body, headers=headers
        ) as response:
            if response.status_code != httpx.codes.OK:
                stream.end = (await response.aread()).decode()
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now_s = time.monotonic()
                pause_s, last_s = now_s - last_s, now_s
                if not stream.num_pieces:
                    stream.first_s = pause_s
                stream.silence_s = max(stream.silence_s, pause_s if stream.num_pieces else 0.0)
                if line == "data: [DONE]":
                    stream.end = "[DONE]"
                    return
                told = json.loads(line.removeprefix("data: "))
                if "error" in told:
                    stream.end = json.dumps(told["error"])
                    return
                for choice in told["choices"]:
                    stream.text += choice["delta"].get("content") or ""
                    stream.num_pieces += 1
    except httpx.HTTPError as error:
        stream.end = repr(error)


if __name__ == "__main__":
    sys.exit(run_command("hosts", run, __doc__))

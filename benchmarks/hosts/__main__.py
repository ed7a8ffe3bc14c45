"""``python -m benchmarks.hosts``: what clients see when links of hosts fail under their streams.

Three hosts, which are network namespaces of this machine (it takes root and ``ip``): on each a
nats-server of one cluster that keeps three copies, a gateway, a scheduler, and a worker with a
simulated engine. Clients outside stream chats with an ``Idempotency-Key`` over all gateways. In
each round the link of a host is down for a while, and comes back; or two hosts do not see each
other, while the third and the clients see both.

Of each round it checks that each stream is whole (all tokens, ``[DONE]``) and that its key gives
the same answer again. It prints the longest silence of the streams of hosts that the event left
alone, and of the others.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.hosts.system import HOSTS, MODEL, NUM_HOSTS, HostedSystem, gateway_url
from benchmarks.support.command import command_parser, write_json
from tests.support.links.network import Network, NoNetworkError

RESULTS = Path("benchmarks/results/scheduler/hosts.json")
_READY_WITHIN_S = 60.0
_STRIKE_AFTER_S = 4.0


class Event(msgspec.Struct, frozen=True):
    """Something that happens to the network, which ``mend`` undoes; ``hosts`` are cut off by it."""

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
    """A stream as a client read it: ``text`` up to ``end``, which is ``[DONE]`` or the error. The
    client waited ``first_s`` for the first event; ``silence_s`` is the longest pause after that."""

    host: int
    key: str
    text: str = ""
    num_pieces: int = 0
    first_s: float = 0.0
    silence_s: float = 0.0
    end: str = ""


class RoundResult(msgspec.Struct, frozen=True):
    """``first_s`` is the longest wait for a first token, ``silence_s`` the longest silence of
    streams over gateways of hosts that were not cut off."""

    event: str
    for_s: float
    num_streams: int
    first_s: float
    silence_s: float
    silence_of_cut_off_s: float
    wrongs: tuple[str, ...]


def main() -> int:
    """0 if every stream of every round was whole; how long silences were decides nothing."""
    parser = command_parser("hosts", __doc__)
    names = tuple(event.name for event in EVENTS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="EVENT")
    parser.add_argument("--rounds", type=int, default=1, help="of each event")
    parser.add_argument("--for-s", type=float, default=10.0, help="how long an event lasts")
    parser.add_argument("--streams", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=250, help="of each answer")
    parser.add_argument("--round-limit-s", type=float, default=120.0)
    parser.add_argument("--logs", type=Path, help="a folder that keeps the logs of all parts")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FILE")
    arguments = parser.parse_args()
    try:
        with Network(NUM_HOSTS) as network, tempfile.TemporaryDirectory() as folder:
            logs = arguments.logs or Path(folder)
            logs.mkdir(parents=True, exist_ok=True)
            results = asyncio.run(_run(HostedSystem(network, logs), vars(arguments)))
    except NoNetworkError as error:
        sys.stderr.write(f"hosts: no network can be made here: {error}\n")
        return 2
    write_json(arguments.output, results)
    return int(any(result.wrongs for result in results))


async def _run(system: HostedSystem, options: dict[str, Any]) -> list[RoundResult]:
    system.start_servers()
    await system.start_parts()
    results = []
    async with httpx.AsyncClient(timeout=options["round_limit_s"], trust_env=False) as http:
        for host in HOSTS:
            await _ready(http, host)
        for event in EVENTS:
            if event.name not in options["only"]:
                continue
            for _ in range(options["rounds"]):
                result = await _round(system, http, event, options)
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


async def _ready(http: httpx.AsyncClient, host: int) -> None:
    deadline_s = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < deadline_s:
        try:
            if (await http.get(f"{gateway_url(host)}/healthz")).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.2)
    raise RuntimeError(f"the gateway of host {host} is not ready")


async def _round(
    system: HostedSystem, http: httpx.AsyncClient, event: Event, options: dict[str, Any]
) -> RoundResult:
    tokens, for_s = options["tokens"], options["for_s"]
    streams = [
        Stream(HOSTS[number % len(HOSTS)], uuid.uuid4().hex) for number in range(options["streams"])
    ]
    reading = [asyncio.create_task(_read(http, stream, tokens)) for stream in streams]
    await asyncio.sleep(_STRIKE_AFTER_S)
    event.strike(system.network)
    try:
        await asyncio.sleep(for_s)
    finally:
        event.mend(system.network)
    _, late = await asyncio.wait(reading, timeout=options["round_limit_s"])
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
    sys.exit(main())

"""A disk that is full under a running system: what is refused meanwhile, and how soon all is
accepted again once there is room."""

from __future__ import annotations

import asyncio
import time

import httpx
import msgspec

from tests.support.small_disk import SmallDisk
from tests.support.system import System

_BODY = {"model": "demo", "prompt": "What is TTFT?", "max_tokens": 1}
_NOTICED_WITHIN_S = 3.0
_WELL_WITHIN_S = 10.0
_GIVE_UP_S = 60.0
_POLL_S = 0.2
# Enough for either of two gateways that share a port to have been asked.
_NUM_PROBES = 8


class Told(msgspec.Struct, frozen=True):
    """``outcomes`` counts what new requests were answered while the disk was full; ``well_s``: from
    the first free byte until both gateways accepted again."""

    outcomes: dict[str, int]
    well_s: float
    wrongs: tuple[str, ...] = ()


async def fill_for(system: System, disk: SmallDisk, for_s: float) -> Told:
    """Keep the disk of a system full for a while, to the last page, and make room again."""
    await asyncio.to_thread(disk.fill)
    keeping = asyncio.create_task(_keep_full(disk))
    # Each request on a connection of its own, which either gateway may get.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=system.http, timeout=15.0, limits=limits) as http:
        try:
            await asyncio.sleep(_NOTICED_WITHIN_S)
            outcomes = await _probe(http)
            await asyncio.sleep(for_s)
            outcomes += await _probe(http)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            disk.make_room()
        room_s = time.monotonic()
        while time.monotonic() - room_s < _GIVE_UP_S:
            if set(await _probe(http)) == {"accepted"}:
                break
            await asyncio.sleep(_POLL_S)
    well_s = time.monotonic() - room_s
    counts = {code: outcomes.count(code) for code in sorted(set(outcomes))}
    wrongs = [
        f"{num} answers to new requests were {code}"
        for code, num in counts.items()
        if code != "storage_full"
    ]
    if well_s > _WELL_WITHIN_S:
        wrongs.append(f"requests were accepted {well_s:.1f} s after there was room")
    return Told(counts, well_s, tuple(wrongs))


async def _keep_full(disk: SmallDisk) -> None:
    while True:
        await asyncio.to_thread(disk.fill)
        await asyncio.sleep(0.05)


async def _probe(http: httpx.AsyncClient) -> list[str]:
    """What becomes of new requests."""
    return list(await asyncio.gather(*(_ask(http) for _ in range(_NUM_PROBES))))


async def _ask(http: httpx.AsyncClient) -> str:
    try:
        answer = await http.post("/v1/completions", json=_BODY)
    except httpx.TransportError as error:
        return type(error).__name__
    return "accepted" if answer.status_code == 200 else str(answer.json()["error"]["code"])

"""One round of ``benchmarks.chaos``: streams, what happens to them, and what was wrong then."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from itertools import pairwise

import httpx
import msgspec

from benchmarks.chaos_clients import KINDS, Answer, TimedClient
from tests.support.system import System
from tests.support.waiting import eventually

# Silences that end this long after the event, or later, are none of its doing.
_EFFECT_S = 30.0
_STREAMING_SHARE = 0.9
_RECORDED_WITHIN_S = 30.0
_BACK_WITHIN_S = 60.0
_FORGET_S = 3.5
_IDS_AT_ONCE = 500


class Event(msgspec.Struct, frozen=True):
    """Something that happens to parts of the system. ``is_partial``: only streams whose epoch rises
    are affected by it."""

    name: str
    parts: tuple[str, ...]
    number: signal.Signals = signal.SIGKILL
    is_partial: bool = False


EVENTS = (
    Event("worker killed", ("worker-1",), is_partial=True),
    Event("worker drained", ("worker-1",), signal.SIGTERM, is_partial=True),
    Event("scheduler killed", ("scheduler-1",)),
    Event("gateway killed", ("gateway-1",)),
    Event("nats-server restarted", ("nats",)),
    Event("redis restarted", ("redis",)),
)


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one event. ``gaps_s`` are the longest silences of the affected streams, of which
    there are as many as entries; ``wrongs`` is a sentence for each thing that may not be."""

    event: str
    num_streams: int
    num_streaming: int
    num_lost: int
    num_wrong_indices: int
    num_other_texts: int
    num_without_record: int
    num_doubled_records: int
    gaps_s: tuple[float, ...]
    wall_s: float
    wrongs: tuple[str, ...] = ()


class Streams:
    """The same questions each time, so that the answers have to be the same, too."""

    _num_workers = _num_gateways = 2

    def __init__(self, system: System, num_streams: int, num_tokens: int, limit_s: float) -> None:
        self._system = system
        self._num_streams = num_streams
        self._num_tokens = num_tokens
        self._limit_s = limit_s
        self.undisturbed: list[str] = []
        self.usual_gaps_s: tuple[float, ...] = ()

    def _clients(self) -> list[TimedClient]:
        return [
            KINDS[number % len(KINDS)](
                self._system,
                f"What is TTFT? {number}",
                max_tokens=self._num_tokens,
                ignore_eos=True,
            )
            for number in range(self._num_streams)
        ]

    async def run_undisturbed(self) -> None:
        """Once without an event: what is to be answered, and how long its silences are. Raises
        AssertionError for an answer that does not come."""
        clients = self._clients()
        answers = await self._answers([asyncio.create_task(one.ask()) for one in clients])
        wrong = [answer for answer in answers if not isinstance(answer, Answer)]
        assert not wrong, f"nothing happened, and {len(wrong)} answers failed: {wrong[0]!r}"
        self.undisturbed = [one.text for one in answers if isinstance(one, Answer)]
        gaps = [max(_gaps(client), default=0.0) for client in clients]
        self.usual_gaps_s = tuple(sorted(gaps))

    async def run(self, event: Event) -> Round:
        """With an event in the middle. Raises AssertionError if a part does not come back."""
        began_s = time.monotonic()
        clients = self._clients()
        tasks = [asyncio.create_task(one.ask()) for one in clients]
        await self._until_streaming(clients, tasks)
        pids = {part: self._system.pid(part) for part in event.parts}
        num_streaming = sum(
            bool(client.arrivals.parts_s) and not task.done()
            for client, task in zip(clients, tasks, strict=True)
        )
        event_s = time.monotonic()
        for pid in pids.values():
            os.kill(pid, event.number)
        answers = await self._answers(tasks)
        wall_s = time.monotonic() - began_s
        await self._are_back(pids, event_s)
        return await self._judge(event, clients, answers, num_streaming, event_s, wall_s)

    async def _until_streaming(
        self, clients: Sequence[TimedClient], tasks: Sequence[asyncio.Task[Answer]]
    ) -> None:
        wanted = _STREAMING_SHARE * len(clients)

        def is_so() -> bool:
            num_begun = sum(bool(client.arrivals.parts_s) for client in clients)
            return num_begun >= wanted or any(task.done() for task in tasks)

        await eventually(is_so, timeout_s=self._limit_s, what="that the streams run")

    async def _answers(self, tasks: Sequence[asyncio.Task[Answer]]) -> list[Answer | BaseException]:
        """An answer, or why there is none, for each. Those that take too long are given up."""
        _, late = await asyncio.wait(tasks, timeout=self._limit_s)
        for task in late:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def _are_back(self, pids: dict[str, int], event_s: float) -> None:
        """Wait until all parts serve, as far as both gateways can tell; until ``_FORGET_S`` after
        the event they may believe in a worker that is gone."""
        await asyncio.sleep(max(0.0, event_s + _FORGET_S - time.monotonic()))
        seen: set[str] = set()

        async def all_serve() -> bool:
            if any(self._system.pid(part) == pid for part, pid in pids.items()):
                return False
            try:
                async with httpx.AsyncClient(base_url=self._system.http) as http:
                    health = (await http.get("/healthz")).json()
            except httpx.TransportError:
                return False
            if health["status"] == "ok" and health["num_workers"] >= self._num_workers:
                seen.add(health["gateway_id"])
            return len(seen) >= self._num_gateways

        await eventually(all_serve, timeout_s=_BACK_WITHIN_S, what=f"the next life of {[*pids]}")

    async def _judge(
        self,
        event: Event,
        clients: Sequence[TimedClient],
        answers: Sequence[Answer | BaseException],
        num_streaming: int,
        event_s: float,
        wall_s: float,
    ) -> Round:
        records = await self._records([client.request_id for client in clients])
        wrongs: list[str] = []
        num_lost = num_wrong_indices = num_other_texts = num_without = num_doubled = 0
        gaps_s: list[float] = []
        for number, (client, answer) in enumerate(zip(clients, answers, strict=True)):
            epochs = records.get(client.request_id, [])
            num_without += not epochs
            num_doubled += len(epochs) > 1
            if not isinstance(answer, Answer):
                is_index = isinstance(answer, AssertionError)
                num_wrong_indices += is_index
                num_lost += not is_index
                wrongs.append(f"{event.name}, {client.request_id}: {answer!r}")
                continue
            num_wrong_indices += answer.completion_tokens != self._num_tokens
            num_other_texts += answer.text != self.undisturbed[number]
            gap_s = client.arrivals.longest_gap_s(event_s, event_s + _EFFECT_S)
            if gap_s is not None and (not event.is_partial or max(epochs, default=0) > 1):
                gaps_s.append(gap_s)
        return Round(
            event=event.name,
            num_streams=self._num_streams,
            num_streaming=num_streaming,
            num_lost=num_lost,
            num_wrong_indices=num_wrong_indices,
            num_other_texts=num_other_texts,
            num_without_record=num_without,
            num_doubled_records=num_doubled,
            gaps_s=tuple(sorted(gaps_s)),
            wall_s=wall_s,
            wrongs=tuple(wrongs),
        )

    async def _records(self, request_ids: Sequence[str]) -> dict[str, list[int]]:
        """The epochs of the records of each request, once all are there or the time is up."""
        deadline_s = time.monotonic() + _RECORDED_WITHIN_S
        while True:
            found: dict[str, list[int]] = {}
            try:
                for start in range(0, len(request_ids), _IDS_AT_ONCE):
                    ids = ", ".join(f"'{one}'" for one in request_ids[start:][:_IDS_AT_ONCE])
                    rows = await asyncio.to_thread(
                        self._system.sql,
                        f"SELECT request_id, epoch FROM requests FINAL WHERE request_id IN ({ids})",
                    )
                    for row in rows:
                        found.setdefault(row["request_id"], []).append(int(row["epoch"]))
            except OSError:
                found = {}  # telemetry is on its way back
            if len(found) == len(request_ids) or time.monotonic() > deadline_s:
                return found
            await asyncio.sleep(0.25)


def _gaps(client: TimedClient) -> list[float]:
    parts_s = client.arrivals.parts_s
    return [later_s - earlier_s for earlier_s, later_s in pairwise(parts_s)]

"""Round of ``benchmarks.chaos``: streams, a fault, and its violations."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise

import httpx
import msgspec

from benchmarks.chaos.faults import Event, FaultEffect
from benchmarks.chaos.loads import LOADS, Answer, Load, PartsAnswer, TimedClient
from tests.support.system import System
from tests.support.waiting import eventually

# Gaps that end later than this after the event are not attributed to it.
_EFFECT_S = 30.0
_STREAMING_SHARE = 0.9
_RECORDED_WITHIN_S = 30.0
_BACK_WITHIN_S = 60.0
_FORGET_S = 3.5
_IDS_AT_ONCE = 500
# Batches of another shape add in another order.
_LOGPROB_TOLERANCE = 0.02
_PLAIN = "plain"


# Kinds of violations in a round.
WRONGS = (
    *("num_lost", "num_wrong_indices", "num_other_texts"),
    *("num_without_record", "num_doubled_records", "num_wrong_ways"),
)


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one event.

    ``gaps_s`` are the longest gaps of the affected streams, one entry each. ``wrongs`` has a
    sentence for each violation, ``num_wrong_ways`` of which are about the event itself.
    ``loading_s`` is the time from the event until each restarted worker served again, or had an
    engine.
    """

    event: str
    num_streams: int
    num_streaming: int
    num_wrong: dict[str, int]
    gaps_s: tuple[float, ...]
    loading_s: tuple[float, ...]
    wall_s: float
    wrongs: tuple[str, ...] = ()


class Streams:
    """Clients of one load after another, compared with the answers of an undisturbed run."""

    _num_workers = _num_gateways = 2

    def __init__(self, system: System, num_streams: int, num_tokens: int, limit_s: float) -> None:
        self._system = system
        self._num_streams = num_streams
        self._num_tokens = num_tokens
        self._limit_s = limit_s
        self._undisturbed: dict[str, list[Answer]] = {}
        self.usual_gaps_s: tuple[float, ...] = ()

    def _clients(self, load: Load) -> list[TimedClient]:
        return load.clients(self._system, self._num_streams, self._num_tokens)

    async def run_undisturbed(self, name: str = _PLAIN) -> None:
        """Run a load without an event, to record its answers and the usual gaps of plain answers.

        Raises AssertionError for a missing answer.
        """
        clients = self._clients(LOADS[name])
        answers = await self._answers([asyncio.create_task(one.ask()) for one in clients])
        wrong = [answer for answer in answers if not isinstance(answer, Answer)]
        assert not wrong, f"nothing happened, and {len(wrong)} answers failed: {wrong[0]!r}"
        self._undisturbed[name] = [one for one in answers if isinstance(one, Answer)]
        if name == _PLAIN:
            counts = {answer.completion_tokens for answer in self._undisturbed[name]}
            assert counts == {self._num_tokens}, f"answers of {counts} tokens"
            gaps = [max(_gaps(client), default=0.0) for client in clients]
            self.usual_gaps_s = tuple(sorted(gaps))

    async def run(self, event: Event) -> Round:
        """Run a load with an event in the middle.

        Raises AssertionError if a part does not recover.
        """
        if event.load not in self._undisturbed:
            await self.run_undisturbed(event.load)
        began_s = time.monotonic()
        clients = self._clients(LOADS[event.load])
        tasks = [asyncio.create_task(one.ask()) for one in clients]
        await self._until_streaming(clients, tasks)
        num_streaming = sum(
            bool(client.arrivals.parts_s) and not task.done()
            for client, task in zip(clients, tasks, strict=True)
        )
        event_s, event_at = time.monotonic(), time.time()
        effect = await event.fault.inject(self._system)
        answers = await self._answers(tasks)
        wall_s = time.monotonic() - began_s
        await self._is_whole(event, effect, event_s)
        return await self._judge(
            event, clients, answers, effect, num_streaming, event_s, event_at, wall_s
        )

    async def _until_streaming(
        self, clients: Sequence[TimedClient], tasks: Sequence[asyncio.Task[Answer]]
    ) -> None:
        wanted = _STREAMING_SHARE * len(clients)

        def is_so() -> bool:
            num_begun = sum(bool(client.arrivals.parts_s) for client in clients)
            return num_begun >= wanted or any(task.done() for task in tasks)

        await eventually(is_so, timeout_s=self._limit_s, what="that the streams run")

    async def _answers(self, tasks: Sequence[asyncio.Task[Answer]]) -> list[Answer | BaseException]:
        """Return an answer or an error for each task. Late tasks are cancelled."""
        _, late = await asyncio.wait(tasks, timeout=self._limit_s)
        for task in late:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def _is_whole(self, event: Event, effect: FaultEffect, event_s: float) -> None:
        """Wait until all parts serve, as far as both gateways know.

        Waits at least ``_FORGET_S`` after the event: until then gateways may count a lost worker.
        """
        await asyncio.sleep(max(0.0, event_s + _FORGET_S - time.monotonic()))
        seen: set[str] = set()

        async def all_serve() -> bool:
            if any(self._system.pid(part) == pid for part, pid in effect.pids.items()):
                return False
            try:
                async with httpx.AsyncClient(base_url=self._system.http) as http:
                    health = (await http.get("/healthz")).json()
            except httpx.TransportError:
                return False
            if health["status"] == "ok" and health["num_workers"] == self._num_workers:
                seen.add(health["gateway_id"])
            return len(seen) >= self._num_gateways and effect.is_mended()

        await eventually(all_serve, timeout_s=_BACK_WITHIN_S, what=f"after {event.name}, health")

    async def _judge(
        self,
        event: Event,
        clients: Sequence[TimedClient],
        answers: Sequence[Answer | BaseException],
        effect: FaultEffect,
        num_streaming: int,
        event_s: float,
        event_at: float,
        wall_s: float,
    ) -> Round:
        load, undisturbed = LOADS[event.load], self._undisturbed[event.load]
        ids = [_job_ids(client.request_id, load.num_choices) for client in clients]
        records = await self._records([job_id for of_client in ids for job_id in of_client])
        wrongs = [f"{event.name}: {wrong}" for wrong in effect.wrongs]
        num_wrong = dict.fromkeys(WRONGS, 0) | {"num_wrong_ways": len(effect.wrongs)}
        gaps_s: list[float] = []
        for client, answer, job_ids, expected in zip(
            clients, answers, ids, undisturbed, strict=True
        ):
            epochs = [epoch for job_id in job_ids for epoch in records.get(job_id, [])]
            num_records = [len(records.get(job_id, [])) for job_id in job_ids]
            num_wrong["num_without_record"] += num_records.count(0)
            num_wrong["num_doubled_records"] += sum(number > 1 for number in num_records)
            if not isinstance(answer, Answer):
                is_index = isinstance(answer, AssertionError)
                num_wrong["num_wrong_indices" if is_index else "num_lost"] += 1
                wrongs.append(f"{event.name}, {client.request_id}: {answer!r}")
                continue
            is_short = answer.completion_tokens != expected.completion_tokens
            num_wrong["num_wrong_indices"] += is_short
            num_wrong["num_other_texts"] += is_other(answer, expected)
            gap_s = client.arrivals.longest_gap_s(event_s, event_s + _EFFECT_S)
            if gap_s is not None and (not event.is_partial or max(epochs, default=0) > 1):
                gaps_s.append(gap_s)
        return Round(
            event=event.name,
            num_streams=self._num_streams,
            num_streaming=num_streaming,
            num_wrong=num_wrong,
            gaps_s=tuple(sorted(gaps_s)),
            loading_s=self._loading_s(event_at),
            wall_s=wall_s,
            wrongs=tuple(wrongs),
        )

    def _loading_s(self, event_at: float) -> tuple[float, ...]:
        """Return the seconds from the event until each reloaded worker served, by the workers'
        logs.
        """
        loaded_s = []
        for log in (self._system.data / "logs").glob("worker-*.log"):
            for line in log.read_text().splitlines():
                if '"message":"serving"' in line or '"message":"a new engine runs"' in line:
                    at = datetime.fromisoformat(json.loads(line)["time"]).timestamp()
                    if at > event_at:
                        loaded_s.append(at - event_at)
        return tuple(sorted(loaded_s))

    async def _records(self, request_ids: Sequence[str]) -> dict[str, list[int]]:
        """Return the epochs of each request's records, once all are stored or the time is up."""
        deadline_s = time.monotonic() + _RECORDED_WITHIN_S
        while True:
            found: dict[str, list[int]] = {}
            try:
                for start in range(0, len(request_ids), _IDS_AT_ONCE):
                    ids = ", ".join(f"'{one}'" for one in request_ids[start:][:_IDS_AT_ONCE])
                    rows = await asyncio.to_thread(
                        self._system.sql,
                        "SELECT generation_id, epoch FROM generations FINAL "
                        f"WHERE generation_id IN ({ids})",
                    )
                    for row in rows:
                        found.setdefault(row["generation_id"], []).append(int(row["epoch"]))
            except OSError:
                found = {}  # telemetry is on its way back
            if len(found) == len(request_ids) or time.monotonic() > deadline_s:
                return found
            await asyncio.sleep(0.25)


def _job_ids(request_id: str, num_choices: int) -> list[str]:
    """Return a request's job ids: one for each choice, with a record each."""
    return [request_id, *(f"{request_id}.{number}" for number in range(1, num_choices))]


def is_other(answer: Answer, expected: Answer) -> bool:
    """Return whether an answer differs from the expected one.

    Compares the content of choices, the reported tokens and their log-probabilities.
    """
    if (answer.text, answer.finish_reason) != (expected.text, expected.finish_reason):
        return True
    if not (isinstance(answer, PartsAnswer) and isinstance(expected, PartsAnswer)):
        return False
    return any(
        abs(given - wanted) > _LOGPROB_TOLERANCE
        for index, values in expected.logprobs.items()
        for given, wanted in zip(answer.logprobs[index], values, strict=True)
    )


def _gaps(client: TimedClient) -> list[float]:
    parts_s = client.arrivals.parts_s
    return [later_s - earlier_s for earlier_s, later_s in pairwise(parts_s)]

"""Random attempts in random order: each request ends once or is left to another attempt."""

from __future__ import annotations

import random

import pytest

from millrace.engine.types import EngineOutput
from millrace.registry.served import ServedModel
from millrace.schemas.control import Cancel, CancelReason, Replay
from millrace.schemas.frames import TERMINAL_FRAMES, Done, Embedding, FinishReason
from millrace.schemas.pooling import Pooling
from millrace.workers.process.keeper import MAX_RESTARTS, RESTART_WINDOW_S
from tests.workers.scripted import Bench, bench

_NUM_ACTIONS = 150


class _Life:
    """Random actions on a worker, with the state that must be true at the end."""

    def __init__(self, b: Bench, seed: int) -> None:
        self.b = b
        self.random = random.Random(seed)
        self.leases: dict[str, str] = {}
        self.epochs: dict[str, int] = {}
        self.superseded: set[str] = set()
        self.made: dict[str, list[int]] = {}
        self.pooling: dict[str, Pooling | None] = {}
        self._actions = [
            *(self._dispatch, self._dispatch),
            *(self._emit for _ in range(6)),
            *(self._cancel, self._supersede, self._adopt),
            *(self._replay, self._outage, self._pass_time, self._kill_engine, self._stand_still),
        ]

    async def act(self) -> None:
        action = self.random.choice(self._actions)
        await action()

    def _any(self) -> str | None:
        return self.random.choice(sorted(self.leases)) if self.leases else None

    async def _dispatch(self) -> None:
        pooling = self.random.choice([None, None, None, Pooling.MEAN])
        job = self.b.job(f"r{len(self.epochs)}", sampling={"max_tokens": 6}, pooling=pooling)
        lease = await self.b.lease(job)
        self.epochs[job.request_id] = 1
        if (await self.b.dispatch(job, lease=lease)).ok:
            self.leases[job.request_id] = lease
            self.pooling[job.request_id] = pooling
            self.made[job.request_id] = []
        else:
            await self.b.peer.jobs.ack(lease)

    async def _emit(self) -> None:
        request_id = self._any()
        if request_id is None:
            return
        if f"{request_id}:1" not in self.b.engine.added:
            return
        if self.pooling[request_id] is not None:
            self.b.engine.step(_embedding(f"{request_id}:1"))
            return
        made = self.made[request_id]
        finish = FinishReason.LENGTH if len(made) == 5 else None
        if len(made) < 6:
            made.append(20 + len(made))
            self.b.engine.emit(f"{request_id}:1", made[-1:], finish)

    async def _cancel(self) -> None:
        request_id = self._any()
        if request_id is not None:
            await self.b.peer.control.cancel(Cancel(request_id=request_id))

    async def _supersede(self) -> None:
        request_id = self._any()
        if request_id is None or self.random.random() < 0.5:
            return
        if self.b.worker.requests.holds(request_id):
            self.superseded.add(request_id)
        await self.b.command(
            Cancel(request_id=request_id, reason=CancelReason.SUPERSEDED, below_epoch=10**6)
        )
        del self.leases[request_id]

    async def _adopt(self) -> None:
        request_id = self._any()
        if request_id is None or not self.b.worker.requests.holds(request_id):
            return
        self.epochs[request_id] += 1
        pooling = self.pooling[request_id]
        job = self.b.job(request_id, sampling={"max_tokens": 6}, pooling=pooling)
        has = self.random.randint(0, len(self.made[request_id]))
        reply = await self.b.dispatch(
            job,
            self.epochs[request_id],
            self.leases[request_id],
            resume_token_ids=tuple(self.made[request_id][:has]),
        )
        assert reply.ok or reply.reason == "full"

    async def _replay(self) -> None:
        request_id = self._any()
        if request_id is not None:
            await self.b.command(Replay(request_id=request_id, from_index=0, reply="gw"))

    async def _outage(self) -> None:
        self.b.broker.stop()
        await self.b.settle(self.random.random())
        self.b.broker.start()

    async def _stand_still(self) -> None:
        self.b.clock.skip(4 * self.random.random())

    async def _kill_engine(self) -> None:
        """Kill the engine, but not so often that the worker gives up on engines."""
        before = self.b.engine
        before.fail("exit code -9")
        await self.b.settle(1.1 * RESTART_WINDOW_S / MAX_RESTARTS)
        assert self.b.engine is not before
        for engine_id, request in self.b.engine.added.items():
            made = self.made.get(engine_id.removesuffix(":1"), [])
            assert list(request.output_token_ids) == made[: len(request.output_token_ids)]

    async def _pass_time(self) -> None:
        await self.b.settle(self.random.random())


def _embedding(engine_id: str) -> EngineOutput:
    return EngineOutput(
        request_id=engine_id,
        started=True,
        embedding=(0.5, -1.0),
        finish_reason=FinishReason.STOP,
    )


@pytest.mark.parametrize("seed", range(12))
async def test_each_request_ends_once(demo: ServedModel, seed: int) -> None:
    async with bench(demo, replay_memory_s=1e6) as b:
        life = _Life(b, seed)
        for _ in range(_NUM_ACTIONS):
            await life.act()
        for request_id in list(life.leases):
            await b.command(Cancel(request_id=request_id))
        for _ in range(10):
            await b.settle(1.0)
        assert b.worker.requests.num_running == b.worker.requests.num_ending == 0
        records = [record.request_id for record in await b.records()]
        assert len(records) == len(set(records))
        # All but the superseded have their record and have left the queue.
        assert set(life.leases) <= set(records)
        assert not life.superseded & set(records)
        assert await b.num_queued() == len(life.superseded)
        for request_id in life.leases:
            await b.command(Replay(request_id=request_id, from_index=0, reply="gw"))
            await b.settle()
            kinds = {type(f) for f in b.of(request_id) if isinstance(f, TERMINAL_FRAMES)}
            assert len(kinds) == 1, f"{request_id} ended in several ways"
            if kinds == {Done}:
                embedded = any(isinstance(frame, Embedding) for frame in b.of(request_id))
                assert embedded == (life.pooling[request_id] is not None)

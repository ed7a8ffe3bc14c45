"""Simulated worker: the bus protocol around a batch in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from millrace.bus.transport import Subscription
from millrace.schemas.control import (
    Cancel,
    CancelReason,
    Dispatch,
    Drain,
    Ended,
    Replay,
    ResetPrefixCache,
    Served,
    SetRole,
    Warm,
    WorkerCommand,
    WorkerReply,
)
from millrace.schemas.engines import WorkerRole
from millrace.schemas.frames import Delta, Frame
from millrace.schemas.jobs import Tier
from millrace.schemas.records import Status
from millrace.simulation.outcomes import REPLY
from millrace.simulation.workers.context import FleetContext
from millrace.simulation.workers.heartbeats import Heartbeats
from millrace.simulation.workers.leaps import LeapingBatch
from millrace.simulation.workers.moves import SimulatedMoves
from millrace.simulation.workers.runs import SimulatedRun
from millrace.workers.simulated.blocks import SimulatedSequence

# Preempted requests of lower tiers also wait here: this times the capacity in all.
_MAX_HELD_FACTOR = 2
_TIERS = tuple(Tier)
# Interval of checks whether departed runs have their blocks.
_CHECK_INTERVAL_S = 0.05


class SimulatedWorker:
    """Incarnation of a simulated worker.

    It runs dispatches by its batch, and publishes frames, record, ack and notice of each end, in
    this order. A run with a KV source enters the batch once its blocks are here.

    ``on_idle`` is called when it drains and holds nothing that it or others need.
    """

    def __init__(
        self,
        context: FleetContext,
        batch: LeapingBatch,
        heartbeats: Heartbeats,
        moves: SimulatedMoves,
        on_idle: Callable[[SimulatedWorker], None],
    ) -> None:
        self.worker_id = heartbeats.worker_id
        self.model = heartbeats.model
        self.batch = batch
        self.runs: dict[str, SimulatedRun] = {}
        self.alive = False
        self._bus = context.bus
        self._clock = context.clock
        self._loop = asyncio.get_running_loop()
        self._config = context.config
        self._heartbeats = heartbeats
        self._moves = moves
        moves.on_pulled = heartbeats.announce_soon
        self._outcomes = context.outcomes
        self._spawn = context.spawn
        self._on_idle = on_idle
        self._capacity = batch.max_num_sequences + context.config.max_num_waiting
        self._superseded: list[SimulatedRun] = []
        self._step: asyncio.TimerHandle | None = None
        self._subscriptions: list[Subscription] = []
        self._loops: list[asyncio.Task[None]] = []

    @property
    def role(self) -> WorkerRole:
        """Present role."""
        return self._moves.role

    # --- start and end ---

    async def start(self) -> None:
        self.alive = True
        self._moves.begin(self.batch.blocks)
        self._heartbeats.begin(self.batch, self.num_held_by_tier)
        control = self._bus.control
        self._subscriptions = [
            await control.serve_commands(self.worker_id, self._on_command),
            await control.subscribe_pulled(self.worker_id, self._moves.note_pulled),
        ]
        self._loops = [self._spawn(self._heartbeats.run()), self._spawn(self._hold_leases())]

    async def kill(self) -> None:
        """End like kill -9, without notice. Clients keep their tokens."""
        if not self.alive:
            return
        self.alive = False
        self.batch.settle(self._loop.time())
        for run in self.runs.values():
            self._forget(run)
        self.runs.clear()
        if self._step is not None:
            self._step.cancel()
        self._heartbeats.stop()
        self._moves.stop()
        for task in self._loops:
            task.cancel()
        for subscription in self._subscriptions:
            await subscription.close()

    async def drain(self) -> None:
        """Take no new work. ``on_idle`` follows, at once if nothing is held."""
        await self._heartbeats.drain()
        self._check_idle()

    def _check_idle(self) -> None:
        if not self.is_draining or self.runs or self._superseded or not self.alive:
            return
        if self._moves.num_kept:
            self._loop.call_later(_CHECK_INTERVAL_S, self._check_idle)
        else:
            self._on_idle(self)

    async def retire(self) -> None:
        """Give back held runs and leave."""
        given_back = list(self.runs.values())
        for run in given_back:
            self._drop(run)
        for run in given_back:
            await self._bus.jobs.release(run.lease)
        if given_back:
            await self._notice(given_back, released=True)
        await self._heartbeats.announce(retired=True)
        await self.kill()

    @property
    def is_draining(self) -> bool:
        return self._heartbeats.draining

    def num_held_by_tier(self) -> dict[Tier, int]:
        return dict(Counter(run.dispatch.job.tier for run in self.runs.values()))

    # --- commands ---

    async def _on_command(self, command: WorkerCommand) -> WorkerReply:
        match command:
            case Dispatch():
                return self._on_dispatch(command)
            case Cancel():
                self.on_cancel(command)
                return WorkerReply(ok=True)
            case Drain():
                await self.drain()
                return WorkerReply(ok=True)
            case Replay():
                return WorkerReply(ok=False, reason="unknown_request", message="nothing is kept")
            case Warm():
                apart = self._config.prefix_scope == "tenant"
                return await self._moves.warm(command, apart=apart)
            case SetRole():
                return await self._set_role(command)
            case ResetPrefixCache():
                return _no("bad_request", "a simulation measures with its caches")

    async def _set_role(self, command: SetRole) -> WorkerReply:
        moves = self._moves
        if command.from_role not in (None, moves.role):
            return _no("stale_role", f"the role is {moves.role} here")
        if moves.role is not command.role:
            moves.role = command.role
            await self._heartbeats.announce()
            moves.hand_on(self.runs.values())
        return WorkerReply(ok=True)

    def _on_dispatch(self, dispatch: Dispatch) -> WorkerReply:
        known = self.runs.get(dispatch.job.request_id)
        if known is not None:
            if dispatch.epoch <= known.epoch and dispatch.lease != known.lease:
                return _no("stale_epoch", f"epoch {known.epoch} runs here")
            known.epoch, known.lease = max(known.epoch, dispatch.epoch), dispatch.lease
            return WorkerReply(ok=True)
        veto = self._veto(dispatch)
        if veto is not None:
            return veto
        apart = self._config.prefix_scope == "tenant"
        self._start(SimulatedRun.of(dispatch, self._outcomes[dispatch.job.request_id], apart=apart))
        return WorkerReply(ok=True)

    def _veto(self, dispatch: Dispatch) -> WorkerReply | None:
        job = dispatch.job
        if job.model != self.model:
            return _no("wrong_model", f"this worker serves {self.model}, not {job.model}")
        if self.is_draining:
            return _no("draining", "this worker takes no new work")
        held = self.num_held_by_tier()
        above = sum(held.get(tier, 0) for tier in _TIERS[: _TIERS.index(job.tier) + 1])
        if above >= self._capacity or len(self.runs) >= _MAX_HELD_FACTOR * self._capacity:
            return _no("full", f"{len(self.runs)} requests are held here")
        num_known = len(job.prompt_token_ids or ()) + len(dispatch.resume_token_ids)
        outcome = self._outcomes[job.request_id]
        if max(num_known + 1, outcome.request.total_tokens) > self.batch.capacity_tokens:
            return _no("bad_request", "the request does not fit the KV cache")
        return None

    def _start(self, run: SimulatedRun) -> None:
        outcome = run.outcome
        self.runs[run.request_id] = run
        outcome.begin_run(self.worker_id, lambda: self._num_tokens(run), self._outcomes.now_s())
        deadline_ns = run.dispatch.job.deadline_ns
        if deadline_ns is not None:
            left_s = (deadline_ns - self._clock.now_ns()) / 1e9
            run.expiry = self._loop.call_later(max(left_s, 0.0), self._end, run, Status.EXPIRED)
        if run.sequence is None:
            self._end(run, Status.DONE)
        elif not self._moves.pull(run, lambda: self._enter(run)):
            self._enter(run)

    def _enter(self, run: SimulatedRun) -> None:
        """Add a run to the batch, unless it has ended or was superseded."""
        if self.runs.get(run.request_id) is not run:
            return
        assert run.sequence is not None, "what has nothing to make has ended"
        if self.batch.is_stepping:
            self._reschedule(self.batch.interrupt(self._loop.time()))
        self.batch.add(run.sequence)
        if not self.batch.is_stepping:
            self._plan()

    def _num_tokens(self, run: SimulatedRun) -> int:
        self.batch.settle(self._loop.time())
        return run.num_tokens

    def on_cancel(self, cancel: Cancel) -> None:
        """Stop a request, or a superseded run of it."""
        run = self.runs.get(cancel.request_id)
        if run is None:
            return
        if cancel.below_epoch is not None or cancel.reason is CancelReason.SUPERSEDED:
            if cancel.below_epoch is None or run.epoch < cancel.below_epoch:
                self._supersede(run)
            return
        late = cancel.reason is CancelReason.DEADLINE
        self._end(run, Status.EXPIRED if late else Status.CANCELLED)

    def _supersede(self, run: SimulatedRun) -> None:
        """Drop a run that another worker continues.

        Its service is reported when the step that it may be in is over, as the device time is known
        then.
        """
        self._moves.left(run)
        self._drop(run)
        if self.batch.is_stepping:
            self._superseded.append(run)
        else:
            self._spawn(self._notice([run]))

    # --- the batch ---

    def _plan(self) -> None:
        end_s = self.batch.begin_at(self._loop.time())
        self._step = None if end_s is None else self._loop.call_at(end_s, self._on_step)

    def _reschedule(self, end_s: float) -> None:
        assert self._step is not None, "a batch that steps has a timer"
        if end_s < self._step.when():
            self._step.cancel()
            self._step = self._loop.call_at(end_s, self._on_step)

    def _on_step(self) -> None:
        now_ns = self._clock.now_ns()
        step = self.batch.finish()
        frames: list[tuple[str, Frame]] = []
        started = [_run_of(sequence) for sequence in step.started]
        for run in started:
            run.started_ns = now_ns
            frames.append((run.request_id, run.started_frame(self.worker_id)))
        made_first: list[SimulatedRun] = []
        for sequence in step.made:
            run = _run_of(sequence)
            if not run.first_token_ns:
                run.first_token_ns = now_ns
                made_first.append(run)
                frames.append((run.request_id, _first_delta(run, sequence)))
        ended = [_run_of(sequence) for sequence in step.finished]
        for run in ended:
            self._leave(run)
        self._plan()
        self._tell_of_moves(started, [run for run in made_first if run.request_id in self.runs])
        if frames or ended:
            self._spawn(self._tell(frames, ended, Status.DONE))
        if ended:
            self._heartbeats.note_room()

    def _tell_of_moves(self, started: list[SimulatedRun], made_first: list[SimulatedRun]) -> None:
        self._moves.advanced(started, made_first)
        superseded, self._superseded = self._superseded, []
        if superseded:
            self._spawn(self._notice(superseded))

    # --- ends ---

    def _end(self, run: SimulatedRun, status: Status) -> None:
        """End a run that the batch would continue, or that has nothing to make."""
        self._drop(run)
        self._spawn(self._tell([], [run], status))

    def _drop(self, run: SimulatedRun) -> None:
        """Remove a run, also from the batch. The step under way goes on without it."""
        if run.sequence is not None:
            if self.batch.is_stepping:
                self._reschedule(self.batch.interrupt(self._loop.time()))
            self.batch.cancel(run.request_id)
        self._leave(run)
        self._heartbeats.note_room()

    def _leave(self, run: SimulatedRun) -> None:
        del self.runs[run.request_id]
        self._forget(run)

    def _forget(self, run: SimulatedRun) -> None:
        sequence = run.sequence
        run.outcome.stop_run(None if sequence is None else sequence.last_token_s)
        if run.expiry is not None:
            run.expiry.cancel()

    async def _tell(
        self, frames: list[tuple[str, Frame]], ended: list[SimulatedRun], status: Status
    ) -> None:
        for run in ended:
            frames.extend((run.request_id, frame) for frame in run.closing_frames(status))
        await self._bus.frames.publish(REPLY, frames, batch=True)
        for run in ended:
            record = run.record(status, self.worker_id, self._clock.now_ns())
            await self._bus.outbox.publish(record)
            await self._bus.jobs.ack(run.lease)
        if ended:
            await self._notice(ended)

    async def _notice(self, ended: list[SimulatedRun], *, released: bool = False) -> None:
        request_ids = tuple(run.request_id for run in ended)
        served: tuple[Served, ...] = tuple(run.served() for run in ended)
        await self._bus.control.publish_ended(
            Ended(
                worker_id=self.worker_id,
                request_ids=request_ids,
                served=served,
                released=request_ids if released else (),
            )
        )
        self._check_idle()

    async def _hold_leases(self) -> None:
        while True:
            await self._clock.sleep(self._config.lease_extend_s)
            for run in list(self.runs.values()):
                await self._bus.jobs.extend(run.lease)


def _run_of(sequence: SimulatedSequence) -> SimulatedRun:
    assert isinstance(sequence.tag, SimulatedRun)
    return sequence.tag


def _first_delta(run: SimulatedRun, sequence: SimulatedSequence) -> Frame:
    index = sequence.num_resumed + sequence.num_made - 1
    return Delta(index=index, token_ids=(sequence.token_ids[-1],), epoch=run.epoch)


def _no(reason: str, message: str) -> WorkerReply:
    return WorkerReply(ok=False, reason=reason, message=message)

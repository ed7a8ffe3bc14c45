"""The worker's bus side: takes dispatches, drives the engine, and answers for what runs here."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator

from bus.api import Bus, Subscription
from bus.clock import Clock
from registry.served import ServedModel
from schemas.config import WorkerConfig
from schemas.control import (
    Cancel,
    CancelReason,
    Dispatch,
    Drain,
    Replay,
    WorkerCommand,
    WorkerReply,
)
from schemas.errors import MillraceError
from schemas.frames import Frame
from schemas.records import RequestRecord, Status
from workers.endings import Endings
from workers.engine.types import EngineOutput, EngineStats
from workers.engine_process import EngineFailedError, EngineLike
from workers.finished import EpochFloors, FinishedGenerations
from workers.flusher import Flusher
from workers.generation import CANCELLED, EXPIRED, Generation, Outcome, Route
from workers.index import Generations, IndexWriter
from workers.leases import LeaseKeeper
from workers.records import request_record
from workers.status import StatusReporter
from workers.text import TextStream

_DEADLINE_CHECK_S = 0.1
_GOODBYE_TIMEOUT_S = 1.0
# While the bus does not take records, ended requests pile up to this many times the capacity.
_MAX_ENDING_FACTOR = 4

_OK = WorkerReply(ok=True)
logger = logging.getLogger(__name__)


class Worker:
    """One life of a worker.

    It owns its generations. One is ``running`` from its dispatch until its outcome is known, then
    ending until its lease is acknowledged; it is remembered for replays from its outcome on. Its
    lease is extended as long as it is running or ending.
    """

    def __init__(
        self,
        bus: Bus,
        config: WorkerConfig,
        served_model: ServedModel,
        engine: EngineLike,
        clock: Clock,
        generations: Generations,
    ) -> None:
        self.worker_id = f"{config.name}-{uuid.uuid4().hex[:8]}"
        self.ready = asyncio.Event()
        self._bus = bus
        self._config = config
        self._model = served_model
        self._engine = engine
        self._clock = clock
        self._index = IndexWriter(generations, self.worker_id)
        self._capacity = config.engine.max_num_sequences + config.max_num_waiting
        self._running: dict[str, Generation] = {}
        self._by_engine_id: dict[str, Generation] = {}
        self._floors = EpochFloors()
        self.finished = FinishedGenerations(clock, config.replay_memory_s)
        self._flusher = Flusher(bus.frames, clock, config.flush_interval_ms / 1e3)
        self._endings = Endings(bus, self._index, self._flusher, clock, self._record)
        self._leases = LeaseKeeper(bus.jobs, clock, config.lease_extend_s, self._held_leases)
        self._status = StatusReporter(
            bus,
            config,
            self.worker_id,
            served_model.entry.name,
            served_model.context_window_tokens,
            clock,
            lambda: engine.stats,
            lambda: len(self._running),
        )

    @property
    def num_running(self) -> int:
        """Requests whose outcome is open."""
        return len(self._running)

    @property
    def num_ending(self) -> int:
        """Requests whose lease is not acknowledged yet though they are over."""
        return len(self._endings)

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until ``stopping`` is set, then drain; the worker is retired at the end.

        Raises EngineFailedError as soon as the engine has ended; the leases are left to lapse.
        """
        subscriptions: list[Subscription] = []
        self._engine.on_outputs = self._on_outputs
        self._bus.on_reconnect(self._leases.hurry)
        self._bus.on_reconnect(self._status.hurry)
        try:
            async with asyncio.TaskGroup() as group:
                services = [
                    group.create_task(service, name=name)
                    for name, service in (
                        ("engine watch", self._watch_engine()),
                        ("flusher", self._flusher.run()),
                        ("leases", self._leases.run()),
                        ("index", self._index.run()),
                        ("deadlines", self._watch_deadlines()),
                    )
                ]
                await self._subscribe(subscriptions)
                services.append(group.create_task(self._status.run(), name="status"))
                self.ready.set()
                await stopping.wait()
                await self._drain()
                for service in services:
                    service.cancel()
        except* MillraceError as failed:
            raise _first(failed) from None
        finally:
            await self._say_goodbye(subscriptions)

    async def _subscribe(self, subscriptions: list[Subscription]) -> None:
        control = self._bus.control
        subscriptions.append(await control.serve_commands(self.worker_id, self._on_command))
        subscriptions.append(await control.subscribe_cancels(self._on_cancel))
        subscriptions.append(await control.subscribe_queue_status(self._status.note_queue))

    async def _say_goodbye(self, subscriptions: list[Subscription]) -> None:
        try:
            async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                await self._status.announce(retired=True)
                for subscription in subscriptions:
                    await subscription.close()
        except TimeoutError:
            logger.warning("the bus was not there to be told of the end")

    async def _watch_engine(self) -> None:
        raise EngineFailedError(await self._engine.wait_closed())

    async def _watch_deadlines(self) -> None:
        while True:
            await self._clock.sleep(_DEADLINE_CHECK_S)
            now_ns = self._clock.now_ns()
            for generation in list(self._running.values()):
                if _is_late(generation, now_ns):
                    self._stop(generation, EXPIRED)

    # --- commands ---

    async def _on_command(self, command: WorkerCommand) -> WorkerReply:
        match command:
            case Dispatch():
                return self._dispatch(command)
            case Cancel():
                return self._cancel(command)
            case Replay():
                return self._replay(command)
            case Drain():
                logger.info("draining", extra={"reason": command.reason})
                self._status.drain()
                return _OK

    def _on_cancel(self, cancel: Cancel) -> None:
        self._cancel(cancel)

    def _dispatch(self, dispatch: Dispatch) -> WorkerReply:
        known = self._find(dispatch.job.request_id)
        if known is not None:
            if dispatch.epoch <= known.epoch:
                return _OK if dispatch.lease == known.lease else _stale(known.epoch)
            if known.continues(dispatch.resume_token_ids):
                self._adopt(known, dispatch)
                return _OK
            # The client follows another run, whose tokens differ.
            self._supersede(known)
        veto = self._veto(dispatch)
        if veto is not None:
            return veto
        self._start(dispatch)
        return _OK

    def _veto(self, dispatch: Dispatch) -> WorkerReply | None:
        job, sampling = dispatch.job, dispatch.job.sampling
        floor = self._floors.get(job.request_id)
        if dispatch.epoch < floor:
            return _stale(floor)
        if job.model != self._model.entry.name:
            return _no(
                "wrong_model", f"this worker serves {self._model.entry.name}, not {job.model}"
            )
        if not job.prompt_token_ids or sampling.max_tokens is None or sampling.seed is None:
            return _no("bad_request", "a dispatch needs prompt_token_ids, max_tokens and a seed")
        if self._status.draining:
            return _no("draining", "this worker takes no new work")
        num_ending = len(self._endings)
        if (
            len(self._running) >= self._capacity
            or num_ending >= _MAX_ENDING_FACTOR * self._capacity
        ):
            return _no("full", f"{len(self._running)} requests run here and {num_ending} end")
        return None

    def _start(self, dispatch: Dispatch) -> None:
        job = dispatch.job
        self.finished.discard(job.request_id)
        stream = TextStream(self._model.tokenizer, job.sampling, job.prompt_token_ids or ())
        generation = Generation(dispatch, stream, self._clock.now_ns())
        self._running[job.request_id] = generation
        self._by_engine_id[generation.engine_id] = generation
        outcome = generation.resumed_outcome(self._model.eos_token_ids)
        if outcome is not None:
            self._end(generation, outcome)
        elif _is_late(generation, generation.accepted_ns):
            self._end(generation, EXPIRED)
        else:
            self._engine.add(generation.engine_request(self._model.eos_token_ids))
            self._index.start(job.request_id, dispatch.epoch)

    def _adopt(self, generation: Generation, dispatch: Dispatch) -> None:
        """Another delivery of a job that runs or ran here: go on with it under the new lease."""
        generation.adopt(dispatch)
        self._index.start(generation.request_id, dispatch.epoch)
        if generation.ended:
            self._flusher.flush_now(generation, *generation.closing_frames())
            self._endings.begin(generation)
        else:
            if generation.started_ns:
                self._flusher.post(generation, [generation.started_frame(self.worker_id)])
            self._flusher.flush_now(generation)

    def _cancel(self, cancel: Cancel) -> WorkerReply:
        superseded = cancel.reason is CancelReason.SUPERSEDED
        if cancel.below_epoch is not None:
            self._floors.raise_to(cancel.request_id, cancel.below_epoch)
        generation = self._find(cancel.request_id)
        if generation is None:
            return _no("unknown_request", "no such request runs here")
        if superseded or cancel.below_epoch is not None:
            if cancel.below_epoch is None or generation.epoch < cancel.below_epoch:
                self._supersede(generation)
        elif not generation.ended:
            late = cancel.reason is CancelReason.DEADLINE
            self._stop(generation, EXPIRED if late else CANCELLED)
        return _OK

    def _replay(self, replay: Replay) -> WorkerReply:
        if replay.from_index < 0 or not replay.reply:
            return _no("bad_request", "a replay needs a reply and an index of 0 or more")
        generation = self._find(replay.request_id)
        if generation is None:
            return _no("unknown_request", "that request is not remembered here")
        generation.add_listener(replay.reply)
        frames: list[Frame] = []
        if generation.started_ns:
            frames.append(generation.started_frame(self.worker_id))
        frames += generation.deltas(replay.from_index)
        if generation.ended:
            frames += generation.closing_frames()
        job = generation.job
        route = Route(replay.reply, job.batch_frames, job.frames_as_json)
        self._flusher.post_to(route, replay.request_id, frames)
        return _OK

    # --- what the engine makes ---

    def _on_outputs(self, outputs: list[EngineOutput], _stats: EngineStats) -> None:
        now_ns = self._clock.now_ns()
        for output in outputs:
            generation = self._by_engine_id.get(output.request_id)
            if generation is None:
                continue
            try:
                self._take(generation, output, now_ns)
            except Exception as error:
                logger.exception(
                    "an output could not be used", extra={"request_id": generation.request_id}
                )
                self._stop(
                    generation,
                    Outcome(
                        status=Status.FAILED,
                        error_code=MillraceError.code,
                        error_message=f"the worker failed on this request: {type(error).__name__}",
                    ),
                )
        self._status.note_capacity()

    def _take(self, generation: Generation, output: EngineOutput, now_ns: int) -> None:
        is_start, is_first = not generation.started_ns, not generation.first_token_ns
        outcome = generation.take(output, now_ns)
        if is_start:
            self._flusher.post(generation, [generation.started_frame(self.worker_id)])
        if outcome is None:
            if not output.token_ids:
                return
            if is_first:
                self._flusher.flush_now(generation)
            else:
                self._flusher.mark(generation)
        elif output.finished:
            self._end(generation, outcome)
        else:
            self._stop(generation, outcome)

    # --- ends ---

    def _stop(self, generation: Generation, outcome: Outcome) -> None:
        """End a generation that the engine would go on with."""
        self._engine.cancel(generation.engine_id)
        self._end(generation, outcome)

    def _end(self, generation: Generation, outcome: Outcome) -> None:
        generation.outcome = outcome
        generation.done_ns = self._clock.now_ns()
        self._drop(generation)
        self.finished.add(generation)
        self._flusher.flush_now(generation, *generation.closing_frames())
        self._endings.begin(generation)
        self._status.note_capacity()

    def _supersede(self, generation: Generation) -> None:
        """Another run has the request: stop without a word, and leave the lease alone."""
        self._engine.cancel(generation.engine_id)
        self._drop(generation)
        self._flusher.forget(generation)
        self._endings.abandon(generation.request_id)
        self.finished.discard(generation.request_id)

    def _drop(self, generation: Generation) -> None:
        self._running.pop(generation.request_id, None)
        self._by_engine_id.pop(generation.engine_id, None)

    async def _drain(self) -> None:
        """Finish what runs within the time for it, then give back the rest for others to do."""
        self._status.drain()
        await self._status.announce()
        deadline_s = self._clock.monotonic() + self._config.drain_timeout_s
        while (self._running or self._endings) and self._clock.monotonic() < deadline_s:
            await self._clock.sleep(min(_DEADLINE_CHECK_S, self._config.drain_timeout_s))
        unfinished = [*self._running.values(), *self._endings.generations()]
        for generation in self._running.values():
            self._engine.cancel(generation.engine_id)
            self._flusher.flush_now(generation)
        self._running.clear()
        self._by_engine_id.clear()
        await self._flusher.published()
        try:
            async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                for generation in unfinished:
                    self._endings.abandon(generation.request_id)
                    await self._bus.jobs.release(generation.lease)
        except (MillraceError, TimeoutError):
            logger.warning("leases could not be given back; they lapse by themselves")

    # --- shared ---

    def _find(self, request_id: str) -> Generation | None:
        return (
            self._running.get(request_id)
            or self._endings.get(request_id)
            or self.finished.get(request_id)
        )

    def _held_leases(self) -> Iterator[str]:
        for generation in self._running.values():
            yield generation.lease
        for generation in self._endings.generations():
            yield generation.lease

    def _record(self, generation: Generation) -> RequestRecord:
        return request_record(generation, self.worker_id, self._model.entry.prices)


def _first(group: BaseExceptionGroup[MillraceError]) -> MillraceError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _is_late(generation: Generation, now_ns: int) -> bool:
    deadline_ns = generation.job.deadline_ns
    return deadline_ns is not None and now_ns >= deadline_ns


def _no(reason: str, message: str) -> WorkerReply:
    return WorkerReply(ok=False, reason=reason, message=message)


def _stale(epoch: int) -> WorkerReply:
    return _no("stale_epoch", f"epoch {epoch} of this request is known here")

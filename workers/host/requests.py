"""Requests of a worker, from their dispatch to their end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from millrace.bus.tenancy.settling import Settlements
from millrace.engine.types import DeviceTime, EngineOutput
from millrace.registry.tokenizers.output_text import TextStream
from millrace.schemas.control import Cancel, CancelReason, Dispatch, Replay, WorkerReply
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import Frame
from millrace.schemas.jobs import Tier
from millrace.workers.host.capacity import OK, Capacity, rejected, rejection_of_dispatch, stale
from millrace.workers.host.context import WorkerContext
from millrace.workers.host.endings.device_times import DeviceTimes
from millrace.workers.host.endings.finalizer import GenerationFinalizer
from millrace.workers.host.engine_intake import EngineIntake, EngineKilledError
from millrace.workers.host.flusher import Flusher
from millrace.workers.host.generations.accounting import DeviceUse
from millrace.workers.host.generations.beam_answers import BeamAnswers
from millrace.workers.host.generations.chat_answer import ChatAnswer
from millrace.workers.host.generations.finished import EpochFloors, FinishedGenerations
from millrace.workers.host.generations.frames import (
    closing_frames,
    pre_token_frames,
    started_frame,
    token_frames,
)
from millrace.workers.host.generations.generated_output import GeneratedOutput
from millrace.workers.host.generations.generation import Generation
from millrace.workers.host.generations.latencies import RequestTimes
from millrace.workers.host.generations.state import (
    EXPIRED,
    GenerationOutcome,
    GenerationPhase,
    cancelled,
    failed,
)
from millrace.workers.host.generations.tracing import RunTraces
from millrace.workers.host.leases import Generations, IndexWriter, LeaseOwnership
from millrace.workers.host.moves import StreamMoves
from millrace.workers.host.reports.completion_events import CompletionEvents

# Maximum time that a worker waits for the last device times when it shuts down.
_DEVICE_TIMES_TIMEOUT_S = 0.3

# Limit on a gap between checks, in beats. This gap plus one heartbeat (two at rest) stays below any
# scheduler's timeout for a dead worker.
_STALL_BEATS = 1.5

logger = logging.getLogger(__name__)


class Requests:
    """Owner of the generations of one incarnation of a worker.

    Each generation runs from its dispatch until its outcome is known. It is finalized until its
    lease is acknowledged, and then kept for replays. ``on_capacity`` is called when there may be
    more capacity.
    """

    def __init__(
        self,
        context: WorkerContext,
        flusher: Flusher,
        index: IndexWriter,
        generations: Generations,
        completions: CompletionEvents,
        on_capacity: Callable[[], None],
        traces: RunTraces | None = None,
        settlements: Settlements | None = None,
    ) -> None:
        config = context.config
        self.draining = False
        self._context = context
        self._model = context.model
        self._engine = context.engine
        self._clock = context.clock
        self._flusher = flusher
        self._index = index
        self._completions = completions
        self._on_capacity = on_capacity
        self._traces = traces
        self._capacity = Capacity(context.capacity)
        self._running: dict[str, Generation] = {}
        self._by_engine_id: dict[str, Generation] = {}
        self.ownership = LeaseOwnership(
            context.bus,
            self._clock,
            generations,
            _STALL_BEATS * config.heartbeat_s,
            self.held,
            self._on_lost,
        )
        self._device_times = DeviceTimes()
        self._finalizer = GenerationFinalizer(
            context,
            flusher,
            self._device_times,
            self.ownership,
            self._on_acked,
            self._on_lost,
            settlements,
        )
        self._finished = FinishedGenerations(self._clock, config.replay_memory_s)
        self._floors = EpochFloors()
        self._intake = EngineIntake(context)
        self.moves = StreamMoves(context)
        self.times = RequestTimes()

    @property
    def num_running(self) -> int:
        """Number of requests whose outcome is open."""
        return len(self._running)

    @property
    def num_ending(self) -> int:
        """Number of requests that are over and whose lease is not acknowledged yet."""
        return len(self._finalizer)

    def num_held_by_tier(self) -> dict[Tier, int]:
        """Return the number of requests whose outcome is open, by tier."""
        return self._capacity.num_held_by_tier()

    def holds(self, request_id: str) -> bool:
        """Return whether the request runs or ends here, so its lease is kept."""
        return request_id in self._running or self._finalizer.get(request_id) is not None

    # --- commands ---

    def dispatch(self, dispatch: Dispatch) -> WorkerReply:
        self.ownership.check_for_gap()
        former = None
        known = self._find(dispatch.job.request_id)
        if known is not None:
            if dispatch.epoch <= known.epoch:
                return OK if dispatch.lease == known.lease.handle else stale(known.epoch)
            if known.continues(dispatch.resume_token_ids):
                self._adopt(known, dispatch)
                return OK
            # The client follows another attempt, whose tokens differ.
            former = known if self.holds(known.request_id) else None
            self._supersede(known)
            self._device_times.when_reported(
                known, lambda: self._completions.add_served(known.pop_served())
            )
        rejection = self._rejection(dispatch)
        if rejection is not None:
            return rejection
        self._start(dispatch, former)
        return OK

    def _rejection(self, dispatch: Dispatch) -> WorkerReply | None:
        floor = self._floors.get(dispatch.job.request_id)
        if dispatch.epoch < floor:
            return stale(floor)
        rejection = rejection_of_dispatch(dispatch, self._model.entry.name)
        if rejection is not None:
            return rejection
        if self.draining:
            return rejected("draining", "this worker takes no new work")
        return self._capacity.rejection(dispatch.job.tier, len(self._running), len(self._finalizer))

    def _start(self, dispatch: Dispatch, former: Generation | None) -> None:
        job = dispatch.job
        self._finished.discard(job.request_id)
        stream = TextStream(self._model.tokenizer, job.sampling, job.prompt_token_ids or ())
        beams = BeamAnswers.of(job, self._model.tokenizer)
        now_ns, now_s = self._clock.now_ns(), self._clock.monotonic()
        device_use = DeviceUse(self._context.energy, self._context.engine.num_devices)
        answer = ChatAnswer.of(job, self._model.tokenizer.tool_format)
        output = GeneratedOutput(dispatch.resume_token_ids, stream, beams, answer)
        generation = Generation(dispatch, output, now_ns, now_s, device_use)
        if self._traces is not None:
            generation.trace = self._traces.start(dispatch)
        if not self._running:
            self._context.energy.read_soon(at_once=True)
        self._running[job.request_id] = generation
        self._capacity.add(job.tier)
        self._by_engine_id[generation.engine_id] = generation
        if former is not None:
            self._device_times.carry_over(
                former, generation, self._context.worker_id, generation.timing.accepted_ns
            )
        outcome = generation.resumed_outcome(self._model.eos_token_ids)
        if outcome is not None and job.sampling.prompt_logprobs is not None:
            generation.known_outcome, outcome = outcome, None
        if outcome is not None:
            self._end(generation, outcome)
        elif job.is_past_deadline(generation.timing.accepted_ns):
            self._end(generation, EXPIRED)
        else:
            self._intake.add(generation)
            self._index.start(job.request_id, dispatch.epoch, dispatch.lease)

    def _adopt(self, generation: Generation, dispatch: Dispatch) -> None:
        """Continue a job that runs or ran here under the new lease of another delivery."""
        generation.adopt(dispatch, self._context.worker_id, self._clock.monotonic())
        self._index.start(generation.request_id, dispatch.epoch, dispatch.lease)
        if generation.ended:
            self._flusher.flush_now(generation, *closing_frames(generation))
            self._finalizer.start(generation)
        else:
            if generation.timing.started_ns:
                self._flusher.post(generation, [started_frame(generation, self._context.worker_id)])
            self._flusher.flush_now(generation)

    def cancel(self, cancel: Cancel) -> WorkerReply:
        superseded = cancel.reason is CancelReason.SUPERSEDED
        if cancel.below_epoch is not None:
            self._floors.raise_to(cancel.request_id, cancel.below_epoch)
        generation = self._find(cancel.request_id)
        if generation is None or cancel.tenant not in ("", generation.job.tenant):
            return rejected("unknown_request", "no such request runs here")
        if superseded or cancel.below_epoch is not None:
            if cancel.below_epoch is None or generation.epoch < cancel.below_epoch:
                self._on_lost(generation)
        elif not generation.ended:
            self._stop(generation, cancelled(cancel.reason))
        return OK

    def replay(self, replay: Replay) -> WorkerReply:
        if replay.from_index < 0 or not replay.reply:
            return rejected("bad_request", "a replay needs reply, and from_index of 0 or more")
        generation = self._find(replay.request_id)
        if generation is None:
            return rejected("unknown_request", "this worker does not know this request")
        # The next flush begins after the tokens that this replay sends.
        self._flusher.flush_now(generation)
        listener = generation.listener(replay.reply).as_asked(replay)
        generation.delivery.add(listener)
        frames: list[Frame] = []
        if generation.timing.started_ns:
            frames.append(started_frame(generation, self._context.worker_id))
        frames += [*pre_token_frames(generation), *token_frames(generation, replay.from_index)]
        if generation.ended:
            frames += closing_frames(generation)
        self._flusher.post_to(listener, replay.request_id, frames)
        return OK

    # --- engine outputs ---

    def on_outputs(self, outputs: list[EngineOutput]) -> None:
        now_ns = self._clock.now_ns()
        for output in outputs:
            generation = self._by_engine_id.get(output.request_id)
            if generation is None:
                if output.finished and not self.moves.note_warmed(output.request_id):
                    self._device_times.note_late(output)
                continue
            try:
                self._apply(generation, output, now_ns)
            except Exception as error:
                logger.exception(
                    "an engine output could not be applied",
                    extra={"request_id": generation.request_id},
                )
                message = f"the worker failed on this request: {type(error).__name__}"
                self._stop(generation, failed(MillraceError.code, message))
        self.times.end_step(now_ns)
        self._on_capacity()

    def _apply(self, generation: Generation, output: EngineOutput, now_ns: int) -> None:
        before = generation.phase
        before_ns = generation.timing.last_token_ns
        outcome = generation.apply(output, now_ns)
        if output.token_ids and not output.choice:
            num_tokens, trace = len(output.token_ids), generation.job.traceparent
            self.times.note_tokens(generation.timing, num_tokens, before_ns, trace)
        has_advanced = generation.phase is not before
        if has_advanced:
            self.moves.advanced(generation, began=before is GenerationPhase.QUEUED)
            if before is GenerationPhase.QUEUED:
                self._flusher.post(generation, [started_frame(generation, self._context.worker_id)])
        if outcome is None:
            if not output.token_ids and (generation.output.beams is None or output.started):
                return
            self._intake.note_token(generation)
            if has_advanced:
                self._flusher.flush_now(generation)
            else:
                self._flusher.mark(generation)
        elif output.finished:
            if output.owes:
                self._device_times.expect_report(generation)
            self._end(generation, outcome)
        else:
            self._stop(generation, outcome)

    def on_device_times(self, times: list[DeviceTime]) -> None:
        """Add device times that the engine reported."""
        self._device_times.note(times, self._by_engine_id)
        if self._running:
            self._context.energy.read_soon()

    def on_engine_lost(self) -> None:
        """Keep all running requests for the next engine, except a poison pill, which ends."""
        self.moves.on_engine_lost()
        self._device_times.note_engine_lost(self._running.values())
        blamed = self._intake.engine_lost(self._running.values())
        if blamed is not None:
            logger.error("a request killed two engines", extra={"request_id": blamed.request_id})
            error = EngineKilledError()
            self._end(blamed, failed(error.code, error.message))

    def on_engine_replaced(self) -> None:
        self._intake.engine_replaced()
        self._on_capacity()

    # --- ends ---

    def _stop(self, generation: Generation, outcome: GenerationOutcome) -> None:
        """End a generation that is still in the engine."""
        self._cancel_in_engine(generation)
        self._end(generation, outcome)

    def _cancel_in_engine(self, generation: Generation) -> None:
        if self._engine.cancel(generation.engine_id):
            self._device_times.expect_report(generation)

    def _end(self, generation: Generation, outcome: GenerationOutcome) -> None:
        generation.end(outcome, self._clock.now_ns())
        self.times.add_end(generation.timing, outcome.status, generation.job.traceparent)
        self._drop(generation)
        self._finished.add(generation)
        self._flusher.flush_now(generation, *closing_frames(generation))
        self._finalizer.start(generation)
        self._on_capacity()

    def _on_acked(self, generation: Generation) -> None:
        self._index.finish(generation.request_id, generation.epoch)
        self._completions.add(generation.request_id, generation.pop_served())

    def _on_lost(self, generation: Generation) -> None:
        """Give up a generation that another worker owns."""
        if self._find(generation.request_id) is generation:
            self._supersede(generation)
            self._device_times.when_reported(
                generation,
                lambda: self._completions.add(generation.request_id, generation.pop_served()),
            )
            self._on_capacity()

    def _supersede(self, generation: Generation) -> None:
        """Stop without a frame and leave the lease untouched: another attempt owns the request."""
        self.moves.left(generation)
        self._cancel_in_engine(generation)
        self._drop(generation)
        self._index.drop(generation.request_id)
        self._flusher.forget(generation)
        self._finalizer.abandon(generation.request_id)
        self._finished.discard(generation.request_id)

    def _drop(self, generation: Generation) -> None:
        if self._running.pop(generation.request_id, None) is not None:
            self._capacity.remove(generation.job.tier)
            if not self._running:
                self._context.energy.read_soon(at_once=True)
        self._by_engine_id.pop(generation.engine_id, None)
        if generation.trace is not None:
            generation.trace.finish(generation)
        self._intake.remove(generation)

    def expire_late(self) -> None:
        """End requests that have passed their deadline."""
        now_ns = self._clock.now_ns()
        for generation in list(self._running.values()):
            if generation.job.is_past_deadline(now_ns):
                self._stop(generation, EXPIRED)

    async def release_unfinished(self, *, sends: bool = True) -> None:
        """Release the leases of unfinished requests for other workers.

        The tokens so far are sent first if ``sends``; pass False if the sender has failed. A lease
        that is not confirmed lapses instead.
        """
        unfinished = [*self._running.values(), *self._finalizer.generations()]
        for generation in list(self._running.values()):
            self._cancel_in_engine(generation)
            self._flusher.flush_now(generation)
            self._drop(generation)
        if sends:
            await self._flusher.published()
            await self._device_times.wait_all_reported(_DEVICE_TIMES_TIMEOUT_S)
        for generation in unfinished:
            self._finalizer.abandon(generation.request_id)
            is_ours = self.ownership.is_confirmed(generation)
            if is_ours:
                await self._context.bus.jobs.release(generation.lease.handle)
            self._completions.add(generation.request_id, generation.pop_served(), released=is_ours)
        await self._completions.flush()

    # --- shared ---

    def _find(self, request_id: str) -> Generation | None:
        return (
            self._running.get(request_id)
            or self._finalizer.get(request_id)
            or self._finished.get(request_id)
        )

    def held_leases(self) -> Iterator[str]:
        for generation in self.held():
            yield generation.lease.handle

    def held(self) -> Iterator[Generation]:
        """Yield the generations whose lease is kept."""
        yield from self._running.values()
        yield from self._finalizer.generations()

"""Executor of plans: launches them on the runner and processes their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from operator import attrgetter, itemgetter
from typing import NamedTuple

from millrace.engine.grammar.grammars import Grammars
from millrace.engine.scheduling.cost_model import CostModel, StepSpeed, StepWork
from millrace.engine.scheduling.planner import Planner
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.speculation.speculator import Pace, Speculator
from millrace.engine.speculation.verification import Verification, Verified
from millrace.engine.step.device_work import DeviceMeter, DeviceWork
from millrace.engine.step.fork_group import charged_together
from millrace.engine.step.output_processor import Chunk, OutputProcessor
from millrace.engine.step.runner import ChosenTokens, InFlightStep, Runner
from millrace.engine.step.sequence import UNREAD_TOKEN, Sequence, SequenceState
from millrace.engine.types import EngineOutput

_num_computed_tokens = attrgetter("num_computed_tokens")
_sequence = itemgetter(0)
_proposed = attrgetter("proposed")


class _PendingStep(NamedTuple):
    """Plan whose step is in flight.

    Attributes:
        weights: The share of each item of the plan in the step's time.
        places: Indices of the placeholders in the sequences of ``step.by_device``, which the tokens
            that the device chooses replace.
        chunks: Computed tokens without logits.
        awaited: Sequences that are not planned again before this step is read.
    """

    plan: list[ScheduledSequence]
    work: StepWork
    weights: list[float]
    begin_s: float
    step: InFlightStep
    places: list[int]
    chunks: list[Chunk]
    awaited: list[Sequence]


class Executor:
    """Executor of plans. An error of one sequence ends that sequence only.

    With several stages, the next step, of other sequences, is launched before a step is read. With
    ``overlap``, a step is read after the next one has been launched, unless the host has to choose
    tokens of it or its tokens are needed for proposals. At most one step is in flight between two
    calls.

    The duration of a call is charged to the sequences of the step in flight; if there are two
    steps, to the sequences of the earlier one. So all time that the device is busy is charged to
    requests.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        planner: Planner,
        grammars: Grammars,
        output_processor: OutputProcessor,
        costs: CostModel,
        device_work: DeviceWork,
        overlap: bool,
        monotonic: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._planner = planner
        self._grammars = grammars
        self._output_processor = output_processor
        self._verification = Verification(planner, output_processor, grammars)
        self._costs = costs
        self._device_work = device_work
        self.meter = DeviceMeter()
        self.speed = StepSpeed(costs)
        self._overlap = overlap
        self._monotonic = monotonic
        self._pace = Pace()
        self._unread: _PendingStep | None = None
        self._processed_s = 0.0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.proposed_tokens = 0
        self.accepted_tokens = 0

    @property
    def has_pending_step(self) -> bool:
        """True if a step is in flight whose outputs have not been returned."""
        return self._unread is not None

    def execute(
        self,
        plan: list[ScheduledSequence],
        outputs: list[EngineOutput],
        speculator: Speculator | None = None,
    ) -> None:
        """Launch a plan, and process the step before it.

        The launched step is processed, too, unless it may be read later. An empty plan only
        processes the step in flight. ``speculator`` proposes tokens for the plan if no step is in
        flight. When the model fails on a plan, the plan is bisected down to the failing sequences.
        """
        begin_s = self._monotonic()
        before, self._unread = self._unread, None
        if before is None:
            self.meter.start(begin_s)
        if speculator is not None and plan and before is None:
            speculator.propose(plan)
            self._pace.note(proposed=any(map(_proposed, map(_sequence, plan))))
            begin_s = self._monotonic()
        pending = self._launch(plan, begin_s) if plan else None
        charged = before
        if isinstance(pending, Exception):
            if before is not None:
                self._process(before, outputs)
                self._charge(before)
            else:
                self.meter.charge(plan, self._device_work.of(plan), self._monotonic())
            self._bisect(plan, pending, outputs)
        elif before is None or self._process(before, outputs, behind=pending):
            if pending is not None and self._may_overlap(pending, speculator):
                self._unread = pending
                charged = before or pending
            elif pending is not None:
                if before is not None:
                    self.meter.charge(before.plan, before.weights, self._processed_s)
                self._process(pending, outputs)
                charged = pending
        self._processed_s = self._monotonic()
        if charged is not None:
            self.meter.charge(charged.plan, charged.weights, self._processed_s)
        else:
            self.meter.charge(plan, self._device_work.of(plan), self._processed_s)

    def _may_overlap(self, pending: _PendingStep, speculator: Speculator | None) -> bool:
        """Return whether a step may be read after the launch of the next one."""
        if self._runner.num_stages > 1:
            return True
        if not self._overlap or pending.step.needs_host:
            return False
        return speculator is None or not self._pace.waits()

    def _charge(self, pending: _PendingStep) -> None:
        self.meter.charge(pending.plan, pending.weights, self._monotonic())

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Return whether the step in flight computes tokens of the sequence or of its fork
        group."""
        if self._unread is None:
            return False
        in_flight = set(map(_sequence, self._unread.plan))
        return not in_flight.isdisjoint(charged_together(sequence))

    def exempt_ended(self, ended: Collection[Sequence]) -> bool:
        """Charge the step in flight only to sequences that have not ended.

        Returns False, and changes no weights, if all of its sequences have ended.
        """
        pending = self._unread
        if pending is None:
            return True
        weights = [
            0.0 if item.sequence in ended else weight
            for item, weight in zip(pending.plan, pending.weights, strict=True)
        ]
        if not any(weights):
            return False
        pending.weights[:] = weights
        return True

    def _launch(self, plan: list[ScheduledSequence], begin_s: float) -> _PendingStep | Exception:
        """Launch a plan on the runner; return the error if that fails."""
        work = StepWork.of(plan)
        if work.prefill_tokens:
            weights = self._device_work.of(plan)
        else:
            weights = self._device_work.of_decodes(list(map(_sequence, plan)))
        try:
            self._grammars.start_masks(plan)
            step = self._runner.launch(plan)
        except Exception as error:  # noqa: BLE001 (any error ends one sequence only)
            return error
        self._planner.advance(plan)
        chunks = _chunks(plan) if work.prefill_tokens else []
        places = list(map(_num_computed_tokens, step.by_device))
        awaited: list[Sequence] = []
        if self._runner.num_stages > 1:
            awaited = [s for s, _ in plan if s.num_computed_tokens == len(s.token_ids)]
            for sequence in awaited:
                sequence.is_awaited = True
        for sequence in step.by_device:
            sequence.token_ids.append(UNREAD_TOKEN)
        return _PendingStep(plan, work, weights, begin_s, step, places, chunks, awaited)

    def _process(
        self, pending: _PendingStep, outputs: list[EngineOutput], behind: _PendingStep | None = None
    ) -> bool:
        """Read a step and apply its results to the sequences.

        Returns False if reading failed and the plan was run again in parts. Then the step launched
        ``behind`` it is undone, since it may depend on lost tokens; its sequences are planned
        again.
        """
        step, output_processor = pending.step, self._output_processor
        for sequence in pending.awaited:
            sequence.is_awaited = False
        chosen = _read(step)
        if isinstance(chosen, Exception):
            if behind is not None:
                self._undo(behind)
            self._undo(pending)
            self._charge(pending)
            self._bisect(pending.plan, chosen, outputs)
            return False
        if chosen.finite is None:
            output_processor.cache_finite_chunks(pending.chunks, outputs)
        else:
            if not all(chosen.finite):
                output_processor.fail_where_not_finite(pending.plan, chosen.finite, outputs)
            output_processor.cache_chunks(pending.chunks)
        output_processor.add_pooled(step.pooled, outputs)
        output_processor.add_scores(step.scored, outputs)
        output_processor.accept_device_tokens(step.by_device, pending.places, chosen, outputs)
        verified = self._verification.apply(step, outputs) if step.by_host else Verified()
        now_s = self._monotonic()
        step_s = now_s - max(pending.begin_s, self._processed_s)
        self._costs.observe(pending.work, step_s)
        num_decoding = pending.work.decodes - verified.num_proposed
        num_decoded = num_decoding + verified.num_accepted
        self.speed.observe(pending.work, step_s, num_decoded / max(num_decoding, 1))
        self._processed_s = now_s
        self.prefill_tokens += pending.work.prefill_tokens
        self.decode_tokens += num_decoded
        self.proposed_tokens += verified.num_proposed
        self.accepted_tokens += verified.num_accepted
        return True

    def _undo(self, pending: _PendingStep) -> None:
        """Restore the sequences to their state before the launch. Undo the latest step first."""
        for sequence in pending.awaited:
            sequence.is_awaited = False
        self._planner.retract(pending.plan)
        for sequence in pending.step.by_device:
            if sequence.state is not SequenceState.FINISHED:
                sequence.token_ids.pop()

    def _bisect(
        self, plan: list[ScheduledSequence], error: Exception, outputs: list[EngineOutput]
    ) -> None:
        """Find the sequences that a plan fails on. No step may be in flight."""
        self._verification.drop(plan)
        if len(plan) > 1:
            middle = len(plan) // 2
            self._run(plan[:middle], outputs)
            self._run(plan[middle:], outputs)
        elif plan[0].sequence.state is SequenceState.RUNNING:
            self._output_processor.live.fail(plan[0].sequence, error, outputs)

    def _run(self, plan: list[ScheduledSequence], outputs: list[EngineOutput]) -> None:
        """Launch and process the running sequences of a plan. No step may be in flight."""
        left = [item for item in plan if item.sequence.state is SequenceState.RUNNING]
        if not left:
            return
        pending = self._launch(left, self._monotonic())
        if isinstance(pending, Exception):
            self.meter.charge(left, self._device_work.of(left), self._monotonic())
            self._bisect(left, pending, outputs)
        else:
            self._process(pending, outputs)
            self._charge(pending)

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Raise AssertionError unless placeholders match the step in flight.

        A sequence has a placeholder, at its end only, if its token is unread or if it is a held
        fork.
        """
        unread: set[Sequence] = set()
        if self._unread is not None:
            for sequence, place in zip(
                self._unread.step.by_device, self._unread.places, strict=True
            ):
                if sequence.state is not SequenceState.FINISHED:
                    assert sequence.state is SequenceState.RUNNING, (
                        "a sequence left before its token was read"
                    )
                    assert (
                        sequence.token_ids.index(UNREAD_TOKEN) == place == sequence.num_tokens - 1
                    )
                    unread.add(sequence)
        for sequence in live:
            has_any = UNREAD_TOKEN in sequence.token_ids
            assert has_any == (sequence in unread or sequence.is_held), (
                "a placeholder has no step in flight"
            )


def _read(step: InFlightStep) -> ChosenTokens | Exception:
    """Return the tokens that the device chose; the error if reading them fails."""
    try:
        return step.read()
    except Exception as error:  # noqa: BLE001 (any error ends one sequence only)
        return error


def _chunks(plan: list[ScheduledSequence]) -> list[Chunk]:
    """Return the chunks of a computed plan: all items but decodes.

    Not all of their tokens have logits.
    """
    chunks: list[Chunk] = []
    for sequence, num_tokens in plan:
        end = sequence.num_computed_tokens
        if num_tokens > 1 or end < len(sequence.token_ids):
            chunks.append(Chunk(sequence, end - num_tokens, end))
    return chunks

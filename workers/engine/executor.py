"""Launching plans, and reading what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from operator import attrgetter, itemgetter
from typing import NamedTuple

from workers.engine.device.meter import DeviceMeter
from workers.engine.device.work import DeviceWork
from workers.engine.grammar.grammars import Grammars
from workers.engine.in_flight_step import ChosenTokens, LaunchedStep
from workers.engine.output_processor import Chunk, Receiver
from workers.engine.runners import Runner
from workers.engine.scheduling.cost_model import CostModel, StepWork
from workers.engine.scheduling.planner import Planner
from workers.engine.scheduling.schedule import ScheduledSequence
from workers.engine.scheduling.step_speed import StepSpeed
from workers.engine.sequence import UNREAD_TOKEN, Sequence, SequenceState
from workers.engine.types import EngineOutput

_num_computed_tokens = attrgetter("num_computed_tokens")
_sequence = itemgetter(0)


class _Flight(NamedTuple):
    """A plan under way. The tokens that the device chooses for ``step.by_device`` come to
    ``places`` in their sequences, where placeholders are until then. ``chunks`` are computed tokens
    that their logits say nothing about; ``weights`` are the shares of the items of the plan in the
    time that it takes."""

    plan: list[ScheduledSequence]
    work: StepWork
    weights: list[float]
    begin_s: float
    step: LaunchedStep
    places: list[int]
    chunks: list[Chunk]


class Executor:
    """Does what was planned. What goes wrong with one sequence ends that sequence only.

    With ``overlap`` a step is read after the next one has been launched, unless the host has to
    choose something of it; so at most one step is unread between two calls.

    The time that a call takes is charged to the sequences of the step that is under way, and while
    two are, to those of the earlier one: so each moment that the device is busy is somebody's.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        planner: Planner,
        grammars: Grammars,
        receiver: Receiver,
        costs: CostModel,
        device_work: DeviceWork,
        overlap: bool,
        monotonic: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._planner = planner
        self._grammars = grammars
        self._receiver = receiver
        self._costs = costs
        self._device_work = device_work
        self.meter = DeviceMeter()
        self.speed = StepSpeed(costs)
        self._overlap = overlap
        self._monotonic = monotonic
        self._unread: _Flight | None = None
        self._taken_s = 0.0
        self.prefill_tokens = 0
        self.decode_tokens = 0

    @property
    def has_unread(self) -> bool:
        """Whether a step is under way of which nothing has been handed over."""
        return self._unread is not None

    def execute(self, plan: list[ScheduledSequence], outputs: list[EngineOutput]) -> None:
        """Launch a plan, then take what came of the one before, and of this one too unless it may
        be read later. [] only takes what is unread.

        When the model fails on a plan, it is halved until those at fault stand alone.
        """
        begin_s = self._monotonic()
        before, self._unread = self._unread, None
        if before is None:
            self.meter.begin(begin_s)
        flight = self._launch(plan, begin_s) if plan else None
        charged = before
        if isinstance(flight, Exception):
            if before is not None:
                self._take(before, outputs)
                self._charge(before)
            else:
                self.meter.charge(plan, self._device_work.of(plan), self._monotonic())
            self._halve(plan, flight, outputs)
        elif before is None or self._take(before, outputs, behind=flight):
            if self._overlap and flight is not None and not flight.step.needs_host:
                self._unread = flight
                charged = before or flight
            elif flight is not None:
                if before is not None:
                    self.meter.charge(before.plan, before.weights, self._taken_s)
                self._take(flight, outputs)
                charged = flight
        self._taken_s = self._monotonic()
        if charged is not None:
            self.meter.charge(charged.plan, charged.weights, self._taken_s)
        else:
            self.meter.charge(plan, self._device_work.of(plan), self._taken_s)

    def _charge(self, flight: _Flight) -> None:
        self.meter.charge(flight.plan, flight.weights, self._monotonic())

    def is_flying(self, sequence: Sequence) -> bool:
        """Whether a step that it has a part in is under way."""
        return self._unread is not None and sequence in map(_sequence, self._unread.plan)

    def discharge(self, ended: Collection[Sequence]) -> bool:
        """Charge the others alone for the step under way, as these have ended; False if there are
        no others."""
        flight = self._unread
        if flight is None:
            return True
        weights = [
            0.0 if item.sequence in ended else weight
            for item, weight in zip(flight.plan, flight.weights, strict=True)
        ]
        if not any(weights):
            return False
        flight.weights[:] = weights
        return True

    def _launch(self, plan: list[ScheduledSequence], begin_s: float) -> _Flight | Exception:
        """Give a plan to the runner; what it fails with if it does."""
        work = StepWork.of(plan)
        if work.prefill_tokens:
            weights = self._device_work.of(plan)
        else:
            weights = self._device_work.of_decodes(list(map(_sequence, plan)))
        try:
            self._grammars.begin_masks(plan)
            step = self._runner.launch(plan)
        except Exception as error:  # noqa: BLE001 (whatever it is, it ends one sequence only)
            return error
        self._planner.advance(plan)
        chunks = _chunks(plan) if work.prefill_tokens else []
        places = list(map(_num_computed_tokens, step.by_device))
        for sequence in step.by_device:
            sequence.token_ids.append(UNREAD_TOKEN)
        return _Flight(plan, work, weights, begin_s, step, places, chunks)

    def _take(
        self, flight: _Flight, outputs: list[EngineOutput], behind: _Flight | None = None
    ) -> bool:
        """Read a flight and take what came of it to the sequences.

        False if that failed, and it was flown again in parts. Then the one launched ``behind`` it
        is undone, since it may have gone on from what is lost; its sequences are planned again.
        """
        step, receiver = flight.step, self._receiver
        chosen = _read(step)
        if isinstance(chosen, Exception):
            if behind is not None:
                self._undo(behind)
            self._undo(flight)
            self._charge(flight)
            self._halve(flight.plan, chosen, outputs)
            return False
        if chosen.finite is None:
            receiver.look_and_seal(flight.chunks, outputs)
        else:
            if not all(chosen.finite):
                receiver.end_not_finite(flight.plan, chosen.finite, outputs)
            receiver.seal(flight.chunks)
        receiver.pool_states(step.pooled, outputs)
        receiver.add_scores(step.scored, outputs)
        receiver.take_chosen(step.by_device, flight.places, chosen, outputs)
        receiver.sample(step, outputs)
        now_s = self._monotonic()
        step_s = now_s - max(flight.begin_s, self._taken_s)
        self._costs.observe(flight.work, step_s)
        self.speed.observe(flight.work, step_s)
        self._taken_s = now_s
        self.prefill_tokens += flight.work.prefill_tokens
        self.decode_tokens += flight.work.decodes
        return True

    def _undo(self, flight: _Flight) -> None:
        """Leave the sequences as if a flight had never begun; the last one first."""
        self._planner.retract(flight.plan)
        for sequence in flight.step.by_device:
            if sequence.state is not SequenceState.FINISHED:
                sequence.token_ids.pop()

    def _halve(
        self, plan: list[ScheduledSequence], error: Exception, outputs: list[EngineOutput]
    ) -> None:
        """Find out whom a plan failed on; nothing is in flight."""
        if len(plan) > 1:
            middle = len(plan) // 2
            self._fly(plan[:middle], outputs)
            self._fly(plan[middle:], outputs)
        elif plan[0].sequence.state is SequenceState.RUNNING:
            self._receiver.blame(plan[0].sequence, error, outputs)

    def _fly(self, plan: list[ScheduledSequence], outputs: list[EngineOutput]) -> None:
        """Launch and take what is left of a plan; nothing is in flight."""
        left = [item for item in plan if item.sequence.state is SequenceState.RUNNING]
        if not left:
            return
        flight = self._launch(left, self._monotonic())
        if isinstance(flight, Exception):
            self.meter.charge(left, self._device_work.of(left), self._monotonic())
            self._halve(left, flight, outputs)
        else:
            self._take(flight, outputs)
            self._charge(flight)

    def check_integrity(self, live: Iterable[Sequence]) -> None:
        """Raise AssertionError unless those of the ``live`` sequences have a placeholder, and only
        one at their end, whose token is unread."""
        unread: set[Sequence] = set()
        if self._unread is not None:
            for sequence, place in zip(
                self._unread.step.by_device, self._unread.places, strict=True
            ):
                if sequence.state is not SequenceState.FINISHED:
                    assert sequence.state is SequenceState.RUNNING, "it left before it was read"
                    assert (
                        sequence.token_ids.index(UNREAD_TOKEN) == place == sequence.num_tokens - 1
                    )
                    unread.add(sequence)
        for sequence in live:
            has_any = UNREAD_TOKEN in sequence.token_ids
            assert has_any == (sequence in unread), "a placeholder is without its step"


def _read(step: LaunchedStep) -> ChosenTokens | Exception:
    """What the device chose; what reading it fails with if it does."""
    try:
        return step.read()
    except Exception as error:  # noqa: BLE001 (whatever it is, it ends one sequence only)
        return error


def _chunks(plan: list[ScheduledSequence]) -> list[Chunk]:
    """What a plan that has been computed says nothing about in logits: all of it but tokens that
    decode."""
    chunks: list[Chunk] = []
    for sequence, num_tokens in plan:
        end = sequence.num_computed_tokens
        if num_tokens > 1 or end < len(sequence.token_ids):
            chunks.append(Chunk(sequence, end - num_tokens, end))
    return chunks

"""Overlapping steps one by one: the order of launches, and tokens that are read later."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.engine.scheduling.cost_model import StepWork
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.engine import Engine
from millrace.engine.step.runner import InFlightStep
from millrace.engine.step.sequence import UNREAD_TOKEN, SequenceState
from millrace.engine.types import EngineRequest
from tests.engine.devices.cuda.device_double import DeviceRunner, Fault
from tests.engine.support import (
    drain,
    last_by_request,
    prompt,
    request,
    resolved,
    tokens_by_request,
)

PROMPT = prompt(1, 20, 190)


def make_engine(
    runner: DeviceRunner | None = None, *, overlap: bool = True, **config: Any
) -> tuple[Engine, DeviceRunner]:
    runner = DeviceRunner(num_blocks=64) if runner is None else runner
    settings = resolved(device="cpu", overlap=overlap, **config)
    return Engine(runner, settings), runner  # type: ignore[arg-type]


def without_overlap(*requests: EngineRequest) -> dict[str, list[int]]:
    engine, _ = make_engine(overlap=False)
    for item in requests:
        engine.add(item)
    return tokens_by_request(drain(engine))


def test_tokens_come_one_step_later_and_the_last_ones_without_a_launch() -> None:
    wanted = without_overlap(request("r", PROMPT, max_tokens=3))["r"]
    engine, runner = make_engine()
    engine.add(request("r", PROMPT, max_tokens=3))
    steps = []
    while engine.has_work:
        steps.append([(o.token_ids, o.started, o.finished) for o in engine.step()])
        engine.check_integrity()
    first, second, third = wanted
    assert steps == [
        [((), True, False)],
        [((first,), False, False)],
        [((second,), False, False)],
        [((third,), False, True)],
    ]
    stats = engine.stats()
    assert (stats.num_steps, stats.prefill_tokens, stats.decode_tokens) == (3, 20, 2)
    assert runner.num_computed_tokens == 22
    assert runner.num_unread_at_launch == 2
    assert not runner.broken


def test_overlap_can_be_turned_off() -> None:
    engine, runner = make_engine(overlap=False)
    engine.add(request("r", PROMPT, max_tokens=3))
    assert [len(engine.step()[0].token_ids) for _ in range(3)] == [1, 1, 1]
    assert not engine.has_work
    assert runner.num_unread_at_launch == 0


def test_a_step_of_which_the_host_chooses_is_read_at_once() -> None:
    engine, runner = make_engine()
    engine.add(request("device", PROMPT, max_tokens=9))
    engine.step()
    engine.add(request("host", prompt(2, 5, 190), max_tokens=2, repetition_penalty=1.5))
    # The launch with the newcomer comes before the first token is read, then both are.
    outputs = engine.step()
    tokens = tokens_by_request(outputs)
    assert {name: len(ids) for name, ids in tokens.items()} == {"device": 2, "host": 1}
    assert runner.num_unread_at_launch == 1
    assert {len(ids) for ids in tokens_by_request(engine.step()).values()} == {1}
    assert runner.num_unread_at_launch == 1
    assert engine.step() == []  # nothing was unread, and now something is
    engine.check_integrity()


def place_of_new_token(tokens: list[int]) -> int:
    """Return the first place from 12 on with a token that has not come before."""
    return next(i for i in range(12, len(tokens)) if tokens[i] not in tokens[:i])


def test_a_stop_token_is_found_a_step_late_and_what_comes_behind_is_dropped() -> None:
    wanted = without_overlap(request("r", PROMPT, max_tokens=30))["r"]
    place = place_of_new_token(wanted)
    engine, runner = make_engine()
    for name in ("cold", "warm"):
        engine.add(request(name, PROMPT, max_tokens=30, stop_token_ids=(wanted[place],)))
        outputs = drain(engine)
        assert tokens_by_request(outputs) == {name: wanted[: place + 1]}
        assert last_by_request(outputs)[name].finish_reason == "stop"
        assert engine.stats().num_free_blocks == 64
    # The prompt, of which a block is there the second time, the tokens, and one too many.
    assert runner.num_computed_tokens == 20 + 4 + 2 * (place + 1)
    assert engine.stats().num_idle_blocks == (20 + place) // 16


@pytest.mark.parametrize("again", [False, True])
def test_cancelled_with_a_token_unread(again: bool) -> None:
    engine, runner = make_engine()
    engine.add(request("r", PROMPT, max_tokens=30))
    for _ in range(4):
        engine.step()
    engine.cancel("r")
    engine.check_integrity()
    assert engine.stats().num_free_blocks == 64
    assert engine.has_work, "the step has to be read"
    if again:
        other = request("r", prompt(3, 40, 190), max_tokens=5)
        engine.add(other)
        assert tokens_by_request(drain(engine)) == without_overlap(other)
    else:
        assert engine.step() == []
        assert not engine.has_work
    assert not runner.broken


def test_a_preempted_sequence_waits_until_its_token_is_read() -> None:
    engine, runner = make_engine(DeviceRunner(num_blocks=4), max_num_sequences=1)
    low = request("low", PROMPT, max_tokens=10, priority=0)
    high = request("high", prompt(2, 20, 190), max_tokens=10, priority=5)
    engine.add(low)
    for _ in range(3):
        engine.step()
    (sequence,) = engine._planner.running
    assert engine._planner.running[0].has_unread_token
    seen = []
    plan = engine._planner.plan

    def planned() -> list[ScheduledSequence]:
        made = plan()
        seen.append((sequence.state, sequence.has_unread_token, engine._planner.num_unready))
        return made

    engine._planner.plan = planned  # type: ignore[method-assign]
    engine.add(high)
    outputs = engine.step()
    assert seen == [(SequenceState.WAITING, True, 1)]
    assert len(tokens_by_request(outputs)["low"]) == 1
    assert not sequence.has_unread_token
    engine.check_integrity()
    tokens = tokens_by_request(drain(engine))
    assert tokens["high"] == without_overlap(high)["high"]
    assert tokens["low"] == without_overlap(low)["low"][3:]
    assert not runner.broken


def test_blocks_of_an_ending_sequence_are_waited_for() -> None:
    """The step that lacks blocks knows from its plan that another sequence ends with the step
    before."""
    grows = request("grows", prompt(1, 30, 190), max_tokens=25)
    ends = request("ends", prompt(2, 40, 190), max_tokens=19)
    engine, _ = make_engine(DeviceRunner(num_blocks=7), max_num_sequences=2, prefix_cache=False)
    engine.add(grows)
    engine.add(ends)
    tokens: dict[str, int] = {"grows": 0, "ends": 0}
    counts = []
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += len(output.token_ids)
        counts.append((tokens["grows"], tokens["ends"]))
        engine.check_integrity()
    # Both run abreast; then there is nothing to launch beside the last read, and one goes on.
    assert counts[18:22] == [(18, 18), (19, 19), (19, 19), (20, 19)]
    assert counts[-1] == (25, 19)
    assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize("on_read", [False, True])
def test_failure_ends_the_request_at_fault_and_no_other_loses_a_token(on_read: bool) -> None:
    items = [request(f"r{i}", prompt(i, 20, 190), max_tokens=12) for i in range(5)]
    wanted = without_overlap(*items)
    faults = {items[3].prompt_token_ids: Fault(0, 25, on_read)}
    engine, runner = make_engine(DeviceRunner(num_blocks=64, faults=faults))
    for item in items:
        engine.add(item)
    outputs = drain(engine)
    assert tokens_by_request(outputs) == wanted | {"r3": wanted["r3"][:6]}
    error = last_by_request(outputs)["r3"].error
    assert error is not None
    assert error[0] == "internal_error"
    assert not runner.broken
    assert engine.stats().num_free_blocks == 64


def test_failure_of_a_dropped_token_ends_no_request() -> None:
    """The step after a stop token fails; the sequence is over when the failure is known."""
    wanted = without_overlap(request("r", PROMPT, max_tokens=30))["r"]
    place = place_of_new_token(wanted)
    for on_read in (False, True):
        faults = {tuple(PROMPT): Fault(0, 20 + place, on_read)}
        engine, runner = make_engine(DeviceRunner(num_blocks=64, faults=faults))
        engine.add(request("r", PROMPT, max_tokens=30, stop_token_ids=(wanted[place],)))
        outputs = drain(engine)
        assert tokens_by_request(outputs) == {"r": wanted[: place + 1]}
        assert last_by_request(outputs)["r"].finish_reason == "stop"
        assert runner.num_failures == 1


def test_integrity_knows_placeholders() -> None:
    engine, _ = make_engine()
    engine.add(request("r", PROMPT, max_tokens=30))
    engine.step()
    (sequence,) = engine._planner.running
    sequence.token_ids[-1] = 5
    with pytest.raises((AssertionError, ValueError)):
        engine.check_integrity()
    sequence.token_ids[-1] = UNREAD_TOKEN
    engine.check_integrity()
    sequence.token_ids[3] = UNREAD_TOKEN
    with pytest.raises(AssertionError):
        engine.check_integrity()


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class _TimedRunner(DeviceRunner):
    """Runner with a launch of 1 ms on the host and a step of 10 ms on the device."""

    def __init__(self, clock: _Clock) -> None:
        super().__init__(num_blocks=64)
        self._clock = clock
        self._idle_from_s = 0.0

    def launch(self, plan: list[ScheduledSequence]) -> InFlightStep:
        step = super().launch(plan)
        self._clock.now_s += 0.001
        self._idle_from_s = ready_s = max(self._idle_from_s, self._clock.now_s) + 0.010

        def read() -> Any:
            self._clock.now_s = max(self._clock.now_s, ready_s)
            return step.read()

        return step._replace(read=read)


def test_a_step_takes_from_one_read_to_the_next() -> None:
    clock = _Clock()
    runner = _TimedRunner(clock)
    engine = Engine(runner, resolved(device="cpu"), monotonic=clock)  # type: ignore[arg-type]
    engine.add(request("r", PROMPT, max_tokens=101))
    while engine.has_work:
        engine.step()
        clock.now_s += 0.002  # the stepping thread has other work
    # The first step is launched, then each takes as long as the device does.
    took_s = 0.001 + 101 * 0.010
    assert clock.now_s == pytest.approx(took_s + 0.002)
    assert engine.stats().busy_s == pytest.approx(took_s)
    work = StepWork(decodes=1, context_tokens=80)
    assert engine._executor._costs.step_s(work) == pytest.approx(0.010, rel=0.01)

"""Loads for engines whose steps may overlap, and their outputs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from hypothesis import strategies as st

from millrace.engine.step.engine import Engine
from millrace.engine.step.sequence import Sequence
from millrace.engine.types import EngineOutput, EngineRequest
from millrace.schemas.pooling import Pooling
from tests.engine.devices.cuda.device_double import POISON, DeviceRunner, Fault
from tests.engine.support import SteppingClock, drawn_settings, prompt, request, resolved

MAX_STEPS = 3_000
_BLOCK_BYTES = 16 * 2 * 4

# Kinds of sampling; kinds for the host stand between kinds for the device.
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "top_k": 40},
    "reported": {"temperature": 0.7, "logprobs": 1},
    "penalised": {"repetition_penalty": 1.3, "temperature": 0.8},
    "biased": {"logit_bias": {7: 1.0}, "min_tokens": 1},
    "scored": {"prompt_logprobs": 1},
    "choices": {"n": 3, "temperature": 1.0},
    "greedy choices": {"n": 2},
    "beams": {"use_beam_search": True, "n": 3},
}


class Arrival(NamedTuple):
    """A request: ``shared_tokens`` of one of three common beginnings, then tokens of its own.

    ``gap`` steps before the next one. It is cancelled after so many steps, if at all; or takes the
    place and the id of the one before. ``fault``: (choice, tokens behind the last one of the
    prompt, on reading), where the model fails on it.
    """

    family: int
    shared_tokens: int
    own_tokens: int
    max_tokens: int
    priority: int
    kind: str
    seed: int
    num_stops: int
    poisoned: bool
    gap: int
    cancel_after: int | None
    takes_place: bool
    fault: tuple[int, int, bool] | None

    def prompt(self, number: int) -> list[int]:
        token_ids = [*prompt(self.family, self.shared_tokens, POISON), 1 + number]
        token_ids += [POISON] if self.poisoned else []
        return token_ids + prompt(self.seed, self.own_tokens, POISON)

    def fault_of(self, number: int) -> Fault | None:
        if self.fault is None or self.poisoned or self.kind == "beams":
            return None  # which beam is computed where depends on who is preempted
        choice, behind, on_read = self.fault
        # The prompt's last token is computed for choice 0, and for others once they are preempted.
        behind = max(behind, min(choice, 1))
        return Fault(choice, len(self.prompt(number)) - 1 + behind, on_read)

    def request(self, number: int, name: str) -> EngineRequest:
        token_ids = self.prompt(number)
        if self.kind.startswith("pooled"):
            pooling = Pooling.MEAN if self.kind == "pooled mean" else Pooling.LAST
            return EngineRequest(
                request_id=name, prompt_token_ids=tuple(token_ids), pooling=pooling
            )
        options = {"max_tokens": self.max_tokens, "seed": self.seed} | _KINDS[self.kind]
        stops = tuple(prompt(number, self.num_stops, POISON))
        return request(name, token_ids, priority=self.priority, stop_token_ids=stops, **options)


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        family=st.integers(1, 3),
        shared_tokens=st.sampled_from([0, 15, 16, 33, 48, 70]),
        own_tokens=st.integers(0, 30),
        max_tokens=st.integers(1, 40),
        priority=st.integers(-1, 2),
        kind=st.sampled_from(
            ["greedy", "drawn", "reported"] * 4 + [*_KINDS, "pooled mean", "pooled last"]
        ),
        seed=st.integers(0, 5),
        num_stops=st.sampled_from([0, 0, 2, 8, 40]),
        poisoned=st.sampled_from([False] * 9 + [True]),
        gap=st.integers(0, 6),
        cancel_after=st.none() | st.none() | st.none() | st.integers(0, 15),
        takes_place=st.sampled_from([False] * 7 + [True]),
        fault=st.none()
        | st.none()
        | st.tuples(st.integers(0, 2), st.integers(0, 12), st.booleans()),
    ),
    min_size=1,
    max_size=10,
)
CONFIGS = drawn_settings(_BLOCK_BYTES)


class ChoiceOutputs(NamedTuple):
    """Outputs of one choice of a request."""

    token_ids: list[int]
    outputs: list[EngineOutput]

    @property
    def ending(self) -> tuple[Any, ...]:
        """Finish reason, error, embedding and prompt logprobs of the choice, or () while it
        runs."""
        last = self.outputs[-1]
        if not last.finished:
            return ()
        prompt_logprobs = [o.prompt_logprobs for o in self.outputs if o.prompt_logprobs]
        return (last.finish_reason, last.error, last.embedding, prompt_logprobs)

    @property
    def logprob_tokens(self) -> list[int]:
        return [entry.token_id for output in self.outputs for entry in output.logprobs]


class World:
    """Engine on the device double under a load, checked at every step."""

    def __init__(
        self, arrivals: list[Arrival], runner_options: dict[str, Any], **config: Any
    ) -> None:
        faults = {
            tuple(arrival.prompt(number)): fault
            for number, arrival in enumerate(arrivals)
            if (fault := arrival.fault_of(number)) is not None
        }
        self.runner = DeviceRunner(faults=faults, not_finite_every=211, **runner_options)
        self.engine = Engine(
            self.runner,  # type: ignore[arg-type]
            resolved(device="cpu", **config),
            monotonic=SteppingClock(),
        )
        memory = self.engine._host_memory
        for name in ("store", "load"):
            setattr(memory, name, self.runner.after_all(getattr(memory, name)))
        self._arrivals = arrivals
        self._asker: dict[str, int] = {}
        self.told: defaultdict[tuple[int, int], ChoiceOutputs] = defaultdict(
            lambda: ChoiceOutputs([], [])
        )
        self.num_steps = 0
        self.num_preempted_unread = 0
        preempt = self.engine._planner._preempt

        def counted(sequence: Sequence, schedule: Any) -> None:
            self.num_preempted_unread += sequence.has_unread_token
            preempt(sequence, schedule)

        self.engine._planner._preempt = counted  # type: ignore[method-assign]

    def step(self) -> None:
        self.num_steps += 1
        assert self.num_steps < MAX_STEPS, "somebody never ends"
        for output in self.engine.step():
            assert output.request_id in self._asker, "an output of a cancelled request"
            told = self.told[self._asker[output.request_id], output.choice]
            assert not told.outputs or not told.outputs[-1].finished, "an output after the last"
            # A request that is refused before it is in the batch never starts.
            refused = not told.outputs and output.error is not None and not output.started
            starts = not told.outputs and not refused
            assert output.started == starts, "it starts with its first output, once"
            assert all(token >= 0 for token in output.token_ids), "a placeholder was handed over"
            told.outputs.append(output)
            told.token_ids.extend(output.token_ids)
        self.engine.check_integrity()
        assert not self.runner.broken, self.runner.broken

    def run(self, *, disturbed: bool) -> None:
        """Serve all requests; if ``disturbed``, with the cancellations and second requests."""
        due: list[tuple[int, str]] = []
        last = ""
        for number, arrival in enumerate(self._arrivals):
            name = last if disturbed and arrival.takes_place and last else f"r{number}"
            last = name
            self._asker[name] = number
            self.engine.add(arrival.request(number, name))
            self.engine.check_integrity()
            if disturbed and arrival.cancel_after is not None:
                due.append((self.num_steps + 1 + arrival.cancel_after, name))
            for _ in range(arrival.gap):
                self._tick(due)
        while self.engine.has_work:
            self._tick(due)
        self._check_baseline()

    def _tick(self, due: list[tuple[int, str]]) -> None:
        self.step()
        for when, name in due:
            if when == self.num_steps:
                self.engine.cancel(name)
                self._asker.pop(name, None)
                self.engine.check_integrity()

    def _check_baseline(self) -> None:
        stats = self.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.outstanding_tokens == 0
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert not self.runner._unread or self.runner._failed, "a step was never read"

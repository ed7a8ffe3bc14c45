"""Outcome of each request of a trace, as its client saw it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from millrace.bus.running_requests import JobClaim, RunningRequest
from millrace.runtime.clock import Clock
from millrace.schemas.records import Status
from millrace.simulation.traces.trace import TraceRequest

NEVER_S = -1.0
# Listener of all requests.
REPLY = "simulation"


@dataclass(slots=True, eq=False)
class RequestOutcome:
    """Outcome of a request.

    Times are virtual seconds from the trace's 0, ``NEVER_S`` for events that did not happen: sent
    to the queue, taken by a worker, started in its batch, first token, end.

    ``num_had`` is the number of tokens when the last run stopped. ``num_made`` returns the number
    including the present run. ``num_terminals`` counts terminal frames and must be 1.
    ``predicted_ttft_ms`` is the scheduler's last prediction before the request was sent.
    ``last_token_s`` is when the last stopped run made its last token, on the loop's clock (None: no
    token).
    """

    request: TraceRequest
    request_id: str
    first_answer_token: int
    sent_s: float = NEVER_S
    taken_s: float = NEVER_S
    started_s: float = NEVER_S
    first_s: float = NEVER_S
    end_s: float = NEVER_S
    status: Status | None = None
    error_code: str = ""
    num_cached_tokens: int = 0
    num_had: int = 0
    num_made: Callable[[], int] | None = field(default=None, repr=False)
    num_terminals: int = 0
    num_runs: int = 0
    worker_id: str = ""
    epoch: int = 0
    predicted_ttft_ms: float | None = None
    last_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the client has now."""
        made = self.num_made() if self.num_made is not None else 0
        return max(self.num_had, made)

    @property
    def token_ids(self) -> tuple[int, ...]:
        first = self.first_answer_token
        return tuple(range(first, first + self.num_tokens))

    def begin_run(self, worker_id: str, num_made: Callable[[], int], now_s: float) -> None:
        """Record that a worker has taken the request."""
        self.worker_id, self.num_made = worker_id, num_made
        self.num_runs += 1
        if self.taken_s == NEVER_S:
            self.taken_s = now_s

    def stop_run(self, last_token_s: float | None) -> None:
        """Record that the present run makes no more tokens."""
        self.num_had, self.num_made = self.num_tokens, None
        self.last_token_s = last_token_s


class Outcomes:
    """Outcomes by request id, in the order of the trace, and ``inter_token`` of all of them.

    The trace's 0 is at ``start_s``.
    """

    def __init__(self, outcomes: Sequence[RequestOutcome], clock: Clock, start_s: float) -> None:
        self.inter_token = InterTokenLatencies()
        self._outcomes = {outcome.request_id: outcome for outcome in outcomes}
        self._clock = clock
        self._start_s = start_s

    def __iter__(self) -> Iterator[RequestOutcome]:
        return iter(self._outcomes.values())

    def __len__(self) -> int:
        return len(self._outcomes)

    def __getitem__(self, request_id: str) -> RequestOutcome:
        return self._outcomes[request_id]

    def now_s(self) -> float:
        """Return the time from the trace's 0, in seconds."""
        return self._clock.monotonic() - self._start_s


class SimulatedGenerationIndex:
    """Index of running requests over the outcomes. See ``scheduler.jobs.running_requests``."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes

    async def lookup(self, request_id: str) -> RunningRequest | None:
        outcome = self._outcomes[request_id]
        if not outcome.num_runs:
            return None
        return RunningRequest(
            worker_id=outcome.worker_id, epoch=outcome.epoch, finished=outcome.status is not None
        )

    async def note_cancels(self, tenant: str, request_ids: Sequence[str]) -> None:
        """Ignore cancels: the trace has no services."""

    async def was_cancelled(self, tenant: str, request_id: str) -> bool:  # noqa: ARG002
        return False

    async def has_ended(self, tenant: str, request_id: str) -> bool | None:  # noqa: ARG002
        """Return None: the trace asks for no stored results."""
        return None

    async def claim(
        self,
        request_id: str,  # noqa: ARG002  # the trace repeats none
        mine: JobClaim,  # noqa: ARG002
        *,
        is_new: bool,  # noqa: ARG002
        void_sequence: int = 0,  # noqa: ARG002
    ) -> JobClaim | None:
        return None

    async def finish(self, request_id: str, worker_id: str, epoch: int) -> None:
        """Do nothing: the outcome has the end."""

    async def held_by(self, worker_id: str) -> dict[str, str]:  # noqa: ARG002
        """Return no leases: schedulers present from the start have nothing to take over."""
        return {}

    async def settle_model(
        self,
        request_id: str,  # noqa: ARG002  # the trace names the model
        model: str,
        reason: str,
    ) -> tuple[str, str]:
        return model, reason

    async def settle_adapter(
        self,
        request_id: str,  # noqa: ARG002  # the trace names the adapter
        version: str,
    ) -> str:
        return version


# Each bin is half a percent wide, the precision of percentiles.
_BINS_PER_E = 200
_LEAST_S = 1e-9


class InterTokenLatencies:
    """Distribution of the gaps between consecutive tokens, also across runs.

    Seconds of virtual time. A percentile is exact to half a percent.
    """

    def __init__(self) -> None:
        self.count = 0
        self.max_s = 0.0
        self._sum_s = 0.0
        self._bins: Counter[int] = Counter()

    def add(self, gap_s: float, count: int = 1) -> None:
        """Add ``count`` equal gaps."""
        self._bins[_bin_of(gap_s)] += count
        self.count += count
        self._sum_s += gap_s * count
        self.max_s = max(self.max_s, gap_s)

    def add_growing(self, first_s: float, growth_s: float, num_gaps: int, count: int) -> None:
        """Add ``num_gaps`` consecutive gaps that grow by ``growth_s``, for each of ``count``
        streams."""
        done = 0
        while done < num_gaps:
            gap_s = first_s + done * growth_s
            num_alike = num_gaps - done
            if growth_s > 0:
                within_s = _end_of(_bin_of(gap_s)) - gap_s
                num_alike = min(num_alike, max(1, math.ceil(within_s / growth_s)))
            self.add(gap_s + (num_alike - 1) * growth_s / 2, num_alike * count)
            done += num_alike

    @property
    def mean_s(self) -> float:
        """Mean gap in seconds; 0 without gaps."""
        return self._sum_s / self.count if self.count else 0.0

    def at(self, share: float) -> float:
        """Return the quantile at ``share`` in seconds; 0 without gaps."""
        left = share * self.count
        for number in sorted(self._bins):
            left -= self._bins[number]
            if left < 0:
                return min(math.exp((number + 0.5) / _BINS_PER_E), self.max_s)
        return self.max_s


def _bin_of(gap_s: float) -> int:
    return math.floor(math.log(max(gap_s, _LEAST_S)) * _BINS_PER_E)


def _end_of(number: int) -> float:
    return math.exp((number + 1) / _BINS_PER_E)

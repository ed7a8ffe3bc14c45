"""Worker view: load, speed and adapters of one live worker, as a scheduler sees them."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from millrace.scheduler.jobs.scheduled_job import TIER_RANKS, ResourceRequest
from millrace.schemas.control import WorkerStatus
from millrace.schemas.jobs import Tier

# Load time assumed for an adapter before one is measured.
_LOAD_S = 0.1


class WorkerAdapterSlots:
    """Adapter slots of a worker, by adapter version.

    They come from the last heartbeat and the requests that were sent since.
    """

    def __init__(self) -> None:
        self._num_slots = 0
        self._load_s = _LOAD_S
        self._num_running: dict[str, int] = {}
        self._sent: Counter[str] = Counter()

    def observe(self, status: WorkerStatus) -> None:
        """Update from a later heartbeat."""
        self._num_slots = status.max_adapters
        self._load_s = status.adapter_load_ms / 1e3 or _LOAD_S
        self._num_running = {one.version: one.num_running for one in status.adapters}

    def send(self, version: str) -> None:
        """Count a request of the adapter that is sent to the worker."""
        self._sent[version] += 1

    def end(self, version: str) -> None:
        """Count the end of a request of the adapter."""
        self._sent[version] -= 1
        if not self._sent[version]:
            del self._sent[version]

    def has(self, version: str) -> bool:
        """Return whether the worker has the adapter or will load it for another request."""
        return version in self._num_running or version in self._sent

    def wait_s(self, version: str, request_s: float) -> float:
        """Return the seconds that a request waits for its adapter.

        The wait is 0 if the adapter is loaded. Otherwise it is the load time. If requests hold
        every slot, the time until a request ends is added: ``request_s`` divided by the number of
        slots.
        """
        if self.has(version):
            return 0.0
        held = {one for one, count in self._num_running.items() if count} | self._sent.keys()
        if len(held) < self._num_slots:
            return self._load_s
        return self._load_s + request_s / max(self._num_slots, 1)


# Decay of a heartbeat's weight with each later one: about 20 are remembered.
_DECAY = 0.95
# Growth of a step from an empty to a full batch, as a share of a step's time: assumed before
# batches of different sizes were measured, and its lower and upper bound.
_ASSUMED_GROWTH, _LEAST_GROWTH, _MOST_GROWTH = 0.5, 0.1, 4.0
# Weight of the assumed growth, as a variance of batch sizes.
_ASSUMED_WEIGHT = 1.0


class StepTimes:
    """Linear fit of a step's seconds by its batch size, through recent measurements."""

    __slots__ = ("_xy", "batch", "num_told", "per_sequence_s", "spread", "step_s")

    def __init__(self) -> None:
        self.num_told = 0.0
        self.batch = 0.0
        self.step_s = 0.0
        self.per_sequence_s = 0.0
        self.spread = 0.0
        self._xy = 0.0

    def observe(self, batch: int, step_s: float, num_slots: int) -> None:
        """Add a measurement: steps took ``step_s`` while ``batch`` of ``num_slots`` sequences
        ran."""
        self.num_told = self.num_told * _DECAY + 1
        weight = 1 / self.num_told
        off_batch, off_s = batch - self.batch, step_s - self.step_s
        self.batch += weight * off_batch
        self.step_s += weight * off_s
        # Moments about the mean. They decay with the same weight.
        self.spread += weight * ((1 - weight) * off_batch * off_batch - self.spread)
        self._xy += weight * ((1 - weight) * off_batch * off_s - self._xy)
        unit_s = self.step_s / max(num_slots, 1)
        assumed_s = _ASSUMED_GROWTH * unit_s
        slope_s = (self._xy + _ASSUMED_WEIGHT * assumed_s) / (self.spread + _ASSUMED_WEIGHT)
        self.per_sequence_s = min(max(slope_s, _LEAST_GROWTH * unit_s), _MOST_GROWTH * unit_s)

    def at_half(self, num_slots: int, per_sequence_s: float) -> float:
        """Return the time of a step with half of the slots used, at the given cost of a
        sequence."""
        return self.step_s + per_sequence_s * (num_slots / 2 - self.batch)

    def at(self, batch: float) -> float:
        """Return the time of a step with this batch size; 0 if nothing was measured."""
        return max(
            self.step_s + self.per_sequence_s * (batch - self.batch), self.step_s * _LEAST_GROWTH
        )


# A worker reports fewer requests than it is thought to hold while an answer or an end is on its
# way. If that lasts longer than this, a message was lost.
_DOUBT_AFTER_S = 2.0
# Preempted work of lower tiers stays at the worker. It holds at most this factor times its
# capacity.
_MAX_HELD_FACTOR = 2
_NUM_TIERS = len(Tier)
# Longest time to learn of an end and send another request.
_REFILL_S = 0.1
# Least remaining share of an answer that has become longer than expected.
_LEAST_LEFT = 0.1
_SHUFFLE = 5
# Expected output of a request without an estimate.
DEFAULT_OUTPUT_TOKENS = 128.0
_turns = itertools.count(1)
# Assumed ratio of computing to pulling a token, for a worker that has pulled nothing.
ASSUMED_PULL_GAIN = 10.0


@dataclass(slots=True)
class _Run:
    """Request at a worker.

    ``num_prompt_tokens`` are to be prefilled. They exclude cached tokens and the
    ``num_pulled_tokens`` that come from another worker's cache.
    """

    num_blocks: int
    num_prompt_tokens: int
    num_pulled_tokens: int
    rank: int
    expected_output_tokens: float
    begun_s: float
    adapter: str
    confirmed: bool = False
    seen: bool = False


class _Capacities(NamedTuple):
    """Capacity by rank: further requests, and free blocks with those of preemptible tiers."""

    capacity: tuple[int, ...]
    free_blocks: tuple[int, ...]


class WorkerView:
    """Worker as of its last heartbeat, corrected by later dispatches and ends.

    - ``runs``: requests that this scheduler sent. Other reported requests belong to other
      schedulers.
    - ``pending_prompt_tokens``: tokens to prefill before those of a new request. Reported tokens,
      plus tokens sent since, less the estimated progress.
    - ``pending_pull_tokens``: tokens still to come from other workers' caches, as reported.
    - ``prefill_token_s``, ``pull_token_s``: seconds to compute and to pull a token. The latter is
      derived from the former until it is measured.
    - ``decode_step_s``: seconds of a decode step with one more request (0: not measured).
    - ``kv_kind``: equal for workers that can pull blocks from one another, None if they cannot.
    - ``adapters``: the worker's adapter slots.
    - ``num_held``: requests that run or wait there, from all schedulers.
    - ``joined_s``: time of the first heartbeat.
    - ``last_turn``: grows with each request that any worker gets. The lowest one marks the worker
      that got none for longest.

    Reading costs O(1), independent of the load.
    """

    def __init__(self, status: WorkerStatus, now_s: float) -> None:
        self.worker_id = status.worker_id
        self.runs: dict[str, _Run] = {}
        self.pending_prompt_tokens = self.pending_pull_tokens = 0.0
        self.prefill_token_s = self.decode_step_s = 0.0
        self.pull_token_s = 0.0
        self.kv_kind: tuple[str, str] | None = None
        self.last_turn = 0
        self.adapters = WorkerAdapterSlots()
        self.step_times = StepTimes()
        self.joined_s = self._advanced_s = now_s
        self._refused_rank = _NUM_TIERS
        self._own = [0] * _NUM_TIERS
        self._others = [0] * _NUM_TIERS
        self.num_held = 0
        self._expected_output_tokens = 0.0
        self._promised_blocks = self._unseen_blocks = self._freed_blocks = 0
        self._short_since_s: float | None = None
        self._capacities: _Capacities | None = None
        self.observe(status, now_s)

    # --- changes ---

    def observe(self, status: WorkerStatus, now_s: float) -> None:
        """Update from a later heartbeat of the same incarnation."""
        self.status = status
        self.adapters.observe(status)
        self.seen_s = self._advanced_s = now_s
        self._refused_rank = _NUM_TIERS
        self._freed_blocks = self._unseen_blocks = num_seen = 0
        unseen_prompt_tokens = unseen_pull_tokens = 0
        for run in self.runs.values():
            run.seen = run.confirmed
            num_seen += run.seen
            if not run.seen:
                self._unseen_blocks += run.num_blocks
                unseen_prompt_tokens += run.num_prompt_tokens
                unseen_pull_tokens += run.num_pulled_tokens
        self.pending_prompt_tokens = float(status.outstanding_prompt_tokens + unseen_prompt_tokens)
        self.pending_pull_tokens = float(status.outstanding_pull_tokens + unseen_pull_tokens)
        self.kv_kind = _kv_kind_of(status)
        reported = status.num_running + status.num_waiting
        rate = status.prefill_tokens_per_s
        self.prefill_token_s = 1 / rate if rate > 0 else 0.0
        rate = status.pull_tokens_per_s
        self.pull_token_s = 1 / rate if rate > 0 else self.prefill_token_s / ASSUMED_PULL_GAIN
        if status.decode_step_ms > 0 and (status.num_running or not self.step_times.num_told):
            # An idle worker repeats its last measurement, whose batch size is unknown.
            num_slots = status.max_num_sequences
            batch = status.num_running or num_slots // 2
            self.step_times.observe(batch, status.decode_step_ms / 1e3, num_slots)
        self._count_others(reported)
        if reported >= num_seen:
            self._short_since_s = None
        elif self._short_since_s is None:
            self._short_since_s = now_s

    def _count_others(self, reported: int) -> None:
        by_tier = self.status.num_held_by_tier
        if by_tier:
            held = [by_tier.get(tier, 0) for tier in Tier]
            self._others = [max(0, n - own) for n, own in zip(held, self._own, strict=True)]
        else:
            # Their tiers are unknown, so none counts as preemptible.
            self._others = [max(0, reported - len(self.runs)), *[0] * (_NUM_TIERS - 1)]
        self._recount()

    def advance(self, now_s: float) -> None:
        """Advance the time: estimate the prefill progress.

        Pull progress comes from reports only.
        """
        passed_s = now_s - self._advanced_s
        if passed_s > 0:
            self._advanced_s = now_s
            if self.prefill_token_s > 0 and self.pending_prompt_tokens > 0:
                left = self.pending_prompt_tokens - passed_s / self.prefill_token_s
                self.pending_prompt_tokens = max(0.0, left)

    def reserve(
        self,
        request_id: str,
        resources: ResourceRequest,
        expected_output_tokens: float = DEFAULT_OUTPUT_TOKENS,
        num_cached_tokens: int = 0,
        num_pulled_tokens: int = 0,
    ) -> None:
        """Add a request with its cached and pulled tokens to the worker's load."""
        assert request_id not in self.runs, "a worker runs a request once"
        blocks = resources.num_blocks(self.status.block_size_tokens)
        num_present = num_cached_tokens + num_pulled_tokens
        run = _Run(
            blocks,
            max(resources.num_context_tokens - num_present, 1),
            num_pulled_tokens,
            TIER_RANKS[resources.tier],
            expected_output_tokens,
            self._advanced_s,
            resources.adapter,
        )
        self.runs[request_id] = run
        if run.adapter:
            self.adapters.send(run.adapter)
        self.last_turn = next(_turns)
        self._expected_output_tokens += expected_output_tokens
        self.pending_prompt_tokens += run.num_prompt_tokens
        self.pending_pull_tokens += num_pulled_tokens
        self._promised_blocks += blocks
        self._unseen_blocks += blocks
        self._own[run.rank] += 1
        self._recount()

    def await_pull(self, num_tokens: int) -> None:
        """Add tokens that the worker was asked to pull for a request that does not run there
        yet."""
        self.pending_pull_tokens += num_tokens

    def confirm(self, request_id: str) -> None:
        run = self.runs.get(request_id)
        if run is not None:
            run.confirmed = True

    def release(self, request_id: str) -> bool:
        """Remove a run and free its capacity at once; return whether there was one."""
        run = self.runs.pop(request_id, None)
        if run is None:
            return False
        self._expected_output_tokens -= run.expected_output_tokens
        if run.adapter:
            self.adapters.end(run.adapter)
        self._promised_blocks -= run.num_blocks
        self._own[run.rank] -= 1
        if run.seen:
            self._freed_blocks += run.num_blocks
        else:
            self._unseen_blocks -= run.num_blocks
            left = self.pending_prompt_tokens - run.num_prompt_tokens
            self.pending_prompt_tokens = max(0.0, left)
            left = self.pending_pull_tokens - run.num_pulled_tokens
            self.pending_pull_tokens = max(0.0, left)
        if run.confirmed:
            self._refused_rank = _NUM_TIERS
        self._recount()
        return True

    def refuse(self, tier: Tier) -> None:
        """Note that the worker refused this tier.

        It gets no job of the tier or below until its next heartbeat, or until one of this
        scheduler's runs has ended.
        """
        self._refused_rank = min(self._refused_rank, TIER_RANKS[tier])
        self._capacities = None

    def _recount(self) -> None:
        self.num_held = sum(self._own) + sum(self._others)
        self.decode_step_s = self.step_times.at(
            min(self.num_held + 1, self.status.max_num_sequences)
        )
        self._capacities = None

    # --- load and capacity ---

    @property
    def mean_output_tokens(self) -> float:
        """Mean expected output of this scheduler's requests there; 0 without requests."""
        return self._expected_output_tokens / len(self.runs) if self.runs else 0.0

    @property
    def num_held_per_slot(self) -> float:
        return self.num_held / max(self.status.max_num_sequences, 1)

    @property
    def num_others(self) -> int:
        """Number of requests that other schedulers sent."""
        return sum(self._others)

    def num_ahead(self, rank: int) -> int:
        """Return how many held requests do not make way for one of this rank."""
        return sum(self._own[: rank + 1]) + sum(self._others[: rank + 1])

    def num_running_of(self, rank: int) -> int:
        """Return how many requests of a rank run, after higher ranks have taken their slots."""
        num_above = self.num_ahead(rank - 1) if rank else 0
        num_slots_left = self.status.max_num_sequences - num_above
        return max(0, min(self.num_ahead(rank) - num_above, num_slots_left))

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks still free once every sent request has its prompt's blocks."""
        status = self.status
        used = status.num_blocks - status.num_free_blocks - self._freed_blocks + self._unseen_blocks
        return status.num_blocks - max(used, self._promised_blocks, 0)

    def capacity_for(self, tier: Tier) -> int:
        """Return how many more requests of a tier the worker would take; lower tiers make way."""
        return (self._capacities or self._count_capacities()).capacity[TIER_RANKS[tier]]

    def free_blocks_for(self, tier: Tier) -> int:
        """Return the free blocks, including blocks that lower tiers would give up."""
        return (self._capacities or self._count_capacities()).free_blocks[TIER_RANKS[tier]]

    def _count_capacities(self) -> _Capacities:
        status, held = self.status, self.num_held
        limit = status.max_num_sequences + self._num_worth_waiting()
        free = self.num_free_blocks
        capacity: list[int] = []
        free_blocks: list[int] = []
        for rank in range(_NUM_TIERS):
            ahead = self.num_ahead(rank)
            blocks = free
            if held > ahead:
                blocks += (status.num_blocks - free) * (held - ahead) // held
            free_blocks.append(blocks)
            is_short = bool(status.num_blocks and held and blocks <= 0)
            takes_none = status.draining or status.engine_down or is_short
            if takes_none or rank >= self._refused_rank:
                capacity.append(0)
            else:
                capacity.append(max(0, min(limit - ahead, _MAX_HELD_FACTOR * limit - held)))
        self._capacities = _Capacities(tuple(capacity), tuple(free_blocks))
        return self._capacities

    def _num_worth_waiting(self) -> int:
        """Return how many requests beyond its slots keep a worker busy until it can get more.

        Requests that wait at the worker go ahead of all later ones, also of tenants with a better
        claim.
        """
        status, step_s = self.status, self.decode_step_s
        if not step_s:
            return status.max_num_waiting
        num_running = min(self.num_held, status.max_num_sequences)
        each_s = (self.mean_output_tokens or DEFAULT_OUTPUT_TOKENS) * step_s
        return min(status.max_num_waiting, 1 + int(_REFILL_S * num_running / each_s))

    def fits(self, resources: ResourceRequest) -> bool:
        """Return whether the request fits now. An idle worker has all its blocks."""
        capacities = self._capacities or self._count_capacities()
        rank = TIER_RANKS[resources.tier]
        if capacities.capacity[rank] == 0 or not self.could_hold(resources):
            return False
        if not self.status.num_blocks or self.num_held == 0:
            return True
        return resources.num_blocks(self.status.block_size_tokens) <= capacities.free_blocks[rank]

    def could_hold(self, resources: ResourceRequest) -> bool:
        """Return whether the request would fit an empty worker."""
        if resources.adapter and not self.status.max_adapters:
            return False
        limit = self.status.max_tokens_per_request
        return limit == 0 or resources.num_context_tokens + resources.num_new_tokens <= limit

    # --- forecast ---

    @property
    def is_measured(self) -> bool:
        """True once the worker has reported the time of its steps."""
        return self.decode_step_s > 0

    @property
    def step_growth(self) -> float:
        """Ratio of a step's time now to its time with one request; 1 if nothing was measured."""
        batch = min(self.num_held, self.status.max_num_sequences)
        alone_s = self.step_times.at(1)
        return max(self.step_times.at(batch) / alone_s, 1.0) if alone_s and batch else 1.0

    def run_s(self, prompt_tokens: float, output_tokens: float) -> float:
        """Return the seconds that a request takes in a full batch of a measured worker.

        Each slot gets another prompt meanwhile.
        """
        num_slots = max(self.status.max_num_sequences, 1)
        step_s = self.step_times.at(num_slots)
        return output_tokens * step_s + num_slots * prompt_tokens * self.prefill_token_s

    def slots_free_s(self, now_s: float, spread: Sequence[float] = (1.0,)) -> list[float]:
        """Return the seconds until each slot is free. Requests that wait at the worker go first.

        ``spread`` is the distribution of actual to expected lengths, in ascending order.
        """
        ends_s: list[float] = []
        for number, run in enumerate(self.runs.values()):
            took_s = self.run_s(run.num_prompt_tokens, run.expected_output_tokens)
            since_s = now_s - run.begun_s
            possible = [factor for factor in spread if factor * took_s > since_s]
            if possible:
                # Spread the runs evenly over the lengths that they may still have.
                factor = possible[number * _SHUFFLE % len(possible)]
                ends_s.append(factor * took_s - since_s)
            else:
                ends_s.append(_LEAST_LEFT * took_s)
        mean_s = self.run_s(0, self.mean_output_tokens or DEFAULT_OUTPUT_TOKENS)
        others = self.num_others
        ends_s += [mean_s * (number + 1) / (others + 1) for number in range(others)]
        ends_s.sort()
        num_slots = max(self.status.max_num_sequences, 1)
        free_s = ends_s[:num_slots] + [0.0] * (num_slots - len(ends_s))
        heapq.heapify(free_s)
        for _ in ends_s[num_slots:]:
            heapq.heapreplace(free_s, free_s[0] + mean_s)
        return free_s

    # --- doubts ---

    @property
    def is_doubtful(self) -> bool:
        return (
            self._short_since_s is not None and self.seen_s - self._short_since_s >= _DOUBT_AFTER_S
        )

    def trust(self) -> None:
        """Clear the doubt, as the worker's runs are being looked up one by one."""
        self._short_since_s = None


def _kv_kind_of(status: WorkerStatus) -> tuple[str, str] | None:
    """Return the weights and the block layout if other workers can pull the blocks, else None."""
    if status.transfer is None or status.engine_down or not status.weights:
        return None
    return status.weights, status.transfer.layout

"""Placement of a request: the worker with the earliest predicted end.

It can pull context that other workers have cached. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from millrace.scheduler.fleet.worker_view import (
    ASSUMED_PULL_GAIN,
    DEFAULT_OUTPUT_TOKENS,
    WorkerView,
)
from millrace.scheduler.jobs.scheduled_job import TIER_RANKS, ResourceRequest
from millrace.schemas.engines import WorkerRole
from millrace.schemas.transfer import KvSource

# Fixed cost of a pull, beside its bytes.
PULL_OVERHEAD_S = 0.005


class PrefixHolder(NamedTuple):
    """Worker that has this many of a request's leading tokens."""

    worker: WorkerView
    num_tokens: int

    def as_source(self) -> KvSource | None:
        """Return the holder as a KV source; None if it serves no blocks."""
        endpoint = self.worker.status.transfer
        if endpoint is None:
            return None
        return KvSource(
            worker_id=self.worker.worker_id, endpoint=endpoint, num_tokens=self.num_tokens
        )


class Pull(NamedTuple):
    """Pull of ``num_tokens`` from ``holder``, which takes ``seconds``."""

    holder: PrefixHolder
    num_tokens: int
    seconds: float


class KvHolders:
    """Best holder of a request's leading tokens, for each kind of blocks.

    Made once for each placed request: O(workers with some of the tokens).
    """

    def __init__(self, workers: Iterable[WorkerView], cached: Mapping[str, int]) -> None:
        self._by_kind: dict[tuple[str, str], PrefixHolder] = {}
        if not cached:
            return
        for worker in workers:
            num_tokens = cached.get(worker.worker_id, 0)
            if num_tokens and worker.kv_kind is not None:
                known = self._by_kind.get(worker.kv_kind)
                if known is None or num_tokens > known.num_tokens:
                    self._by_kind[worker.kv_kind] = PrefixHolder(worker, num_tokens)

    def pull(
        self, worker: WorkerView, num_cached_tokens: int, prefill_token_s: float
    ) -> Pull | None:
        """Return the pull by a worker with ``num_cached_tokens``, if it is faster than computing.

        Computing takes ``prefill_token_s`` a token. Work ahead of the request delays either way.
        """
        if worker.kv_kind is None or not self._by_kind:
            return None
        holder = self._by_kind.get(worker.kv_kind)
        if holder is None or holder.worker is worker:
            return None
        num_tokens = holder.num_tokens - num_cached_tokens
        token_s = pull_token_s(worker, prefill_token_s)
        own_s = PULL_OVERHEAD_S + num_tokens * token_s
        if num_tokens <= 0 or own_s >= num_tokens * prefill_token_s:
            return None
        return Pull(holder, num_tokens, own_s + worker.pending_pull_tokens * token_s)


def pull_token_s(worker: WorkerView, prefill_token_s: float) -> float:
    """Return the seconds to pull a token, with a default if nothing was measured."""
    return worker.pull_token_s or prefill_token_s / ASSUMED_PULL_GAIN


Policy = Literal["affine", "least_loaded"]

# Defaults for workers of a model of which none has measured anything.
_PREFILL_TOKEN_S = 1 / 4_000
_DECODE_STEP_S = 0.02
_BATCH_GROWTH = 0.5
# A wait for a slot is predicted from means, while recomputing a cached prefix has a known cost. So
# the wait counts this much more.
_WAIT_CAUTION = 1.0
# Cost of preempting a request of a lower tier, in tokens.
_PREEMPTED_TOKENS = 1_024
# A worker counts as equal to the best within the prefill time of this many tokens. The bound is
# wide for an idle worker, so one worker does not get all requests with the same prefix. It is
# narrow for a busy one, where recomputing takes time from other requests.
_SHORT_PREFIX_TOKENS = 128
_SCATTER_TOKENS = 16
# Workers whose measured speeds differ by at most this ratio count as equally fast. Equal machines
# measure this differently under other batches or other load.
_EQUAL_SPEED_RATIO = 1.5
# Lower bound of a step that is derived from others' measurements, as a share of the worker's own
# measurement.
_LEAST_SHARE = 0.1
_NONE_CACHED: Mapping[str, int] = {}
_NO_HOLDERS = KvHolders((), _NONE_CACHED)


class _Speeds(NamedTuple):
    """Measured speeds of a model's workers.

    The means are the defaults for an unmeasured worker. The least times apply to workers that are
    nearly as fast as the fastest. One more sequence adds ``per_sequence_s`` to a step, as measured
    by the worker with the widest range of batch sizes. ``least_step_s`` is with half of the slots
    used: a worker that has seen only small batches has no measurement of that.
    """

    prefill_token_s: float
    decode_step_s: float
    least_token_s: float
    least_step_s: float
    per_sequence_s: float

    def prefill_token_s_of(self, worker: WorkerView) -> float:
        token_s = worker.prefill_token_s
        if not token_s:
            return self.prefill_token_s
        return self.least_token_s if _are_equal(token_s, self.least_token_s) else token_s

    def decode_step_s_of(self, worker: WorkerView) -> float:
        """Return the seconds of a step with one more request."""
        step_s, num_slots = worker.decode_step_s, max(worker.status.max_num_sequences, 1)
        if not step_s:
            return self.decode_step_s * (1 + _BATCH_GROWTH * worker.num_held / num_slots)
        if not _are_equal(
            worker.step_times.at_half(num_slots, self.per_sequence_s), self.least_step_s
        ):
            return step_s
        # The level of the line scatters between measurements. The growth with the batch does not.
        off_half = min(worker.num_held + 1, num_slots) - num_slots / 2
        return max(self.least_step_s + self.per_sequence_s * off_half, _LEAST_SHARE * step_s)


class _Soon(NamedTuple):
    """Predicted seconds of a request at a worker.

    ``prefill_s`` until all prompts up to its own are prefilled, ``slot_s`` until a slot is free (0
    if one is), ``step_s`` for each decode step, ``adapter_s`` until its adapter is loaded.
    """

    prefill_s: float
    slot_s: float
    step_s: float
    adapter_s: float


def choose(
    workers: Iterable[WorkerView],
    resources: ResourceRequest,
    cached: Mapping[str, int] = _NONE_CACHED,
    expected_output_tokens: float = DEFAULT_OUTPUT_TOKENS,
    policy: Policy = "affine",
    now_s: float | None = None,
    holders: Iterable[WorkerView] | None = None,
) -> WorkerView | None:
    """Return the fitting worker with the earliest predicted end of the request; None if none fits.

    Equal workers are ordered by requests per slot, then by the longest time without a request, then
    by id: the same views always give the same answer.

    Args:
        workers: Workers of the model.
        resources: Resources of the request.
        cached: Leading tokens in a worker's cache, by worker id. They need no prefill, so they
            attract the request until the wait there exceeds the cost of recomputing or pulling them
            elsewhere.
        expected_output_tokens: Expected length of the output.
        policy: "least_loaded" ignores ``cached`` and adapters.
        now_s: If given, counts the progress since the workers' heartbeats.
        holders: Workers to pull from, by default ``workers``. The one with most tokens is used.
    """
    workers = list(workers)
    if policy == "least_loaded":
        cached, resources = _NONE_CACHED, resources._replace(adapter="")
    expected = min(max(expected_output_tokens, 1.0), max(resources.num_new_tokens, 1))
    fitting = [worker for worker in workers if worker.fits(resources)]
    if now_s is not None:
        for worker in fitting:
            worker.advance(now_s)
    if len(fitting) <= 1:
        return fitting[0] if fitting else None
    speeds = _speeds_of(workers)
    kv_holders = KvHolders(workers if holders is None else holders, cached)
    found: list[tuple[float, WorkerView]] = []
    for worker in fitting:
        num_cached = cached.get(worker.worker_id, 0)
        soon = _predict(worker, resources, num_cached, expected, speeds, kv_holders)
        done_s = soon.prefill_s + (1 + _WAIT_CAUTION) * soon.slot_s + expected * soon.step_s
        found.append((done_s + soon.adapter_s, worker))
    best_s, best = min(found, key=_done_s)
    equals = [
        worker
        for done_s, worker in found
        if done_s <= best_s + speeds.least_token_s * _num_tokens_allowed(worker)
    ]
    if resources.adapter and best.adapters.has(resources.adapter):
        # Another copy would take a slot that another adapter may need.
        equals = [worker for worker in equals if worker.adapters.has(resources.adapter)]
    return min(equals, key=_order_of_equals)


def _done_s(found: tuple[float, WorkerView]) -> float:
    return found[0]


def _num_tokens_allowed(worker: WorkerView) -> int:
    """Return by how many tokens' prefill a worker may be slower and still count as equal."""
    return _SCATTER_TOKENS if worker.num_held else _SHORT_PREFIX_TOKENS


def _order_of_equals(worker: WorkerView) -> tuple[float, int, str]:
    return (worker.num_held_per_slot, worker.last_turn, worker.worker_id)


def predicted_ttft_s(
    worker: WorkerView,
    resources: ResourceRequest,
    num_cached_tokens: int = 0,
    expected_output_tokens: float = DEFAULT_OUTPUT_TOKENS,
) -> float:
    """Return the seconds until a worker would have the first token of a request sent now.

    They include the prompts ahead, a free slot, the load of its adapter, and its own prefill.
    """
    expected = min(max(expected_output_tokens, 1.0), max(resources.num_new_tokens, 1))
    soon = _predict(worker, resources, num_cached_tokens, expected, _speeds_of([worker]))
    return soon.prefill_s + soon.slot_s + soon.step_s + soon.adapter_s


def work_ahead_s(worker: WorkerView) -> float:
    """Return the seconds of pulls and prefills ahead of a request that is sent now."""
    token_s = worker.prefill_token_s or _PREFILL_TOKEN_S
    pull_s = worker.pending_pull_tokens * pull_token_s(worker, token_s)
    return pull_s + worker.pending_prompt_tokens * token_s


def prefill_token_s(worker: WorkerView) -> float:
    """Return the seconds that a worker takes to compute a prompt token, with a default."""
    return worker.prefill_token_s or _PREFILL_TOKEN_S


def _predict(
    worker: WorkerView,
    resources: ResourceRequest,
    num_cached_tokens: int,
    expected_output_tokens: float,
    speeds: _Speeds,
    holders: KvHolders = _NO_HOLDERS,
) -> _Soon:
    status = worker.status
    num_slots = status.max_num_sequences
    num_held = worker.num_held
    token_s, step_s = speeds.prefill_token_s_of(worker), speeds.decode_step_s_of(worker)
    pull, pull_s = holders.pull(worker, num_cached_tokens, token_s), 0.0
    if pull is not None:
        num_cached_tokens += pull.num_tokens
        pull_s = pull.seconds
    own_tokens = max(resources.num_context_tokens - num_cached_tokens, 1)
    slot_s = 0.0
    if num_held >= num_slots:
        num_over = worker.num_ahead(TIER_RANKS[resources.tier]) - num_slots + 1
        if num_over > 0:
            # Output tokens until one request of the batch ends and frees its slot.
            output_tokens = worker.mean_output_tokens or expected_output_tokens
            each_s = output_tokens * step_s / max(num_slots, 1)
            slot_s = num_over * each_s
        else:
            slot_s = _PREEMPTED_TOKENS * token_s
    adapter_s = 0.0
    if resources.adapter:
        adapter_s = worker.adapters.wait_s(resources.adapter, expected_output_tokens * step_s)
    prefill_s = pull_s + (worker.pending_prompt_tokens + own_tokens) * token_s
    return _Soon(prefill_s, slot_s, step_s, adapter_s)


def _speeds_of(workers: list[WorkerView]) -> _Speeds:
    prefill = [one.prefill_token_s for one in workers if one.prefill_token_s]
    decode = [one.decode_step_s for one in workers if one.decode_step_s]
    measured = [one for one in workers if one.decode_step_s]
    slope_s = max(
        ((one.step_times.spread, one.step_times.per_sequence_s) for one in measured),
        default=(0.0, 0.0),
    )[1]
    halves = [
        one.step_times.at_half(max(one.status.max_num_sequences, 1), slope_s) for one in measured
    ]
    return _Speeds(
        sum(prefill) / len(prefill) if prefill else _PREFILL_TOKEN_S,
        sum(decode) / len(decode) if decode else _DECODE_STEP_S,
        min(prefill, default=_PREFILL_TOKEN_S),
        min(halves, default=_DECODE_STEP_S),
        slope_s,
    )


def _are_equal(seconds: float, least_s: float) -> bool:
    return seconds <= _EQUAL_SPEED_RATIO * least_s


def soonest(workers: Iterable[WorkerView], resources: ResourceRequest) -> WorkerView | None:
    """Return the worker that will probably first have the blocks for a request that fits nowhere.

    That is the one with the most free blocks that could hold the request and does not drain.
    """
    return max(
        (
            worker
            for worker in workers
            if worker.could_hold(resources) and not worker.status.draining
        ),
        key=lambda worker: (worker.free_blocks_for(resources.tier), worker.worker_id),
        default=None,
    )


def longest_tokens(workers: Iterable[WorkerView]) -> int | None:
    """Return the most tokens of a request that any worker can hold; None: no limit or no worker."""
    limits = [worker.status.max_tokens_per_request for worker in workers]
    return None if not limits or 0 in limits else max(limits)


# Cost of moving a stream behind its first token, beside the pull: cancelling it, asking its client
# for its tokens, sending it, and waiting for one step.
_HOP_S = 0.03
# A prompt of at most this many tokens delays no other stream noticeably.
_SHORT_TOKENS = 128


def have_roles(workers: list[WorkerView]) -> bool:
    """Return whether any worker has a role."""
    return any(worker.status.role is not WorkerRole.BOTH for worker in workers)


def for_new(
    workers: list[WorkerView], resources: ResourceRequest, cached: Mapping[str, int]
) -> list[WorkerView]:
    """Return the preferred workers for a request without a token.

    These are the prefill workers if its uncached prompt would delay other streams and takes longer
    to compute than its blocks take to pull afterwards. Otherwise they are the decode workers. If
    none of the preferred workers has room, all workers are returned.
    """
    deciders = [worker for worker in workers if worker.status.role is not WorkerRole.PREFILL]
    is_long = all(
        _holds_up(worker, resources, cached.get(worker.worker_id, 0))
        for worker in deciders
        if worker.fits(resources)
    )
    wanted = WorkerRole.PREFILL if is_long else WorkerRole.DECODE
    return _preferred(workers, resources, wanted)


def for_running(workers: list[WorkerView], resources: ResourceRequest) -> list[WorkerView]:
    """Return the decode workers for a stream that goes on; all workers if none of them has room."""
    return _preferred(workers, resources, WorkerRole.DECODE)


def decoders(workers: list[WorkerView]) -> list[WorkerView]:
    """Return the workers that decode by their role."""
    return [worker for worker in workers if worker.status.role is not WorkerRole.PREFILL]


def output_tokens_at(
    candidates: list[WorkerView], workers: list[WorkerView], expected_output_tokens: float
) -> float:
    """Return the expected output tokens of a new request at its first worker.

    It is 1 if all candidates are prefill workers and others decode. Their decode speed does not
    matter then, and would outweigh the wait for the prefill.
    """
    if not candidates or not decoders(workers):
        return expected_output_tokens
    if all(worker.status.role is WorkerRole.PREFILL for worker in candidates):
        return 1.0
    return expected_output_tokens


def _holds_up(worker: WorkerView, resources: ResourceRequest, num_cached_tokens: int) -> bool:
    """Return whether prefilling here costs other streams more than a move with pulled blocks."""
    num_tokens = resources.num_context_tokens - num_cached_tokens
    if not worker.num_held or num_tokens <= _SHORT_TOKENS or worker.kv_kind is None:
        return False
    token_s = prefill_token_s(worker)
    pulled_s = PULL_OVERHEAD_S + num_tokens * pull_token_s(worker, token_s)
    return num_tokens * token_s > pulled_s + _HOP_S


def _preferred(
    workers: list[WorkerView], resources: ResourceRequest, wanted: WorkerRole
) -> list[WorkerView]:
    for roles in ((wanted,), (wanted, WorkerRole.BOTH)):
        chosen = [worker for worker in workers if worker.status.role in roles]
        if any(worker.fits(resources) for worker in chosen):
            return chosen
    return workers

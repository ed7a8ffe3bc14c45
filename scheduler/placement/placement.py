"""Which worker a request goes to: the worker that is predicted to be done with it first. What other
workers have of the request's context can be pulled from them. Pure."""

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

# What a pull costs beside its bytes: it is asked for, and the request waits for it.
PULL_OVERHEAD_S = 0.005


class PrefixHolder(NamedTuple):
    """A worker that has so many of a request's leading tokens."""

    worker: WorkerView
    num_tokens: int

    def as_source(self) -> KvSource | None:
        """As a worker is told of it; None: it serves nothing."""
        endpoint = self.worker.status.transfer
        if endpoint is None:
            return None
        return KvSource(
            worker_id=self.worker.worker_id, endpoint=endpoint, num_tokens=self.num_tokens
        )


class Pull(NamedTuple):
    """``num_tokens`` that a worker lacks are pulled from ``holder``, in ``seconds``."""

    holder: PrefixHolder
    num_tokens: int
    seconds: float


class KvHolders:
    """Of each kind of blocks the worker that has most of a request's leading tokens. Made once for
    each request that is placed: O(workers that have some of it)."""

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
        """What a worker would pull that has so many of the tokens itself, if that takes less time
        than to compute them, at ``prefill_token_s`` each; what is ahead of them there makes either
        wait."""
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
    """What a worker takes to pull a token, also where it has measured nothing at all."""
    return worker.pull_token_s or prefill_token_s / ASSUMED_PULL_GAIN


Policy = Literal["affine", "least_loaded"]

# What workers are taken to do where none of them has measured anything.
_PREFILL_TOKEN_S = 1 / 4_000
_DECODE_STEP_S = 0.02
_BATCH_GROWTH = 0.5
# A wait for a slot is predicted from means; it counts this many times more, since a cached prefix
# that is computed again elsewhere is a loss of known size.
_WAIT_CAUTION = 1.0
# What somebody of a lower tier loses who makes way.
_PREEMPTED_TOKENS = 1_024
# A worker is as good as the best if it would end a request later by no more than the prefill of so
# many tokens: one that has nothing to do, so that not one alone gets all that begins alike, or one
# that is at work, where computing them again takes time from others.
_SHORT_PREFIX_TOKENS = 128
_SCATTER_TOKENS = 16
# Workers whose measured speeds differ by no more than this are taken to be equally fast: so far
# apart are the measurements of equal ones that had other batches, or a busy machine.
_EQUAL_SPEED_RATIO = 1.5
# What is taken from others' measurements makes a step no shorter than this share of what its own
# worker has measured.
_LEAST_SHARE = 0.1
_NONE_CACHED: Mapping[str, int] = {}
_NO_HOLDERS = KvHolders((), _NONE_CACHED)


class _Speeds(NamedTuple):
    """What the workers of a model measured: on the average, which is taken for one that has
    measured nothing, and the fastest, for those that are as good as equal to it. A sequence more
    adds ``per_sequence_s`` to a step of any of these, as the one has measured that has seen the
    most different batches: ``least_step_s`` is with half of the slots taken, and who has seen small
    batches alone knows nothing of such."""

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
        """Of a step with one more request."""
        step_s, num_slots = worker.decode_step_s, max(worker.status.max_num_sequences, 1)
        if not step_s:
            return self.decode_step_s * (1 + _BATCH_GROWTH * worker.num_held / num_slots)
        if not _are_equal(
            worker.step_times.at_half(num_slots, self.per_sequence_s), self.least_step_s
        ):
            return step_s
        # The level is what measurements scatter in; what its own batch adds to it is not.
        off_half = min(worker.num_held + 1, num_slots) - num_slots / 2
        return max(self.least_step_s + self.per_sequence_s * off_half, _LEAST_SHARE * step_s)


class _Soon(NamedTuple):
    """What is predicted of a request at a worker: seconds until all prompts up to its own are
    prefilled, until a slot is free if there is none, of each step that decodes, and until its
    adapter is loaded."""

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
    """The worker that is predicted to end the request first, of those that it fits; None if there
    is none.

    ``cached`` are the leading tokens of it that are in a worker's cache, by worker id: they need no
    prefill, so they draw a request to a worker until those ahead of it there would take longer than
    to compute them again elsewhere, or to pull them, where it can, from the one of the ``holders``
    (None: of the workers) that has most. So does its adapter, in the slots of a worker, until it is
    loaded elsewhere ("least_loaded" leaves both out). With ``now_s`` what workers did since their
    heartbeats is accounted for. Of workers that are as good as each other the one with the fewest
    requests for its slots is taken, then the one that was given none for longest, then the lowest
    id: the same views always give the same answer.
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
        # Another copy of it takes a slot that some other adapter may need.
        equals = [worker for worker in equals if worker.adapters.has(resources.adapter)]
    return min(equals, key=_order_of_equals)


def _done_s(found: tuple[float, WorkerView]) -> float:
    return found[0]


def _num_tokens_allowed(worker: WorkerView) -> int:
    """By how much it may be slower than the best and is yet as good."""
    return _SCATTER_TOKENS if worker.num_held else _SHORT_PREFIX_TOKENS


def _order_of_equals(worker: WorkerView) -> tuple[float, int, str]:
    return (worker.num_held_per_slot, worker.last_turn, worker.worker_id)


def predicted_ttft_s(
    worker: WorkerView,
    resources: ResourceRequest,
    num_cached_tokens: int = 0,
    expected_output_tokens: float = DEFAULT_OUTPUT_TOKENS,
) -> float:
    """When a worker would have the first token of a request that is sent to it now: those before it
    are prefilled, a slot comes free if there is none, its adapter is loaded, its own prompt is
    prefilled."""
    expected = min(max(expected_output_tokens, 1.0), max(resources.num_new_tokens, 1))
    soon = _predict(worker, resources, num_cached_tokens, expected, _speeds_of([worker]))
    return soon.prefill_s + soon.slot_s + soon.step_s + soon.adapter_s


def work_ahead_s(worker: WorkerView) -> float:
    """How long a worker will pull and prefill before it comes to a request that is sent to it
    now."""
    token_s = worker.prefill_token_s or _PREFILL_TOKEN_S
    pull_s = worker.pending_pull_tokens * pull_token_s(worker, token_s)
    return pull_s + worker.pending_prompt_tokens * token_s


def prefill_token_s(worker: WorkerView) -> float:
    """What a worker takes to compute a token of a prompt, as far as is known."""
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
            # A slot comes free when one of the batch has ended.
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
    """The worker that will probably have the blocks first for a request that fits nowhere now:
    that with the most of them free, of those that could ever hold it and do not drain."""
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
    """The longest prompt + completion that any of the workers can ever hold; None: no limit, or
    no worker to ask."""
    limits = [worker.status.max_tokens_per_request for worker in workers]
    return None if not limits or 0 in limits else max(limits)


# What it costs a stream to go on elsewhere behind its first token, beside what is pulled: it is
# taken away, its client is asked what it has, it is sent, and one step is waited for.
_HOP_S = 0.03
# A prompt of so few tokens holds nobody up.
_SHORT_TOKENS = 128


def have_roles(workers: list[WorkerView]) -> bool:
    """Whether any of them has one."""
    return any(worker.status.role is not WorkerRole.BOTH for worker in workers)


def for_new(
    workers: list[WorkerView], resources: ResourceRequest, cached: Mapping[str, int]
) -> list[WorkerView]:
    """Those for a request that has no token yet: of the role ``prefill`` where its prompt, as far
    as it is not cached where it would decode, takes longer to compute than its blocks take to be
    pulled behind it, and would hold up others. All, where none of them has room for it."""
    deciders = [worker for worker in workers if worker.status.role is not WorkerRole.PREFILL]
    is_long = all(
        _holds_up(worker, resources, cached.get(worker.worker_id, 0))
        for worker in deciders
        if worker.fits(resources)
    )
    wanted = WorkerRole.PREFILL if is_long else WorkerRole.DECODE
    return _preferred(workers, resources, wanted)


def for_running(workers: list[WorkerView], resources: ResourceRequest) -> list[WorkerView]:
    """Those for a stream that goes on. All, where none of the others has room for it."""
    return _preferred(workers, resources, WorkerRole.DECODE)


def decoders(workers: list[WorkerView]) -> list[WorkerView]:
    """Those that decode by their role."""
    return [worker for worker in workers if worker.status.role is not WorkerRole.PREFILL]


def output_tokens_at(
    candidates: list[WorkerView], workers: list[WorkerView], expected_output_tokens: float
) -> float:
    """What a request without a token is expected to make where it goes now: a single one, if all
    candidates are of the role ``prefill`` and others decode. How fast these decode is nothing to
    it, and would count for more than how long it waits for its prompt there."""
    if not candidates or not decoders(workers):
        return expected_output_tokens
    if all(worker.status.role is WorkerRole.PREFILL for worker in candidates):
        return 1.0
    return expected_output_tokens


def _holds_up(worker: WorkerView, resources: ResourceRequest, num_cached_tokens: int) -> bool:
    """Whether to compute the prompt at a worker takes more from those who decode there than it
    takes to go on there with blocks that were computed elsewhere."""
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

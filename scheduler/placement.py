"""Which worker a request goes to: the one that is predicted to be done with it first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from scheduler.need import TIER_RANKS, Need
from scheduler.worker_view import DEFAULT_OUTPUT_TOKENS, WorkerView

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
_NONE_CACHED: Mapping[str, int] = {}


class _Speeds(NamedTuple):
    """Of a worker that has measured nothing: those of its peers, on the average."""

    prefill_token_s: float
    decode_step_s: float


class _Soon(NamedTuple):
    """What is predicted of a request at a worker: seconds until all prompts up to its own are
    prefilled, until a slot is free if there is none, and of each step that decodes."""

    prefill_s: float
    slot_s: float
    step_s: float


def choose(
    workers: Iterable[WorkerView],
    need: Need,
    cached: Mapping[str, int] = _NONE_CACHED,
    expected_output_tokens: float = DEFAULT_OUTPUT_TOKENS,
    policy: Policy = "affine",
    now_s: float | None = None,
) -> WorkerView | None:
    """The worker that is predicted to end the request first, of those that it fits; None if there
    is none.

    ``cached`` are the leading tokens of it that are in a worker's cache, by worker id: they need no
    prefill, so they draw a request to a worker until those ahead of it there would take longer than
    to compute them again elsewhere ("least_loaded" leaves them out). With ``now_s`` what workers
    did since their heartbeats is accounted for. Ties go to the lowest id, so that the same view
    always gives the same answer.
    """
    workers = list(workers)
    if policy == "least_loaded":
        cached = _NONE_CACHED
    expected = min(max(expected_output_tokens, 1.0), max(need.num_new_tokens, 1))
    peers: _Speeds | None = None
    best: WorkerView | None = None
    best_s = 0.0
    for worker in workers:
        if not worker.fits(need):
            continue
        if now_s is not None:
            worker.advance(now_s)
        if peers is None and not (worker.prefill_token_s and worker.decode_step_s):
            peers = _mean_speeds(workers)
        soon = _predict(worker, need, cached.get(worker.worker_id, 0), expected, peers)
        done_s = soon.prefill_s + (1 + _WAIT_CAUTION) * soon.slot_s + expected * soon.step_s
        if best is None or done_s < best_s or (done_s == best_s and _comes_first(worker, best)):
            best, best_s = worker, done_s
    return best


def predicted_ttft_s(
    worker: WorkerView,
    need: Need,
    num_cached_tokens: int = 0,
    expected_output_tokens: float = DEFAULT_OUTPUT_TOKENS,
) -> float:
    """When a worker would have the first token of a request that is sent to it now: those before it
    are prefilled, a slot comes free if there is none, its own prompt is prefilled."""
    expected = min(max(expected_output_tokens, 1.0), max(need.num_new_tokens, 1))
    soon = _predict(worker, need, num_cached_tokens, expected, None)
    return soon.prefill_s + soon.slot_s + soon.step_s


def prompts_ahead_s(worker: WorkerView) -> float:
    """How long a worker will prefill before it comes to a request that is sent to it now."""
    return worker.pending_prompt_tokens * (worker.prefill_token_s or _PREFILL_TOKEN_S)


def _predict(
    worker: WorkerView,
    need: Need,
    num_cached_tokens: int,
    expected_output_tokens: float,
    peers: _Speeds | None,
) -> _Soon:
    status = worker.status
    num_slots = status.max_num_sequences
    num_held = worker.num_held
    token_s = worker.prefill_token_s or (peers.prefill_token_s if peers else _PREFILL_TOKEN_S)
    step_s = worker.decode_step_s
    if not step_s:
        step_s = peers.decode_step_s if peers else _DECODE_STEP_S
        step_s *= 1 + _BATCH_GROWTH * num_held / max(num_slots, 1)
    own_tokens = max(need.num_context_tokens - num_cached_tokens, 1)
    slot_s = 0.0
    if num_held >= num_slots:
        num_over = worker.num_ahead(TIER_RANKS[need.tier]) - num_slots + 1
        if num_over > 0:
            # A slot comes free when one of the batch has ended.
            output_tokens = worker.mean_output_tokens or expected_output_tokens
            each_s = output_tokens * step_s / max(num_slots, 1)
            slot_s = num_over * each_s
        else:
            slot_s = _PREEMPTED_TOKENS * token_s
    return _Soon((worker.pending_prompt_tokens + own_tokens) * token_s, slot_s, step_s)


def _mean_speeds(workers: list[WorkerView]) -> _Speeds:
    prefill = [one.prefill_token_s for one in workers if one.prefill_token_s]
    decode = [one.decode_step_s for one in workers if one.decode_step_s]
    return _Speeds(
        sum(prefill) / len(prefill) if prefill else _PREFILL_TOKEN_S,
        sum(decode) / len(decode) if decode else _DECODE_STEP_S,
    )


def _comes_first(worker: WorkerView, other: WorkerView) -> bool:
    return worker.worker_id < other.worker_id


def soonest(workers: Iterable[WorkerView], need: Need) -> WorkerView | None:
    """The worker that will probably have the blocks first for a request that fits nowhere now:
    that with the most of them free, of those that could ever hold it and do not drain."""
    return max(
        (worker for worker in workers if worker.could_hold(need) and not worker.status.draining),
        key=lambda worker: (worker.free_blocks_for(need.tier), worker.worker_id),
        default=None,
    )


def longest_tokens(workers: Iterable[WorkerView]) -> int | None:
    """The longest prompt + completion that any of the workers can ever hold; None: no limit, or
    no worker to ask."""
    limits = [worker.status.max_tokens_per_request for worker in workers]
    return None if not limits or 0 in limits else max(limits)

"""Which workers are for a request where some prefer prompts and others decode. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from millrace.scheduler.fleet.worker_view import WorkerView
from millrace.scheduler.jobs.scheduled_job import ResourceRequest
from millrace.scheduler.placement.placement import PULL_OVERHEAD_S, prefill_token_s, pull_token_s
from millrace.schemas.engines import WorkerRole

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

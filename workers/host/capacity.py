"""Admission of dispatches: a worker's capacity and its rejections."""

from __future__ import annotations

from collections import Counter

from millrace.schemas.control import Dispatch, WorkerReply
from millrace.schemas.jobs import Tier
from millrace.workers.host.generations.generation import PRIORITIES

# Limit on ended requests, in multiples of the capacity. They pile up while the bus does not take
# records.
_MAX_ENDING_FACTOR = 4
# Limit on all requests here, in multiples of the capacity. The engine preempts requests of lower
# tiers.
_MAX_RUNNING_FACTOR = 2

OK = WorkerReply(ok=True)


class Capacity:
    """Counter of unfinished requests by tier.

    Up to ``capacity`` requests run or wait; requests of lower tiers are preempted for a new
    request.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_by_tier: Counter[Tier] = Counter()

    def add(self, tier: Tier) -> None:
        self._num_by_tier[tier] += 1

    def remove(self, tier: Tier) -> None:
        self._num_by_tier[tier] -= 1

    def num_held_by_tier(self) -> dict[Tier, int]:
        return {tier: number for tier, number in self._num_by_tier.items() if number}

    def rejection(self, tier: Tier, num_running: int, num_ending: int) -> WorkerReply | None:
        """Return the rejection of another request of ``tier``; None if there is room for it."""
        priority = PRIORITIES[tier]
        num_in_its_way = sum(
            number for other, number in self._num_by_tier.items() if PRIORITIES[other] >= priority
        )
        if (
            num_in_its_way >= self._capacity
            or num_running >= _MAX_RUNNING_FACTOR * self._capacity
            or num_ending >= _MAX_ENDING_FACTOR * self._capacity
        ):
            return rejected(
                "full",
                f"{num_running} requests run here, {num_in_its_way} of them of tier {tier.value} "
                f"or above, and {num_ending} end",
            )
        return None


def rejection_of_dispatch(dispatch: Dispatch, model: str) -> WorkerReply | None:
    """Return why a worker that serves ``model`` rejects a dispatch; None if it does not."""
    job, sampling = dispatch.job, dispatch.job.sampling
    if job.model != model:
        return rejected("wrong_model", f"this worker serves {model}, not {job.model}")
    if not job.prompt_token_ids or sampling.max_tokens is None or sampling.seed is None:
        return rejected("bad_request", "a dispatch needs prompt_token_ids, max_tokens and a seed")
    if job.adapter and dispatch.adapter is None:
        return rejected("bad_request", f"a dispatch needs its job's adapter, {job.adapter}")
    if dispatch.resume_token_ids and (job.pooling is not None or sampling.use_beam_search):
        what = "an embedding" if job.pooling is not None else "a beam search"
        return rejected("bad_request", f"{what} cannot resume from tokens")
    return None


def rejected(reason: str, message: str) -> WorkerReply:
    """Return the reply that rejects a command; ``reason`` is a stable word."""
    return WorkerReply(ok=False, reason=reason, message=message)


def stale(epoch: int) -> WorkerReply:
    """Return the rejection of a command for an older attempt than the one known here."""
    return rejected("stale_epoch", f"epoch {epoch} of this request is known here")

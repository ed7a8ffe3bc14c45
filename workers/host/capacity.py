"""How many requests a worker accepts, and how it rejects a dispatch."""

from __future__ import annotations

from collections import Counter

from millrace.schemas.control import Dispatch, WorkerReply
from millrace.schemas.jobs import Tier
from millrace.workers.host.generations.generation import PRIORITIES

# While the bus does not take records, ended requests pile up to this many times the capacity.
_MAX_ENDING_FACTOR = 4
# Lower tiers make way for a request, in the engine; this many times the capacity is here in all.
_MAX_RUNNING_FACTOR = 2

OK = WorkerReply(ok=True)


class Capacity:
    """Counts the requests whose outcome is open, by tier: ``capacity`` of them run or wait, and
    those of lower tiers are preempted for others."""

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
        """Why another request of ``tier`` is rejected; None if it is not."""
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
    """Why a worker that serves ``model`` rejects a dispatch; None if it does not."""
    job, sampling = dispatch.job, dispatch.job.sampling
    if job.model != model:
        return rejected("wrong_model", f"this worker serves {model}, not {job.model}")
    if not job.prompt_token_ids or sampling.max_tokens is None or sampling.seed is None:
        return rejected("bad_request", "a dispatch needs prompt_token_ids, max_tokens and a seed")
    if job.adapter and dispatch.adapter is None:
        return rejected("bad_request", f"a dispatch needs its job's adapter, {job.adapter}")
    if dispatch.resume_token_ids and (job.pooling is not None or sampling.use_beam_search):
        what = "an embedding" if job.pooling is not None else "a beam search"
        return rejected("bad_request", f"{what} has no tokens to resume behind")
    return None


def rejected(reason: str, message: str) -> WorkerReply:
    """The command is rejected; ``reason`` is a stable word."""
    return WorkerReply(ok=False, reason=reason, message=message)


def stale(epoch: int) -> WorkerReply:
    """A newer attempt than the one that the command is about is known."""
    return rejected("stale_epoch", f"epoch {epoch} of this request is known here")

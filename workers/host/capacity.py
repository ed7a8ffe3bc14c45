"""How much a worker takes, and what it answers to a dispatch that it does not."""

from __future__ import annotations

from collections import Counter

from schemas.control import Dispatch, WorkerReply
from schemas.jobs import Tier
from workers.host.generations.generation import PRIORITIES

# While the bus does not take records, ended requests pile up to this many times the capacity.
_MAX_ENDING_FACTOR = 4
# Lower tiers make way for a request, in the engine; this many times the capacity is here in all.
_MAX_RUNNING_FACTOR = 2

OK = WorkerReply(ok=True)


class Room:
    """Counts the requests whose outcome is open, by tier: ``capacity`` of them run or wait, and
    those of lower tiers make way for others."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_by_tier: Counter[Tier] = Counter()

    def enter(self, tier: Tier) -> None:
        self._num_by_tier[tier] += 1

    def leave(self, tier: Tier) -> None:
        self._num_by_tier[tier] -= 1

    def num_held_by_tier(self) -> dict[Tier, int]:
        return {tier: number for tier, number in self._num_by_tier.items() if number}

    def veto(self, tier: Tier, num_running: int, num_ending: int) -> WorkerReply | None:
        """Why another one of ``tier`` is not taken."""
        priority = PRIORITIES[tier]
        num_in_its_way = sum(
            number for other, number in self._num_by_tier.items() if PRIORITIES[other] >= priority
        )
        if (
            num_in_its_way >= self._capacity
            or num_running >= _MAX_RUNNING_FACTOR * self._capacity
            or num_ending >= _MAX_ENDING_FACTOR * self._capacity
        ):
            return no(
                "full",
                f"{num_running} requests run here, {num_in_its_way} of them of tier {tier.value} "
                f"or above, and {num_ending} end",
            )
        return None


def veto_of_dispatch(dispatch: Dispatch, model: str) -> WorkerReply | None:
    """What is wrong with a dispatch, for a worker that serves ``model``."""
    job, sampling = dispatch.job, dispatch.job.sampling
    if job.model != model:
        return no("wrong_model", f"this worker serves {model}, not {job.model}")
    if not job.prompt_token_ids or sampling.max_tokens is None or sampling.seed is None:
        return no("bad_request", "a dispatch needs prompt_token_ids, max_tokens and a seed")
    if job.pooling is not None and dispatch.resume_token_ids:
        return no("bad_request", "an embedding has no tokens to resume behind")
    return None


def no(reason: str, message: str) -> WorkerReply:
    """The command is not complied with; ``reason`` is a stable word."""
    return WorkerReply(ok=False, reason=reason, message=message)


def stale(epoch: int) -> WorkerReply:
    """A newer run than the one that the command is about is known."""
    return no("stale_epoch", f"epoch {epoch} of this request is known here")

"""Which worker a request goes to."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.need import Need
from scheduler.worker_view import WorkerView


def choose(workers: Iterable[WorkerView], need: Need) -> WorkerView | None:
    """The worker with the least outstanding tokens among those that the request fits, or None.

    One where it runs at once goes before one where it would wait; ties go by the number of
    requests and then by id, so that the same view always gives the same answer.
    """
    return min((worker for worker in workers if worker.fits(need)), key=_load, default=None)


def _load(worker: WorkerView) -> tuple[bool, int, int, str]:
    return (
        not worker.has_free_slot,
        worker.outstanding_tokens,
        worker.num_held,
        worker.worker_id,
    )


def longest_tokens(workers: Iterable[WorkerView]) -> int | None:
    """The longest prompt + completion that any of the workers can ever hold; None: no limit, or
    no worker to ask."""
    limits = [worker.status.max_tokens_per_request for worker in workers]
    return None if not limits or 0 in limits else max(limits)

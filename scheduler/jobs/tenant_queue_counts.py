"""How many jobs one tenant queue has, and who has them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TenantQueueCounts:
    """What this scheduler knows of a tenant queue of one model.

    ``num_waiting`` jobs are thought to be in the queue for whoever pulls, of which
    ``num_announced`` were announced since the last pull, less than none if a pull that waited was
    faster than the announcement (``num_announced_before``: at the beginning of the pull under way).
    ``num_here`` were pulled and not sent, ``num_ours`` pulled and not ended; ``num_others`` were
    not found by the last pull, so other schedulers and their workers have them. ``total`` is what
    was counted last, ``is_due``: a lease may have lapsed, so a pull is worth a try.
    """

    num_waiting: int = 0
    num_announced: int = 0
    num_announced_before: int = 0
    num_here: int = 0
    num_ours: int = 0
    num_others: int = 0
    total: int = 0
    is_pulled: bool = False
    pulled_s: float = 0.0
    is_due: bool = False
    idle_since_s: float | None = None

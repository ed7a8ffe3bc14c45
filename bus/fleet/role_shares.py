"""Shares of a model's workers by role, as their number changes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from millrace.schemas.engines import WorkerRole


class RoleShares(msgspec.Struct, frozen=True):
    """Target shares of the roles.

    They are those of ``first`` (empty: all workers have both roles), or with ``may_change`` those
    of the present workers.
    """

    first: tuple[WorkerRole, ...] = ()
    may_change: bool = False

    def next(self, present: Sequence[WorkerRole]) -> WorkerRole:
        """Return the role of one more worker: the role furthest below its share."""
        shares = self._shares(present)
        if not shares:
            return WorkerRole.BOTH
        there, number = Counter(present), len(present) + 1
        return max(shares, key=lambda role: shares[role] * number - there[role])

    def spare(self, present: Sequence[WorkerRole]) -> WorkerRole:
        """Return the role that should lose a worker: the role furthest above its share."""
        shares = self._shares(present)
        there, number = Counter(present), len(present) - 1
        # Of equal roles, the last named one loses a worker.
        known = [*shares, *(role for role in there if role not in shares)]
        held = [role for role in reversed(known) if there[role]]
        return max(held, key=lambda role: there[role] - shares.get(role, 0.0) * number)

    def _shares(self, present: Sequence[WorkerRole]) -> dict[WorkerRole, float]:
        of = self.first
        if self.may_change and set(present) >= set(of):
            of = tuple(present)
        return {role: count / len(of) for role, count in Counter(of).items()}


NO_ROLES = RoleShares()

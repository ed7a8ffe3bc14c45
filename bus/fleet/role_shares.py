"""How the workers of a model are shared out among roles, as their number changes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from millrace.schemas.engines import WorkerRole


class RoleShares(msgspec.Struct, frozen=True):
    """Roles in the shares that ``first`` has them in (empty: all workers have both), or, where
    ``may_change``, in those of the workers that there are."""

    first: tuple[WorkerRole, ...] = ()
    may_change: bool = False

    def next(self, present: Sequence[WorkerRole]) -> WorkerRole:
        """That of one more worker beside those of the ``present`` roles: the one which is furthest
        behind its share then."""
        shares = self._shares(present)
        if not shares:
            return WorkerRole.BOTH
        there, number = Counter(present), len(present) + 1
        return max(shares, key=lambda role: shares[role] * number - there[role])

    def spare(self, present: Sequence[WorkerRole]) -> WorkerRole:
        """That of which one may go: the one which is furthest beyond its share without it."""
        shares = self._shares(present)
        there, number = Counter(present), len(present) - 1
        # Of equals the one that was named last goes.
        known = [*shares, *(role for role in there if role not in shares)]
        held = [role for role in reversed(known) if there[role]]
        return max(held, key=lambda role: there[role] - shares.get(role, 0.0) * number)

    def _shares(self, present: Sequence[WorkerRole]) -> dict[WorkerRole, float]:
        of = self.first
        if self.may_change and set(present) >= set(of):
            of = tuple(present)
        return {role: count / len(of) for role, count in Counter(of).items()}


NO_ROLES = RoleShares()

"""Cancelled requests, remembered for a while: the cancel may come before the job does."""

from __future__ import annotations

from collections import OrderedDict

from millrace.schemas.control import Cancel, CancelReason

_MAX_REMEMBERED = 100_000


class CancelMemory:
    """The last cancels, each for ``memory_s``. Pure: the caller passes the time in.

    Cancels by the services of tenants count for jobs of their tenant. Of each tenant, and of our
    own parts, the last ``max_remembered`` are kept, so that no tenant's cancels push out another's.
    """

    def __init__(self, memory_s: float, max_remembered: int = _MAX_REMEMBERED) -> None:
        self._memory_s = memory_s
        self._max_remembered = max_remembered
        # The tenant whose last cancel is the oldest comes first.
        self._by_tenant: OrderedDict[str, OrderedDict[str, tuple[CancelReason, float]]] = (
            OrderedDict()
        )

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def add(self, cancel: Cancel, now_s: float) -> None:
        """The first reason stays; the time starts anew."""
        cancels = self._by_tenant.setdefault(cancel.tenant, OrderedDict())
        self._by_tenant.move_to_end(cancel.tenant)
        known = cancels.pop(cancel.request_id, None)
        reason = cancel.reason if known is None else known[0]
        cancels[cancel.request_id] = (reason, now_s + self._memory_s)
        while cancels:
            oldest = next(iter(cancels))
            if len(cancels) <= self._max_remembered and cancels[oldest][1] > now_s:
                break
            del cancels[oldest]
        self._forget_tenants(now_s)

    def _forget_tenants(self, now_s: float) -> None:
        """Drop all cancels of tenants that have sent none for ``memory_s``."""
        while self._by_tenant:
            tenant, cancels = next(iter(self._by_tenant.items()))
            if cancels and cancels[next(reversed(cancels))][1] > now_s:
                return
            del self._by_tenant[tenant]

    def reason(self, tenant: str, request_id: str, now_s: float) -> CancelReason | None:
        """Why a request of a tenant is not wanted any more; None: it was not cancelled."""
        for who in ("", tenant):
            cancels = self._by_tenant.get(who)
            known = None if cancels is None else cancels.get(request_id)
            if known is not None and known[1] > now_s:
                return known[0]
        return None

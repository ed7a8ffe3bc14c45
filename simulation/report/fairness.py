"""How evenly tenants of a tier were served while they competed."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from millrace.schemas.jobs import Tier
from millrace.simulation.report.columns import Columns, Flags, Floats
from millrace.simulation.report.report import Fairness

_MAX_BINS = 600
# Of shorter times there is no telling who got more: answers come whole.
_LEAST_WIDTH_S = 1.0
# Tenants that are compared with one another: those that waited for longest.
_MAX_TENANTS = 48
# A tenant that competed for less of the contested time than this says little.
_LEAST_SHARE = 0.1


def fairness_of(
    columns: Columns, tier: Tier, end_s: float, output_weight: float, memory_tokens: float
) -> Fairness | None:
    """None unless two tenants of the tier competed. ``memory_tokens`` fit all workers' caches."""
    rows = columns.of_tier(tier)
    tenants = list(dict.fromkeys(columns.tenant[rows].tolist()))
    if len(tenants) < 2:
        return None
    width_s = max(end_s / _MAX_BINS, _LEAST_WIDTH_S)
    edges_s = np.arange(0.0, end_s + width_s, width_s)
    waiting = {
        tenant: _waiting(columns, columns.of_tenant(tenant) & rows, edges_s) for tenant in tenants
    }
    tenants.sort(key=lambda tenant: -int(waiting[tenant].sum()))
    tenants = [tenant for tenant in tenants[:_MAX_TENANTS] if waiting[tenant].any()]
    if len(tenants) < 2:
        return None
    served = {}
    for tenant in tenants:
        own = columns.of_tenant(tenant) & rows
        made = columns.made_by(edges_s, own)
        served[tenant] = np.diff(columns.prefilled_by(edges_s, own) + output_weight * made)
    competing = np.array([waiting[tenant] for tenant in tenants])
    contested = competing.sum(axis=0) >= 2
    if not contested.any():
        return None
    service = np.array([served[tenant] for tenant in tenants])
    shares = _relative_service(service, competing & contested, contested)
    longest = float(columns.prompt_tokens[rows].max())
    return Fairness(
        num_tenants=len(shares),
        contested_s=float(contested.sum()) * width_s,
        jain=jain(shares),
        max_gap_tokens=_max_gap(service, competing),
        bound_tokens=2 * max(longest, output_weight * memory_tokens),
    )


def jain(shares: Floats) -> float:
    """Jain's index: 1 when all got the same, or nothing, and 1 / n when one got everything."""
    squares = float((shares**2).sum())
    return float(shares.sum()) ** 2 / (len(shares) * squares) if squares else 1.0


def _waiting(columns: Columns, rows: Flags, edges_s: Floats) -> Flags:
    """In which stretches a tenant had jobs waiting all the time, as far as five looks tell."""
    looks = [edges_s[:-1] + share * np.diff(edges_s) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    always = np.ones(len(edges_s) - 1, dtype=np.bool_)
    for times_s in looks:
        always &= columns.num_waiting_at(times_s, rows) >= 1
    return always


def _relative_service(service: Floats, competing: Flags, contested: Flags) -> Floats:
    """What each got while it competed, over the mean of all who competed then."""
    counts = np.maximum(competing.sum(axis=0), 1)
    mean = (service * competing).sum(axis=0) / counts
    enough = competing.sum(axis=1) >= max(_LEAST_SHARE * contested.sum(), 1)
    got = (service * competing).sum(axis=1)[enough]
    due = (competing * mean).sum(axis=1)[enough]
    shares: Floats = got / np.maximum(due, 1e-9)
    return shares


def _max_gap(service: Floats, competing: Flags) -> float:
    """The largest difference of service of any two over any time in which both competed."""
    largest = 0.0
    for one, other in combinations(range(len(service)), 2):
        both = competing[one] & competing[other]
        if not both.any():
            continue
        ahead = np.cumsum(np.where(both, service[one] - service[other], 0.0))
        starts = np.flatnonzero(both & ~np.concatenate([[False], both[:-1]]))
        ends = np.flatnonzero(both & ~np.concatenate([both[1:], [False]]))
        for start, end in zip(starts, ends, strict=True):
            before = ahead[start - 1] if start else 0.0
            run = np.concatenate([[before], ahead[start : end + 1]])
            largest = max(largest, float(run.max() - run.min()))
    return largest

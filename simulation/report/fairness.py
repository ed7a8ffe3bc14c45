"""Fairness among the tenants of a tier while they competed."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from millrace.schemas.jobs import Tier
from millrace.simulation.report.columns import Columns, Flags, Floats
from millrace.simulation.report.report import Fairness

_MAX_BINS = 600
# In shorter bins the shares are meaningless, as answers come whole.
_LEAST_WIDTH_S = 1.0
# Number of compared tenants: those with the longest waits.
_MAX_TENANTS = 48
# Tenants that competed for less than this share of the contested time are left out.
_LEAST_SHARE = 0.1


def fairness_of(
    columns: Columns, tier: Tier, end_s: float, output_weight: float, memory_tokens: float
) -> Fairness | None:
    """Return the fairness of a tier; None unless two of its tenants competed.

    ``memory_tokens`` is the capacity of all workers' caches together.
    """
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
    """Return Jain's index: 1 if all got the same, 1 / n if one got everything."""
    squares = float((shares**2).sum())
    return float(shares.sum()) ** 2 / (len(shares) * squares) if squares else 1.0


def _waiting(columns: Columns, rows: Flags, edges_s: Floats) -> Flags:
    """Return the bins in which a tenant had waiting jobs at each of five times."""
    looks = [edges_s[:-1] + share * np.diff(edges_s) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    always = np.ones(len(edges_s) - 1, dtype=np.bool_)
    for times_s in looks:
        always &= columns.num_waiting_at(times_s, rows) >= 1
    return always


def _relative_service(service: Floats, competing: Flags, contested: Flags) -> Floats:
    """Return each tenant's service while it competed, relative to the mean of all competing
    then."""
    counts = np.maximum(competing.sum(axis=0), 1)
    mean = (service * competing).sum(axis=0) / counts
    enough = competing.sum(axis=1) >= max(_LEAST_SHARE * contested.sum(), 1)
    got = (service * competing).sum(axis=1)[enough]
    due = (competing * mean).sum(axis=1)[enough]
    shares: Floats = got / np.maximum(due, 1e-9)
    return shares


def _max_gap(service: Floats, competing: Flags) -> float:
    """Return the largest difference in service of two tenants over any time in which both
    competed."""
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

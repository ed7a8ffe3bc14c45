"""Outcomes of a run as numpy columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.schemas.jobs import Tier
from millrace.schemas.records import Status
from millrace.simulation.outcomes import NEVER_S, RequestOutcome

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
UNFINISHED = ""


@dataclass(frozen=True)
class Columns:
    """Columns with one row a request.

    Times are in seconds, NaN for events that did not happen. ``status`` is ``UNFINISHED`` for a
    request without an end. ``left_s`` is when it stopped waiting in the queue, for any reason.
    """

    tenant: npt.NDArray[np.str_]
    tier: npt.NDArray[np.str_]
    status: npt.NDArray[np.str_]
    sent_s: Floats
    left_s: Floats
    started_s: Floats
    first_s: Floats
    end_s: Floats
    prompt_tokens: Floats
    cached_tokens: Floats
    output_tokens: Floats

    @property
    def is_done(self) -> Flags:
        return np.asarray(self.status == Status.DONE.value)

    @property
    def has_run(self) -> Flags:
        return ~np.isnan(self.started_s)

    @property
    def ttft_ms(self) -> Floats:
        return (self.first_s - self.sent_s) * 1e3

    @property
    def e2e_ms(self) -> Floats:
        return (self.end_s - self.sent_s) * 1e3

    @property
    def tpot_ms(self) -> Floats:
        """Time per output token in ms; NaN for answers of a single token."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return (self.end_s - self.first_s) * 1e3 / gaps

    def of_tier(self, tier: Tier) -> Flags:
        return np.asarray(self.tier == tier.value)

    def of_tenant(self, tenant: str) -> Flags:
        return np.asarray(self.tenant == tenant)

    def made_by(self, edges_s: Floats, rows: Flags) -> Floats:
        """Return the output tokens that some requests had by each of ``edges_s``.

        An answer's tokens are spread evenly between its first and its last.
        """
        rows = rows & ~np.isnan(self.first_s)
        first_s, tokens = self.first_s[rows], self.output_tokens[rows]
        last_s = np.where(np.isnan(self.end_s[rows]), first_s, self.end_s[rows])
        span_s = np.maximum(last_s - first_s, 1e-9)
        made = np.empty(len(edges_s))
        for place, edge_s in enumerate(edges_s):
            made[place] = (tokens * np.clip((edge_s - first_s) / span_s, 0.0, 1.0)).sum()
        return made

    def prefilled_by(self, edges_s: Floats, rows: Flags) -> Floats:
        """Return the prompt tokens computed for some requests by each of ``edges_s``.

        They count at the time of the first token.
        """
        rows = rows & ~np.isnan(self.first_s)
        order = np.argsort(self.first_s[rows])
        computed = (self.prompt_tokens[rows] - self.cached_tokens[rows])[order]
        reached = np.concatenate([[0.0], np.cumsum(computed)])
        return reached[np.searchsorted(self.first_s[rows][order], edges_s, side="right")]

    def num_waiting_at(self, times_s: Floats, rows: Flags) -> Floats:
        """Return how many of some requests were sent and not yet taken by a worker."""
        return _up_to(self.sent_s[rows], times_s) - _up_to(self.left_s[rows], times_s)

    def num_running_at(self, times_s: Floats, rows: Flags) -> Floats:
        rows = rows & self.has_run
        return _up_to(self.started_s[rows], times_s) - _up_to(self.end_s[rows], times_s)


def _up_to(events_s: Floats, times_s: Floats) -> Floats:
    known = np.sort(events_s[~np.isnan(events_s)])
    return np.searchsorted(known, times_s, side="right").astype(np.float64)


def columns_of(outcomes: Sequence[RequestOutcome]) -> Columns:
    """Return the columns of all requests that were sent."""
    sent = [one for one in outcomes if one.sent_s != NEVER_S]
    taken_s = _times([one.taken_s for one in sent])
    end_s = _times([one.end_s for one in sent])
    return Columns(
        tenant=np.array([one.request.tenant for one in sent], dtype=np.str_),
        tier=np.array([one.request.tier.value for one in sent], dtype=np.str_),
        status=np.array(
            [UNFINISHED if one.status is None else one.status.value for one in sent], dtype=np.str_
        ),
        sent_s=_times([one.sent_s for one in sent]),
        left_s=np.where(np.isnan(taken_s), end_s, taken_s),
        started_s=_times([one.started_s for one in sent]),
        first_s=_times([one.first_s for one in sent]),
        end_s=end_s,
        prompt_tokens=np.array([one.request.prompt_tokens for one in sent], dtype=np.float64),
        cached_tokens=np.array([one.num_cached_tokens for one in sent], dtype=np.float64),
        output_tokens=np.array([one.num_tokens for one in sent], dtype=np.float64),
    )


def _times(values: Sequence[float]) -> Floats:
    times = np.array(values, dtype=np.float64)
    times[times == NEVER_S] = np.nan
    return times

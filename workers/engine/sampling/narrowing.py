"""Top-k, top-p, min-p and typical sampling, as bounds on a row's logits.

All bounds are on ``(logit - largest logit) / temperature``, here called scaled logits: they are at
most 0, and ``exp`` of one is a token's weight, relative to the likeliest. Of tokens that are
equally likely at a bound, all are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from math import inf, log
from typing import NamedTuple

import torch

from schemas.sampling import SamplingParams
from workers.engine.sampling.groups import GROUP_TOKENS, GroupedLogits, ScaledRows
from workers.engine.sampling.ordering import ascending, ascending_order

_LOWEST = torch.finfo(torch.float32).min
# Rows with about as many groups of candidates are padded and sorted together: the widths are this
# many groups and its multiples by the growth.
_LEAST_WIDTH = 4
_WIDTH_GROWTH = 4
# So few groups are all sorted at once.
_FEW_GROUPS = 1_024
# A bound that comes from a sum is given this much slack, far above what rounding does to it.
_SLACK = 1e-3


class Limits(NamedTuple):
    """What narrows the rows that are drawn.

    ``log_min_p``: [num_drawn], -inf where it is off. ``sorted_rows`` (indices of drawn rows) need
    more than that, ``by_order`` says what. ``everywhere``: they are all rows that are drawn.
    """

    log_min_p: torch.Tensor
    sorted_rows: torch.Tensor
    everywhere: bool
    by_order: _OrderLimits
    any_typical: bool


class _OrderLimits(NamedTuple):
    """What takes the tokens of some rows in order, each [num_rows]: ``top_k`` (the vocabulary's
    size where it is off), ``top_p``, ``typical_p`` (float64, 1 where off) and ``log_min_p``.
    ``summed`` are the indices of those whose whole mass is wanted: top-p without top-k."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    typical_p: torch.Tensor
    log_min_p: torch.Tensor
    summed: torch.Tensor
    any_top_k: bool
    any_typical: bool

    def take(self, index: torch.Tensor) -> _OrderLimits:
        """Those of the rows ``index``; ``summed`` does not apply to them."""
        return self._replace(
            top_k=self.top_k.index_select(0, index),
            top_p=self.top_p.index_select(0, index),
            typical_p=self.typical_p.index_select(0, index),
            log_min_p=self.log_min_p.index_select(0, index),
            summed=self.summed[:0],
        )


def limits_of(params: Rows[SamplingParams], vocab_size: int, device: torch.device) -> Limits | None:
    """What narrows rows with ``params``; None if nothing does."""
    rows: list[int] = []
    summed: list[int] = []
    any_top_k = any_typical = any_min_p = False
    for i, p in enumerate(params):
        any_min_p |= p.min_p > 0
        limited = 0 < p.top_k < vocab_size
        if limited or p.top_p < 1 or p.typical_p < 1:
            if p.top_p < 1 and not limited:
                summed.append(len(rows))
            rows.append(i)
            any_top_k |= limited
            any_typical |= p.typical_p < 1
    if not rows and not any_min_p:
        return None
    log_min_p = torch.tensor(
        [log(p.min_p) if p.min_p else -inf for p in params], dtype=torch.float32, device=device
    )
    own = [params[i] for i in rows]
    index = torch.tensor(rows, dtype=torch.int64, device=device)
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in own]
    by_order = _OrderLimits(
        top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
        top_p=torch.tensor([p.top_p for p in own], dtype=torch.float64, device=device),
        typical_p=torch.tensor([p.typical_p for p in own], dtype=torch.float64, device=device),
        log_min_p=log_min_p.index_select(0, index),
        summed=torch.tensor(summed, dtype=torch.int64, device=device),
        any_top_k=any_top_k,
        any_typical=any_typical,
    )
    return Limits(log_min_p, index, len(rows) == len(params), by_order, any_typical)


class Bounds(NamedTuple):
    """The scaled logits that a row keeps: ``low`` to ``high``, each [num_rows]; ``high`` is None
    when no row has one."""

    low: torch.Tensor
    high: torch.Tensor | None

    def take(self, index: torch.Tensor) -> Bounds:
        low, high = self
        return Bounds(
            low.index_select(0, index), None if high is None else high.index_select(0, index)
        )


def narrow(logits: GroupedLogits, drawn: ScaledRows, peaks: torch.Tensor, limits: Limits) -> Bounds:
    """Bounds of the rows ``drawn`` of ``logits``; ``peaks`` [num_drawn, num_groups] are the
    largest scaled logits of their groups."""
    low = limits.log_min_p
    high = torch.full_like(low, inf) if limits.any_typical else None
    rows = limits.sorted_rows
    if not len(rows):
        return Bounds(low, high)
    if limits.everywhere:
        return _by_order(logits, drawn, peaks, limits.by_order)
    own = _by_order(logits, drawn.take(rows), peaks.index_select(0, rows), limits.by_order)
    low = low.index_copy(0, rows, own.low)
    if high is not None and own.high is not None:
        high.index_copy_(0, rows, own.high)
    return Bounds(low, high)


def _by_order(
    logits: GroupedLogits, rows: ScaledRows, peaks: torch.Tensor, limits: _OrderLimits
) -> Bounds:
    """Bounds of rows of which the tokens are taken in order; all arguments are of these rows."""
    floors, masses = _floors(logits, rows, peaks, limits)
    low = torch.empty_like(floors)
    high = torch.full_like(low, inf) if limits.any_typical else None
    for index, groups, present in _by_width(peaks >= floors[:, None]):
        if index is None:
            return _in_order(logits, rows, groups, present, floors, masses, limits)
        bounds = _in_order(
            logits,
            rows.take(index),
            groups,
            present,
            floors.index_select(0, index),
            masses.index_select(0, index),
            limits.take(index),
        )
        low.index_copy_(0, index, bounds.low)
        if high is not None and bounds.high is not None:
            high.index_copy_(0, index, bounds.high)
    return Bounds(low, high)


def _floors(
    logits: GroupedLogits, rows: ScaledRows, peaks: torch.Tensor, limits: _OrderLimits
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled logits below which certainly no token stays, and the mass (float64) that top-p is a
    share of, NaN where it is that of what top-k leaves."""
    floors = torch.full_like(rows.best, _LOWEST)
    if limits.any_top_k:
        # The k largest are in the k groups with the largest peaks.
        kth = (limits.top_k - 1).clamp_(max=logits.num_groups - 1)
        floors = -ascending(-peaks).gather(1, kth[:, None])[:, 0]
        floors = floors.masked_fill_(limits.top_k > logits.num_groups, _LOWEST).clamp_(min=_LOWEST)
    masses = torch.full_like(limits.top_p, torch.nan)
    summed = limits.summed
    if len(summed):
        # What weighs less than this makes up less than 1 - top_p even if it were all tokens.
        own = logits.masses(rows.take(summed))
        spare = (1 - limits.top_p.index_select(0, summed)) * own
        num_tokens = logits.num_groups * GROUP_TOKENS
        lowest = ((spare / num_tokens).log_() - _SLACK).float().clamp_(min=_LOWEST)
        masses.index_copy_(0, summed, own)
        floors.index_copy_(0, summed, lowest)
    return floors, masses


def _by_width(
    chosen: torch.Tensor,
) -> Iterator[tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]]:
    """The columns that are ``chosen`` [num_rows, num_columns], rows with about as many together.

    Yields the rows (None: all), their columns [num, width] padded with 0, and which of these are
    no padding (None: all).
    """
    device = chosen.device
    counts = chosen.sum(-1)
    fewest, most = (max(1, int(count)) for count in counts.aminmax())
    row, column = chosen.nonzero(as_tuple=True)
    if fewest == most:
        yield None, column.view(len(counts), most), None
        return
    rank = torch.arange(len(row), device=device) - (counts.cumsum(0) - counts)[row]
    least, width = -1, _LEAST_WIDTH
    if most * len(counts) <= _FEW_GROUPS:
        width = most
    while least < most:
        width = min(width, most)
        own = (counts > least) & (counts <= width)
        index = own.nonzero()[:, 0]
        if len(index):
            inside = own[row]
            place = (own.cumsum(0) - 1)[row[inside]]
            columns = torch.zeros(len(index), width, dtype=torch.int64, device=device)
            columns[place, rank[inside]] = column[inside]
            present = torch.arange(width, device=device) < counts[index, None]
            yield index, columns, present
        least, width = width, width * _WIDTH_GROWTH


def _in_order(
    logits: GroupedLogits,
    rows: ScaledRows,
    groups: torch.Tensor,
    present: torch.Tensor | None,
    floors: torch.Tensor,
    masses: torch.Tensor,
    limits: _OrderLimits,
) -> Bounds:
    """Top-k, top-p, min-p, typical, one after the other, each on what the one before it left.

    ``groups`` [num_rows, width], as far as they are ``present``, hold all that may stay.
    """
    num_rows, width = groups.shape
    values = logits.select(rows.rows.repeat_interleave(width), groups.view(-1))
    values = values.view(num_rows, width, GROUP_TOKENS)
    values -= rows.best[:, None, None]
    values /= rows.scales[:, None, None]
    if present is not None:
        values.masked_fill_(~present[:, :, None], -inf)
    # Negated scaled logits, in rising order.
    gaps = ascending(values.view(num_rows, -1).neg_())
    counts = torch.searchsorted(gaps, -floors[:, None], right=True)
    gaps = gaps[:, : max(1, int(counts.max()))]
    last = (counts - 1).clamp_(min=0)
    weights = gaps.neg().exp_()
    low = limits.log_min_p
    if limits.any_top_k:
        edge = gaps.gather(1, torch.minimum(limits.top_k[:, None] - 1, last))
        weights.masked_fill_(gaps > edge, 0.0)
        low = torch.maximum(low, -edge[:, 0])
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    masses = torch.where(masses.isnan(), cumulative[:, -1], masses)
    reached = torch.searchsorted(cumulative, (limits.top_p * masses)[:, None])
    edge = gaps.gather(1, torch.minimum(reached, last))[:, 0]
    low = torch.maximum(low, (-edge).masked_fill_(limits.top_p == 1, -inf))
    if not limits.any_typical:
        return Bounds(low, None)
    high = torch.full_like(low, inf)
    own = (limits.typical_p < 1).nonzero()[:, 0]
    low[own], high[own] = _typical(gaps[own], low[own], limits.typical_p[own])
    return Bounds(low, high)


def _typical(
    gaps: torch.Tensor, low: torch.Tensor, typical_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Locally typical sampling (Meister et al., "Locally Typical Sampling", TACL 2023): of the
    tokens that are not below ``low``, those whose surprise is nearest to the entropy, as many as
    have ``typical_p`` of the mass. They are neighbours in ``gaps``."""
    weights = gaps.double().neg_().exp_().masked_fill_(gaps > -low[:, None], 0.0)
    shares = weights / weights.sum(-1, keepdim=True)
    entropy = -torch.xlogy(shares, shares).sum(-1, keepdim=True)
    distances = (shares.log() + entropy).abs_().masked_fill_(shares == 0, inf)
    order = ascending_order(distances)
    reached = torch.searchsorted(shares.gather(1, order).cumsum(-1), typical_p[:, None])
    last = (shares > 0).sum(-1, keepdim=True) - 1
    farthest = distances.gather(1, order.gather(1, torch.minimum(reached, last).clamp_(min=0)))
    outside = distances > farthest
    nearest = gaps.masked_fill(outside, inf).amin(-1)
    return -gaps.masked_fill(outside, -inf).amax(-1), -nearest

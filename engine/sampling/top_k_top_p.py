"""Top-k, top-p, min-p and typical sampling, as bounds on a row's logits.

All bounds are on scaled logits, ``(logit - largest logit) / temperature``. They are at most 0, and
``exp`` of one is a token's weight relative to the likeliest. All tokens that are equally likely at
a bound are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from math import inf, log
from typing import NamedTuple

import numpy as np
import torch

from millrace.engine.sampling.groups import GROUP_TOKENS, GroupedLogits, ScaledRows
from millrace.schemas.sampling import SamplingParams

_LOWEST = torch.finfo(torch.float32).min
# Rows with similar numbers of candidate groups are padded and sorted together. The widths are this
# many groups, multiplied by the growth again and again.
_LEAST_WIDTH = 4
_WIDTH_GROWTH = 4
# Number of the likeliest tokens among which bounds are searched first.
_FEW_TOKENS = 64
_MANY_TOKENS = 256
# Slack of a bound that is derived from a sum, far above its rounding error.
_SLACK = 1e-3


def ascending(values: torch.Tensor) -> torch.Tensor:
    """Sort each row in rising order. NaN is not expected."""
    if values.device.type != "cpu":
        return values.sort(dim=-1).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1))


def smallest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ``count`` smallest of each row, or as many as it has, in rising order."""
    count = min(count, values.shape[1])
    if values.device.type != "cpu":
        return values.topk(count, dim=-1, largest=False).values
    parted = np.partition(values.numpy(), count - 1, axis=-1)[:, :count]
    return torch.from_numpy(np.sort(parted, axis=-1))


def ascending_order(values: torch.Tensor) -> torch.Tensor:
    """Return the indices (int64) that sort each row in rising order.

    On a CPU, rows that first fall and then rise are only merged.
    """
    if values.device.type != "cpu":
        return values.argsort(dim=-1)
    return torch.from_numpy(np.argsort(values.numpy(), axis=-1, kind="stable"))


class Limits(NamedTuple):
    """Filters of the drawn rows.

    Attributes:
        log_min_p: [num_drawn], -inf where it is off.
        sorted_rows: Indices of the drawn rows with other filters than min-p.
        everywhere: True if ``sorted_rows`` are all drawn rows.
        by_order: The filters of ``sorted_rows``.
        any_typical: True if a row has typical sampling.
    """

    log_min_p: torch.Tensor
    sorted_rows: torch.Tensor
    everywhere: bool
    by_order: _OrderLimits
    any_typical: bool


class _OrderLimits(NamedTuple):
    """Filters that need the tokens of some rows in order, each [num_rows].

    Attributes:
        top_k: The vocabulary's size where it is off.
        top_p, typical_p: float64, 1 where off.
        log_min_p: -inf where it is off.
        summed: Indices of the rows that need the whole mass: top-p without top-k.
        only_typical: Indices of the rows with neither top-k nor top-p.
        few: True if all rows have a top-k that keeps few tokens.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    typical_p: torch.Tensor
    log_min_p: torch.Tensor
    summed: torch.Tensor
    only_typical: torch.Tensor
    any_top_k: bool
    any_typical: bool
    few: bool

    def take(self, index: torch.Tensor) -> _OrderLimits:
        """Select the rows ``index``. ``summed`` and ``only_typical`` become empty."""
        return self._replace(
            top_k=self.top_k.index_select(0, index),
            top_p=self.top_p.index_select(0, index),
            typical_p=self.typical_p.index_select(0, index),
            log_min_p=self.log_min_p.index_select(0, index),
            summed=self.summed[:0],
            only_typical=self.only_typical[:0],
        )


def limits_of(params: Rows[SamplingParams], vocab_size: int, device: torch.device) -> Limits | None:
    """Make the filters of rows with ``params``; None if there are none."""
    rows: list[int] = []
    summed: list[int] = []
    only_typical: list[int] = []
    any_top_k = any_typical = any_min_p = False
    for i, p in enumerate(params):
        any_min_p |= p.min_p > 0
        limited = 0 < p.top_k < vocab_size
        if limited or p.top_p < 1 or p.typical_p < 1:
            if p.top_p < 1 and not limited:
                summed.append(len(rows))
            elif not limited:
                only_typical.append(len(rows))
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
        only_typical=torch.tensor(only_typical, dtype=torch.int64, device=device),
        any_top_k=any_top_k,
        any_typical=any_typical,
        few=max(top_k, default=0) < _FEW_TOKENS,
    )
    return Limits(log_min_p, index, len(rows) == len(params), by_order, any_typical)


class Bounds(NamedTuple):
    """Range of scaled logits that a row keeps, ``low`` to ``high``, each [num_rows].

    ``high`` is None if no row has one.
    """

    low: torch.Tensor
    high: torch.Tensor | None

    def take(self, index: torch.Tensor) -> Bounds:
        low, high = self
        return Bounds(
            low.index_select(0, index), None if high is None else high.index_select(0, index)
        )


def filter_top_k_top_p(
    logits: GroupedLogits, drawn: ScaledRows, peaks: torch.Tensor, limits: Limits
) -> Bounds:
    """Compute the bounds of the rows ``drawn`` of ``logits``.

    ``peaks`` [num_drawn, num_groups] are the largest scaled logits of their groups.
    """
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
    """Compute the bounds of rows that need their tokens in order. All arguments are of these rows.

    The bounds are searched among the likeliest tokens first, where they nearly always are.
    """
    width = _FEW_TOKENS if limits.few else _MANY_TOKENS
    gaps, masses = _nearest(logits, rows, peaks, limits, width)
    counts = (gaps < inf).sum(-1, keepdim=True)
    bounds = _in_order(gaps, counts, masses, limits)
    done = _has_all(gaps, masses, limits)
    only = limits.only_typical
    if len(only) and bounds.high is not None:
        low, high, certain = _typical_of_nearest(
            logits, rows.take(only), gaps.index_select(0, only), limits.take(only)
        )
        bounds.low.index_copy_(0, only, low)
        bounds.high.index_copy_(0, only, high)
        done.index_copy_(0, only, certain)
    rest = (~done).nonzero()[:, 0]
    if len(rest) and gaps.shape[1] < logits.num_groups * GROUP_TOKENS:
        own = _among_all(
            logits,
            rows.take(rest),
            peaks.index_select(0, rest),
            masses.index_select(0, rest),
            limits.take(rest),
        )
        bounds.low.index_copy_(0, rest, own.low)
        if bounds.high is not None and own.high is not None:
            bounds.high.index_copy_(0, rest, own.high)
    return bounds


def _nearest(
    logits: GroupedLogits,
    rows: ScaledRows,
    peaks: torch.Tensor,
    limits: _OrderLimits,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``width`` smallest gaps of each row in rising order, and the mass for top-p.

    A gap is a negated scaled logit. The mass is float64, and NaN where top-p applies to the tokens
    that top-k keeps.
    """
    masses = torch.full_like(limits.top_p, torch.nan)
    summed = limits.summed
    if logits.num_groups >= 2 * width:
        # The groups with the largest peaks have the likeliest tokens.
        if len(summed):
            masses.index_copy_(0, summed, logits.masses(rows.take(summed)))
        values = logits.scaled(rows, peaks.topk(width).indices)
    else:
        values = logits.scaled(rows)
        if len(summed):
            own = values if len(summed) == len(values) else values.index_select(0, summed)
            masses.index_copy_(0, summed, own.exp().sum(-1).sum(-1, dtype=torch.float64))
    return smallest(values.view(len(values), -1).neg_(), width), masses


def _has_all(gaps: torch.Tensor, masses: torch.Tensor, limits: _OrderLimits) -> torch.Tensor:
    """Return whether ``gaps`` has all tokens that each row may keep."""
    last = gaps[:, -1]
    kth = gaps.gather(1, (limits.top_k[:, None] - 1).clamp_(max=gaps.shape[1] - 1))[:, 0]
    enough = (kth < last).logical_or_(last == inf)
    if len(limits.summed):
        inside = gaps.neg().exp_().sum(-1, dtype=torch.float64)
        enough.logical_or_(inside >= limits.top_p * masses)
    return enough


def _among_all(
    logits: GroupedLogits,
    rows: ScaledRows,
    peaks: torch.Tensor,
    masses: torch.Tensor,
    limits: _OrderLimits,
) -> Bounds:
    """Compute the bounds of rows that keep many tokens, by sorting all candidates."""
    floors = _floors(logits, peaks, masses, limits)
    low = torch.empty_like(floors)
    high = torch.full_like(low, inf) if limits.any_typical else None
    for index, groups, present in _by_width(peaks >= floors[:, None]):
        values = logits.scaled(rows.take(index), groups)
        if present is not None:
            values.masked_fill_(~present[:, :, None], -inf)
        gaps = ascending(values.view(len(values), -1).neg_())
        counts = torch.searchsorted(gaps, -floors[index, None], right=True)
        gaps = gaps[:, : max(1, int(counts.max()))]
        bounds = _in_order(gaps, counts, masses.index_select(0, index), limits.take(index))
        low.index_copy_(0, index, bounds.low)
        if high is not None and bounds.high is not None:
            high.index_copy_(0, index, bounds.high)
    return Bounds(low, high)


def _floors(
    logits: GroupedLogits, peaks: torch.Tensor, masses: torch.Tensor, limits: _OrderLimits
) -> torch.Tensor:
    """Compute scaled logits below which a row certainly keeps no token."""
    floors = torch.full_like(limits.log_min_p, _LOWEST)
    if limits.any_top_k:
        # The groups with the k largest peaks have the k largest logits.
        kth = (limits.top_k - 1).clamp_(max=logits.num_groups - 1)
        floors = -ascending(-peaks).gather(1, kth[:, None])[:, 0]
        floors = floors.masked_fill_(limits.top_k > logits.num_groups, _LOWEST).clamp_(min=_LOWEST)
    # Tokens of a smaller weight sum to less than 1 - top_p, even if all tokens had it.
    spare = (1 - limits.top_p) * masses / (logits.num_groups * GROUP_TOKENS)
    nucleus = (spare.log_() - _SLACK).float().clamp_(min=_LOWEST)
    return torch.where(masses.isnan(), floors, nucleus)


def _by_width(
    chosen: torch.Tensor,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield the ``chosen`` [num_rows, num_columns] columns, for rows with similar numbers of them
    together.

    Yields:
        The rows, their columns [num, width] padded with 0, and a mask of columns that are not
            padding, None if all are.
    """
    device = chosen.device
    counts = chosen.sum(-1)
    fewest, most = (int(count) for count in counts.aminmax())
    row, column = chosen.nonzero(as_tuple=True)
    if fewest == most:
        yield torch.arange(len(counts), device=device), column.view(len(counts), most), None
        return
    rank = torch.arange(len(row), device=device) - (counts.cumsum(0) - counts)[row]
    least, width = -1, _LEAST_WIDTH
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
    gaps: torch.Tensor, counts: torch.Tensor, masses: torch.Tensor, limits: _OrderLimits
) -> Bounds:
    """Apply top-k, top-p, min-p and typical sampling in turn, each to the tokens that remain.

    ``gaps`` are negated scaled logits in rising order. The first ``counts`` [num_rows, 1] include
    all tokens that may stay.
    """
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
    """Apply locally typical sampling (Meister et al., "Locally Typical Sampling", TACL 2023).

    Of the tokens not below ``low``, keep the ones with the surprise nearest to the entropy, until
    they have ``typical_p`` of the mass. They are neighbours in ``gaps``.
    """
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


def _typical_of_nearest(
    logits: GroupedLogits, rows: ScaledRows, gaps: torch.Tensor, limits: _OrderLimits
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply typical sampling, after min-p at most, to the likeliest tokens of each row, ``gaps``.

    The entropy is that of the whole row.

    Returns:
        Low and high bounds, and whether no other token may be nearer to the entropy than the kept
            ones.
    """
    values = logits.scaled(rows)
    weights = values.exp().masked_fill_(values < limits.log_min_p[:, None, None], 0.0)
    mass = weights.sum(-1).sum(-1, dtype=torch.float64)
    mean = weights.mul_(values.clamp_(min=_LOWEST)).sum(-1).sum(-1, dtype=torch.float64) / mass
    # The surprise of a token is its gap + log(mass). The entropy is the mean surprise, log(mass) -
    # mean.
    entropy = -mean[:, None]
    distances = (gaps - entropy).abs_()
    distances.masked_fill_(gaps > -limits.log_min_p[:, None], inf)
    shares = gaps.double().neg_().exp_() / mass[:, None]
    order = ascending_order(distances)
    cumulative = shares.gather(1, order).cumsum(-1)
    reached = torch.searchsorted(cumulative, limits.typical_p[:, None])
    reached = reached.clamp_(max=gaps.shape[1] - 1)
    farthest = distances.gather(1, order.gather(1, reached))
    outside = distances > farthest
    certain = farthest < gaps[:, -1:] - entropy
    most = gaps.masked_fill(outside, -inf).amax(-1)
    least = gaps.masked_fill(outside, inf).amin(-1)
    return -most, -least, certain[:, 0]

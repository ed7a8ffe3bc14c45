"""One draw for each row.

A race for the group, then one within it: the largest weight / exponential variate wins, each with
a chance proportional to its weight. Rounding noise changes the outcome only when two entries
nearly tie. Inverting the distribution function would take one random number, but there noise moves
every boundary behind it, and a batch of another size did change a token of the demo model.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch

from millrace.engine.kernels.random_stream import uniforms
from millrace.engine.sampling.groups import (
    GROUP_TOKENS,
    GroupedLogits,
    ScaledRows,
    first_largest,
)
from millrace.engine.sampling.top_k_top_p import (
    Bounds,
    Limits,
    filter_top_k_top_p,
    limits_of,
)
from millrace.schemas.sampling import SamplingParams

# No group weighs more than this many times its likeliest token, rounding included.
_MOST_OF_PEAK = GROUP_TOKENS * (1 + 1e-4)


class Draws(NamedTuple):
    """The rows of a batch that are drawn, not taken greedily: their indices, temperatures and
    keys of random streams, each [num_drawn], and what narrows them."""

    rows: torch.Tensor
    temperatures: torch.Tensor
    keys: torch.Tensor
    limits: Limits | None


def draws_of(
    rows: Rows[int],
    params: Rows[SamplingParams],
    keys: Rows[int],
    vocab_size: int,
    device: torch.device,
) -> Draws:
    """``params`` and ``keys`` are those of the ``rows``."""
    return Draws(
        rows=torch.tensor(rows, dtype=torch.int64, device=device),
        temperatures=torch.tensor(
            [p.temperature for p in params], dtype=torch.float32, device=device
        ),
        keys=torch.tensor(keys, dtype=torch.int64, device=device),
        limits=limits_of(params, vocab_size, device),
    )


def draw(logits: GroupedLogits, draws: Draws, token_indices: torch.Tensor) -> torch.Tensor:
    """A token for each row of ``draws``: int64 [num_drawn]. ``token_indices`` (int64) say which
    number of each row's stream it is. ``logits`` must have a token left in each of these rows.

    The exact weight of a group is computed only if the group may win: its likeliest token bounds
    it, and the group with the largest bound is what the others have to beat.
    """
    num_drawn = len(draws.rows)
    everywhere = num_drawn == len(logits.best)
    best, tops = logits.best, logits.tops
    if not everywhere:
        best, tops = best.index_select(0, draws.rows), tops.index_select(0, draws.rows)
    scales = draws.temperatures
    rows = ScaledRows(draws.rows, best, scales)
    # Never divides a finite difference into an overflow: the largest exponent is 0.
    peaks = tops.sub(best[:, None]).div_(scales[:, None])
    bounds = None
    if draws.limits is not None:
        bounds = filter_top_k_top_p(logits, rows, peaks, draws.limits)
    times = uniforms(draws.keys, token_indices, GROUP_TOKENS + logits.num_groups).log_().neg_()
    member_times, group_times = times[:, :GROUP_TOKENS], times[:, GROUP_TOKENS:]
    most = _largest_weights(peaks, bounds).double().div_(group_times)
    front = first_largest(most)[:, None]
    leading = _weights(logits, rows, front[:, 0], bounds).sum(-1, keepdim=True)
    leading = leading / group_times.gather(1, front)
    may_win = (most * _MOST_OF_PEAK >= leading).logical_and_(most > 0)
    places = may_win.view(-1).nonzero()[:, 0]
    row, group = places // logits.num_groups, places % logits.num_groups
    weights = _weights(logits, rows.take(row), group, None if bounds is None else bounds.take(row))
    scores = torch.zeros_like(most)
    scores.view(-1)[places] = weights.sum(-1) / group_times[row, group]
    winner = first_largest(scores)
    member = first_largest(_weights(logits, rows, winner, bounds) / member_times)
    return winner * GROUP_TOKENS + member


def _weights(
    logits: GroupedLogits, rows: ScaledRows, groups: torch.Tensor, bounds: Bounds | None
) -> torch.Tensor:
    """Weights of the tokens of one group of each of the ``rows``: [num_rows, GROUP_TOKENS]."""
    scaled = logits.select(rows.rows, groups)
    scaled -= rows.best[:, None]
    scaled /= rows.scales[:, None]
    weights = scaled.exp()
    if bounds is not None:
        weights.masked_fill_(scaled < bounds.low[:, None], 0.0)
        if bounds.high is not None:
            weights.masked_fill_(scaled > bounds.high[:, None], 0.0)
    return weights


def _largest_weights(peaks: torch.Tensor, bounds: Bounds | None) -> torch.Tensor:
    """What no token of a group weighs more than: [num_drawn, num_groups]."""
    if bounds is None:
        return peaks.exp()
    capped = peaks if bounds.high is None else torch.minimum(peaks, bounds.high[:, None])
    return capped.exp().masked_fill_(peaks < bounds.low[:, None], 0.0)

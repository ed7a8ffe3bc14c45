"""Random draw of one token for each row, by races of exponential variates.

A race draws the group, and another race the token within it: the largest weight / exponential
variate wins, so each entry wins with a probability proportional to its weight. Rounding noise
changes the outcome only when two entries nearly tie. Inverting the distribution function would take
one random number, but rounding noise would move every boundary after it; with it, a batch of
another size changed a token of the demo model.
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

# Maximum weight of a group relative to its likeliest token, rounding included.
_MOST_OF_PEAK = GROUP_TOKENS * (1 + 1e-4)


class Draws(NamedTuple):
    """Rows of a batch that are drawn at random, not greedily.

    Attributes:
        rows: Their indices, [num_drawn].
        temperatures: [num_drawn].
        keys: Keys of their random streams, [num_drawn].
        limits: Filters of their tokens; None if there are none.
    """

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
    """Make the draws of ``rows``, which have these ``params`` and ``keys``."""
    return Draws(
        rows=torch.tensor(rows, dtype=torch.int64, device=device),
        temperatures=torch.tensor(
            [p.temperature for p in params], dtype=torch.float32, device=device
        ),
        keys=torch.tensor(keys, dtype=torch.int64, device=device),
        limits=limits_of(params, vocab_size, device),
    )


def draw(logits: GroupedLogits, draws: Draws, token_indices: torch.Tensor) -> torch.Tensor:
    """Draw a token for each row of ``draws``: int64 [num_drawn].

    ``token_indices`` (int64) are the positions in each row's random stream. In ``logits``, each of
    these rows must have an allowed token. The exact weight of a group is computed only if the group
    may win. Its likeliest token bounds the weight, and the group with the largest bound sets the
    score to beat.
    """
    num_drawn = len(draws.rows)
    everywhere = num_drawn == len(logits.best)
    best, tops = logits.best, logits.tops
    if not everywhere:
        best, tops = best.index_select(0, draws.rows), tops.index_select(0, draws.rows)
    scales = draws.temperatures
    rows = ScaledRows(draws.rows, best, scales)
    # A finite difference never overflows when divided, since the largest exponent is 0.
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
    """Compute the weights of the tokens of one group of each row: [num_rows, GROUP_TOKENS]."""
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
    """Compute the largest weight that a token of each group may have: [num_drawn, num_groups]."""
    if bounds is None:
        return peaks.exp()
    capped = peaks if bounds.high is None else torch.minimum(peaks, bounds.high[:, None])
    return capped.exp().masked_fill_(peaks < bounds.low[:, None], 0.0)

"""Sampling by the plain definitions: one row, everything sorted, in float64."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt

from millrace.schemas.sampling import SamplingParams

Row = npt.NDArray[np.float64]


def processed(
    logits: Row,
    sampling: SamplingParams,
    prompt: Rows[int] = (),
    output: Rows[int] = (),
    stops: Rows[int] = (),
    bad: Rows[tuple[int, ...]] = (),
    allowed: frozenset[int] | None = None,
) -> Row:
    """Return the logits after penalties, biases and forbidden tokens; ``bad`` are token
    sequences."""
    processed = logits.astype(np.float64)
    for token in {*prompt, *output}:
        value, penalty = processed[token], sampling.repetition_penalty
        processed[token] = value / penalty if value > 0 else value * penalty
    for token, count in Counter(output).items():
        processed[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    for token, bias in sampling.logit_bias.items():
        processed[token] += bias
    if len(output) < sampling.min_tokens:
        processed[list(stops)] = -math.inf
    for *prefix, last in bad:
        if len(prefix) <= len(output) and list(output[len(output) - len(prefix) :]) == prefix:
            processed[last] = -math.inf
    if allowed is not None:
        processed[[token for token in range(len(processed)) if token not in allowed]] = -math.inf
    return processed


def distribution(logits: Row, sampling: SamplingParams) -> Row:
    """Return the distribution of draws: temperature, top-k, top-p, min-p, typical, in that
    order."""
    scaled = (logits - logits.max()) / sampling.temperature
    weights = np.exp(scaled)
    if 0 < sampling.top_k < len(weights):
        weights[weights < np.sort(weights)[-sampling.top_k]] = 0
    if sampling.top_p < 1:
        ordered = -np.sort(-weights)
        reached = int(np.argmax(np.cumsum(ordered) >= sampling.top_p * weights.sum()))
        weights[weights < ordered[reached]] = 0
    weights[weights < sampling.min_p] = 0
    if sampling.typical_p < 1:
        weights[~_typical(weights / weights.sum(), sampling.typical_p)] = 0
    shares: Row = weights / weights.sum()
    return shares


def _typical(shares: Row, typical_p: float) -> npt.NDArray[np.bool_]:
    surprise = np.full_like(shares, math.inf)
    surprise[shares > 0] = -np.log(shares[shares > 0])
    entropy = float((shares[shares > 0] * surprise[shares > 0]).sum())
    distance = np.abs(surprise - entropy)
    order = np.argsort(distance)
    cumulative = np.cumsum(shares[order])
    reached = min(int((cumulative < typical_p).sum()), int((shares > 0).sum()) - 1)
    inside: npt.NDArray[np.bool_] = distance <= distance[order[reached]]
    return inside


def chi_square_limit(degrees: int) -> float:
    """Return the 99.9 % quantile by Wilson and Hilferty's approximation."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.09 * math.sqrt(spread)) ** 3


def chi_square(counts: Row, expected: Row) -> tuple[float, float]:
    """Return the statistic of drawn ``counts`` against the ``expected`` shares, and its limit.
    Tokens that are expected less than five times count together."""
    num_draws = counts.sum()
    wanted = expected * num_draws
    common = wanted >= 5
    statistic = float(((counts - wanted) ** 2 / np.where(common, wanted, 1))[common].sum())
    rest = float(wanted[~common].sum())
    if rest >= 5:
        statistic += (float(counts[~common].sum()) - rest) ** 2 / rest
    return statistic, chi_square_limit(max(1, int(common.sum())))

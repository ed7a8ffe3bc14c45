"""The next token of every sequence of a batch, vectorised."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from schemas.frames import TokenLogprob
from schemas.sampling import SamplingParams
from workers.engine.random_stream import uniforms

# Rows of the vocabulary are reduced in two levels, by groups of this many tokens: a sum over
# groups runs at memory speed, where a running sum or an argmax over the whole row does not.
_GROUP_TOKENS = 64
# Most of the probability is almost always in this many tokens; the others are sorted only if not.
_NUCLEUS_GUESS_TOKENS = 64


class SampleRow(NamedTuple):
    """How to draw one row: its parameters, the key of its random stream (``stream_key`` of its
    seed), and the index of the token."""

    sampling: SamplingParams
    key: int
    token_index: int


class Sampled(NamedTuple):
    """``token_ids[i]`` is None for a row whose logits are not finite; ``logprobs[i]`` is None
    unless asked for."""

    token_ids: list[int | None]
    logprobs: list[TokenLogprob | None]


def sample(logits: torch.Tensor, rows: Rows[SampleRow]) -> Sampled:
    """Draw one token for each row of ``logits`` [num_rows, vocab_size].

    Temperature, then top-k, top-p and min-p narrow the distribution; of tokens that are equally
    likely at the edge, all are kept. A row's draw depends on its logits, its parameters and its
    (key, token index) alone. Log-probabilities are those of the model itself, before any of this.
    """
    logits = logits.float()
    groups = _grouped(logits, float("-inf"))
    best_of_group = groups.amax(-1)
    best = best_of_group.amax(-1)
    chosen = _argmax(groups, best_of_group)
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
    if len(drawn) == len(rows):
        chosen = _draw(logits, best, rows)
    elif drawn:
        index = torch.tensor(drawn, device=logits.device)
        picked = _draw(logits[index], best[index], [rows[i] for i in drawn])
        chosen[index] = picked
    finite = torch.isfinite(best).tolist()
    token_ids: list[int | None] = [
        token if good else None for token, good in zip(chosen.tolist(), finite, strict=True)
    ]
    return Sampled(token_ids, _logprobs(logits, rows, token_ids))


def _grouped(values: torch.Tensor, padding: float) -> torch.Tensor:
    """[num_rows, vocab_size] as [num_rows, num_groups, _GROUP_TOKENS]."""
    missing = -values.shape[1] % _GROUP_TOKENS
    if missing:
        values = F.pad(values, (0, missing), value=padding)
    return values.view(len(values), -1, _GROUP_TOKENS)


def _group(groups: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """One group of each row: [num_rows, _GROUP_TOKENS]."""
    return groups[torch.arange(len(groups), device=groups.device), index]


def _argmax(groups: torch.Tensor, best_of_group: torch.Tensor) -> torch.Tensor:
    group = best_of_group.argmax(-1)
    return group * _GROUP_TOKENS + _group(groups, group).argmax(-1)


def _draw(logits: torch.Tensor, best: torch.Tensor, rows: Rows[SampleRow]) -> torch.Tensor:
    """A race for the group, then one within it: the largest weight / exponential variate wins,
    each with a chance proportional to its weight.

    Rounding noise changes the outcome only when two entries nearly tie. Inverting the distribution
    function would take one random number, but there noise moves every boundary behind it, and a
    batch of another size did change a token of the demo model.
    """
    device = logits.device
    temperatures = torch.tensor([row.sampling.temperature for row in rows], device=device)
    # Never divides a finite difference into an overflow: the largest exponent is 0.
    weights = ((logits - best[:, None]) / temperatures[:, None]).exp_()
    weights = _narrowed(weights, [row.sampling for row in rows])
    groups = _grouped(weights, 0.0)
    keys = torch.tensor([row.key for row in rows], device=device)
    indices = torch.tensor([row.token_index for row in rows], device=device)
    times = -uniforms(keys, indices, _GROUP_TOKENS + groups.shape[1]).log_()
    group = (groups.sum(-1, dtype=torch.float64) / times[:, _GROUP_TOKENS:]).argmax(-1)
    member = (_group(groups, group) / times[:, :_GROUP_TOKENS]).argmax(-1)
    return group * _GROUP_TOKENS + member


def _narrowed(weights: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Zero the weights outside top-k, then top-p, then min-p. The largest weight is 1."""
    device = weights.device
    vocab_size = weights.shape[1]
    limited = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if limited:
        index = torch.tensor(limited, device=device)
        counts = torch.tensor([params[i].top_k for i in limited], device=device)
        kept = weights[index]
        largest = kept.topk(int(counts.max()), dim=-1).values
        floor = largest.gather(1, counts[:, None] - 1)
        weights[index] = kept.masked_fill_(kept < floor, 0.0)
    nucleus = [i for i, p in enumerate(params) if p.top_p < 1]
    if nucleus:
        index = torch.tensor(nucleus, device=device)
        shares = torch.tensor([params[i].top_p for i in nucleus], device=device)
        kept = weights[index]
        weights[index] = kept.masked_fill_(kept < _nucleus_floor(kept, shares), 0.0)
    if any(p.min_p > 0 for p in params):
        floor = torch.tensor([p.min_p for p in params], device=device)
        weights = weights.masked_fill(weights < floor[:, None], 0.0)
    return weights


def _nucleus_floor(weights: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The smallest weight in each row's nucleus: the fewest tokens with ``shares`` of the mass.

    The mass is summed in float64 and the same way whoever else is in the batch.
    """
    wanted = shares.double() * weights.sum(-1, dtype=torch.float64)
    guess = weights.topk(min(_NUCLEUS_GUESS_TOKENS, weights.shape[1]), dim=-1).values
    cumulative = guess.cumsum(-1, dtype=torch.float64)
    floor = _first_reaching(guess, cumulative, wanted)
    short = (cumulative[:, -1] < wanted).nonzero()[:, 0]
    if len(short):
        ordered = weights[short].sort(dim=-1, descending=True).values
        cumulative = ordered.cumsum(-1, dtype=torch.float64)
        floor[short] = _first_reaching(ordered, cumulative, wanted[short])
    return floor


def _first_reaching(
    ordered: torch.Tensor, cumulative: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """[num_rows, 1]: the weight whose addition makes the cumulative mass ``wanted``."""
    index = (cumulative < wanted[:, None]).sum(-1, keepdim=True)
    return ordered.gather(1, index.clamp_(max=ordered.shape[1] - 1))


def _logprobs(
    logits: torch.Tensor, rows: Rows[SampleRow], token_ids: list[int | None]
) -> list[TokenLogprob | None]:
    result: list[TokenLogprob | None] = [None] * len(rows)
    wanted: list[tuple[int, int, int]] = []
    for i, (row, token) in enumerate(zip(rows, token_ids, strict=True)):
        if row.sampling.logprobs is not None and token is not None:
            wanted.append((i, token, row.sampling.logprobs))
    if not wanted:
        return result
    index = torch.tensor([i for i, _, _ in wanted], device=logits.device)
    tokens = torch.tensor([token for _, token, _ in wanted], device=logits.device)
    table = logits[index].log_softmax(-1)
    own = table.gather(1, tokens[:, None])[:, 0].tolist()
    num_top = min(max(count for _, _, count in wanted), logits.shape[1])
    top = table.topk(num_top, dim=-1)
    values, ids = top.values.tolist(), top.indices.tolist()
    for j, (i, token, count) in enumerate(wanted):
        alternatives = tuple(zip(ids[j][:count], values[j][:count], strict=True))
        result[i] = TokenLogprob(token, own[j], alternatives)
    return result

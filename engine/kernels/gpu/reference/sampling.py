"""Choice of tokens in plain torch: sorts all logits, with masses in float64."""

from __future__ import annotations

from math import inf

import torch

from millrace.engine.kernels.gpu.sampler_state import (
    GROUP_TOKENS,
    MOST_COUNTED,
    RECORD,
    SamplerState,
    num_groups,
)
from millrace.engine.kernels.random_stream import uniforms


def choose_tokens(
    logits: torch.Tensor,
    state_rows: torch.Tensor,
    token_indices: torch.Tensor,
    state: SamplerState,
    tokens_out: torch.Tensor,
) -> None:
    """Choose tokens as the kernel ``choose_tokens``.

    Writes the next token of each row to ``tokens_out`` (int64 [num_rows]), or -1 if the logits have
    NaN or +inf or are all -inf. Counts it for rows that are penalised.
    """
    if not len(logits):
        return
    rows = state_rows.long()
    params = state.params.index_select(0, rows)
    values = _edited(logits.float(), params, state.counts, rows)
    best = values.amax(-1, keepdim=True)
    valid = best[:, 0].isfinite()
    # All values are NaN for a row without a token, and its result is not used.
    greedy = _field(params, "temperature") == 0
    temperature = _field(params, "temperature").masked_fill(greedy, 1.0)[:, None]
    scaled = (values - best) / temperature
    weights = scaled.exp().masked_fill_(scaled < _lowest(scaled, params), 0.0)
    drawn = _drawn(weights, _field(params, "key"), token_indices)
    tokens = torch.where(greedy, values.max(-1).indices, drawn)
    tokens_out.copy_(torch.where(valid, tokens, -1))
    _count(state.counts, rows, tokens, valid & _penalised(params))


def token_logprobs(
    logits: torch.Tensor, picked: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> torch.Tensor:
    """Compute log-probabilities of the ``picked`` rows as the kernel ``token_logprobs``.

    ``picked`` is int64 [num_picked]. Returns float64 [num_picked, 1 + 2 * num_top]: the
    log-probability of the row's token, the ``num_top`` likeliest tokens, and their
    log-probabilities.
    """
    shares = logits.index_select(0, picked).double().log_softmax(-1)
    chosen = shares.gather(1, tokens.index_select(0, picked).clamp_(min=0)[:, None])
    ids = shares.argsort(dim=-1, descending=True, stable=True)[:, :num_top]
    return torch.cat([chosen, ids.double(), shares.gather(1, ids)], -1)


def _field(params: torch.Tensor, name: str) -> torch.Tensor:
    """Return an entry of all records, [num_rows]."""
    dtype, offset = RECORD.fields[name][:2]  # type: ignore[index]
    kinds = {"<i8": torch.int64, "<f8": torch.float64, "<f4": torch.float32, "<i4": torch.int32}
    return params.view(kinds[dtype.str])[:, offset // dtype.itemsize]


def _penalised(params: torch.Tensor) -> torch.Tensor:
    return (
        (_field(params, "repetition") != 1)
        | (_field(params, "presence") != 0)
        | (_field(params, "frequency") != 0)
    )


def _edited(
    values: torch.Tensor, params: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Return the logits after penalties."""
    values = values.masked_fill(values.isnan(), inf)
    entries = counts.index_select(0, rows).masked_fill_(~_penalised(params)[:, None], 0)
    repetition = _field(params, "repetition")[:, None]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(entries != 0, repeated, values)
    said = entries & MOST_COUNTED
    amounts = _field(params, "presence")[:, None] + _field(params, "frequency")[:, None] * said
    return torch.where(said != 0, values - amounts.float(), values)


def _lowest(scaled: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """Return the least scaled logit that each row keeps: [num_rows, 1]."""
    vocab_size = scaled.shape[1]
    top_k = _field(params, "top_k").long().clamp(1, vocab_size)[:, None]
    ordered = scaled.sort(dim=-1, descending=True).values
    lowest = ordered.gather(1, top_k - 1).masked_fill_(top_k == vocab_size, -inf)
    kept = ordered.exp().double().masked_fill_(ordered < lowest, 0.0)
    cumulative = kept.cumsum(-1)
    top_p = _field(params, "top_p")[:, None]
    reached = torch.searchsorted(cumulative, top_p * cumulative[:, -1:])
    edge = ordered.gather(1, reached.clamp_(max=vocab_size - 1)).masked_fill_(top_p == 1, -inf)
    log_min_p = _field(params, "log_min_p")[:, None]
    return torch.maximum(torch.maximum(lowest, edge), log_min_p)


def _drawn(weights: torch.Tensor, keys: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Draw by exponential variates: a group, then a token in it."""
    groups = num_groups(weights.shape[1])
    padding = groups * GROUP_TOKENS - weights.shape[1]
    members = torch.nn.functional.pad(weights, (0, padding)).view(-1, groups, GROUP_TOKENS)
    times = uniforms(keys, indices, GROUP_TOKENS + groups).log_().neg_()
    scores = members.sum(-1) / times[:, GROUP_TOKENS:]
    winner = scores.max(-1).indices
    own = members.gather(1, winner[:, None, None].expand(-1, 1, GROUP_TOKENS))[:, 0]
    return winner * GROUP_TOKENS + (own / times[:, :GROUP_TOKENS]).max(-1).indices


def _count(
    counts: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, counted: torch.Tensor
) -> None:
    """Count the tokens of the rows that are ``counted``; other counts stay unchanged."""
    entries = counts[rows, tokens]
    grown = torch.where((entries & MOST_COUNTED) < MOST_COUNTED, entries + 1, entries)
    counts[rows, tokens] = torch.where(counted, grown, entries)

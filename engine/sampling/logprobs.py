"""Log-probabilities of the model itself, before its logits are changed."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from math import inf
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.sampling.groups import GROUP_TOKENS, GroupedLogits, ScaledRows, largest
from millrace.engine.step.fork_group import Candidate
from millrace.schemas.frames import TokenLogprob


class LogprobTable(NamedTuple):
    """Log-probabilities of some rows.

    ``log_normalisers`` [num_rows] are the logs of the normalisers. The likeliest tokens are in
    falling order, as lists of ids and log-probabilities.
    """

    log_normalisers: torch.Tensor
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]

    def entries(
        self,
        token_logits: torch.Tensor,
        token_ids: Rows[int],
        counts: Rows[int],
        ranks: Rows[int] | None = None,
    ) -> list[TokenLogprob]:
        """Make the reported entry of one token per row.

        Args:
            token_logits: The tokens' logits, [num_rows].
            token_ids: The tokens.
            counts: Number of alternatives to report for each.
            ranks: Rank of each token; None if not counted.
        """
        own = (token_logits.double() - self.log_normalisers).tolist()
        return [
            TokenLogprob(
                token,
                own[i],
                tuple(zip(self.top_ids[i][:count], self.top_logprobs[i][:count], strict=True)),
                0 if ranks is None else ranks[i],
            )
            for i, (token, count) in enumerate(zip(token_ids, counts, strict=True))
        ]


def tabulate(
    logits: GroupedLogits, rows: torch.Tensor, num_top: int, vocab_size: int
) -> LogprobTable:
    """Make the table of ``rows`` (int64) with the ``num_top`` likeliest tokens of each."""
    best = logits.best.index_select(0, rows)
    scaled = ScaledRows(rows, best, torch.ones_like(best))
    normalisers = logits.masses(scaled).log_().add_(best)
    count = min(num_top, vocab_size)
    if count == 0:
        return LogprobTable(normalisers, [[]] * len(rows), [[]] * len(rows))
    # The likeliest tokens are in the groups with the largest tops.
    num_kept = min(count, logits.num_groups)
    groups = _places_of_largest(logits.tops.index_select(0, rows), num_kept)
    groups = groups.sort(dim=-1).values
    members = logits.select(rows.repeat_interleave(num_kept), groups.view(-1))
    members = members.view(len(rows), -1)
    places = _places_of_largest(members, count)
    group = groups.gather(1, places // GROUP_TOKENS)
    ids = group * GROUP_TOKENS + places % GROUP_TOKENS
    values = members.gather(1, places).double() - normalisers[:, None]
    return LogprobTable(normalisers, ids.tolist(), values.tolist())


def candidates(
    logits: torch.Tensor, temperature: float, count: int, excluded: Rows[int] = ()
) -> list[list[Candidate]] | None:
    """Return the ``count`` likeliest next tokens of each row, without the ``excluded`` ones.

    Batch-invariant: a row's result does not depend on the other rows.

    Args:
        logits: [num_rows, vocab_size].
        temperature: Temperature of the log-probabilities; 0 counts as 1.
        count: Number of candidates for each row, the likeliest first.
        excluded: Tokens that are left out. Their probability still counts in the normaliser.

    Returns:
        The candidates of each row; None if a row has NaN or infinity, or only -inf.
    """
    with torch.inference_mode():
        rows = logits.float()
        best = rows.amax(-1)
        if not bool(torch.isfinite(best).all()):
            return None
        if temperature not in (0.0, 1.0):
            rows = (rows - best[:, None]) / temperature
        table = table_of(rows, 0 if excluded else count)
        normalisers = table.log_normalisers
        if excluded:
            rows = rows.clone()
            rows[:, list(excluded)] = -inf
            table = table_of(rows, count)
        more = (table.log_normalisers - normalisers).tolist()
    return [
        [Candidate(token, logprob + own) for token, logprob in zip(ids, logprobs, strict=True)]
        for ids, logprobs, own in zip(table.top_ids, table.top_logprobs, more, strict=True)
    ]


def table_of(rows: torch.Tensor, count: int) -> LogprobTable:
    """Make the table of ``rows``, float32 [num_rows, vocab_size]."""
    vocab_size = rows.shape[1]
    padded = F.pad(rows, (0, -vocab_size % GROUP_TOKENS), value=-inf)
    every = torch.arange(len(rows), device=rows.device)
    grouped = largest(padded.view(len(rows), -1, GROUP_TOKENS))
    return tabulate(grouped, every, count, vocab_size)


def _places_of_largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the ``count`` largest of each float32 row, the first of equals first.

    ``topk`` picks among equals depending on the rest of the batch.
    """
    bits = values.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = values.shape[1] - 1 - torch.arange(values.shape[1], device=values.device)
    return ordered.mul_(values.shape[1]).add_(last).topk(count, dim=-1).indices

"""The tokens that a beam may go on with."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from math import inf

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.beams.search import Candidate
from millrace.engine.sampling.groups import GROUP_TOKENS, largest
from millrace.engine.sampling.logprobs import LogprobTable, tabulate


def likeliest(
    logits: torch.Tensor, temperature: float, count: int, excluded: Rows[int] = ()
) -> list[list[Candidate]] | None:
    """The ``count`` likeliest next tokens of each row of ``logits`` [num_rows, vocab_size] that are
    not ``excluded``, the likeliest first, by their log-probabilities at ``temperature`` (0: as at
    1), in which the excluded ones count; None if a row has a NaN or infinity, or nothing else than
    -inf.

    The same for a row whoever else is in the batch.
    """
    with torch.inference_mode():
        rows = logits.float()
        best = rows.amax(-1)
        if not bool(torch.isfinite(best).all()):
            return None
        if temperature not in (0.0, 1.0):
            rows = (rows - best[:, None]) / temperature
        table = _table(rows, 0 if excluded else count)
        normalisers = table.log_normalisers
        if excluded:
            rows = rows.clone()
            rows[:, list(excluded)] = -inf
            table = _table(rows, count)
        more = (table.log_normalisers - normalisers).tolist()
    return [
        [Candidate(token, logprob + own) for token, logprob in zip(ids, logprobs, strict=True)]
        for ids, logprobs, own in zip(table.top_ids, table.top_logprobs, more, strict=True)
    ]


def _table(rows: torch.Tensor, count: int) -> LogprobTable:
    vocab_size = rows.shape[1]
    padded = F.pad(rows, (0, -vocab_size % GROUP_TOKENS), value=-inf)
    every = torch.arange(len(rows), device=rows.device)
    grouped = largest(padded.view(len(rows), -1, GROUP_TOKENS))
    return tabulate(grouped, every, count, vocab_size)

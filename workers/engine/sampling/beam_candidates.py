"""The tokens that a beam may go on with."""

from __future__ import annotations

from math import inf

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from workers.engine.beams.search import Candidate
from workers.engine.sampling.groups import GROUP_TOKENS, largest
from workers.engine.sampling.logprobs import tabulate


def likeliest(logits: torch.Tensor, temperature: float, count: int) -> list[list[Candidate]] | None:
    """The ``count`` likeliest next tokens of each row of ``logits`` [num_rows, vocab_size], the
    likeliest first, by their log-probabilities at ``temperature`` (0: as at 1); None if a row has
    a NaN or infinity, or nothing else than -inf.

    The same for a row whoever else is in the batch.
    """
    with torch.inference_mode():
        rows = logits.float()
        best = rows.amax(-1)
        if not bool(torch.isfinite(best).all()):
            return None
        if temperature not in (0.0, 1.0):
            rows = (rows - best[:, None]) / temperature
        vocab_size = rows.shape[1]
        padded = F.pad(rows, (0, -vocab_size % GROUP_TOKENS), value=-inf)
        every = torch.arange(len(rows), device=rows.device)
        grouped = largest(padded.view(len(rows), -1, GROUP_TOKENS))
        table = tabulate(grouped, every, count, vocab_size)
    return [
        [Candidate(token, logprob) for token, logprob in zip(ids, logprobs, strict=True)]
        for ids, logprobs in zip(table.top_ids, table.top_logprobs, strict=True)
    ]

"""Log-probabilities of a prompt's own tokens, computed step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from math import isnan
from typing import NamedTuple

import torch

from millrace.engine.sampling.logprobs import table_of
from millrace.engine.step.batch import ScoredRows
from millrace.engine.step.sequence import Sequence
from millrace.schemas.frames import TokenLogprob

# Maximum rows whose logits exist at a time: enough for the product with the head to run at full
# speed, far fewer than a long prompt has.
_HEAD_ROWS = 128
# Log-probabilities are computed for as many rows at a time as have about this many logits.
_TABLE_LOGITS = 1 << 20


class ScoredChunk(NamedTuple):
    """Log-probabilities that a step adds to a sequence's prompt, those of its next tokens."""

    sequence: Sequence
    entries: list[TokenLogprob]


def score_rows(
    ranges: Rows[ScoredRows],
    hidden: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> list[ScoredChunk]:
    """Score the prompt tokens that follow each range's rows.

    Args:
        ranges: The scored rows of each sequence.
        hidden: Hidden states [num_tokens, hidden_size].
        logits_of: Computes [num_rows, vocab_size] of some rows of ``hidden``.
    """
    targets: list[int] = []
    counts: list[int] = []
    rows: list[int] = []
    for scored in ranges:
        first = scored.first_target
        num_rows = scored.end - scored.start
        rows += range(scored.start, scored.end)
        targets += scored.sequence.token_ids[first : first + num_rows]
        counts += [scored.sequence.request.sampling.prompt_logprobs or 0] * num_rows
    entries: list[TokenLogprob] = []
    for start in range(0, len(rows), _HEAD_ROWS):
        chunk = slice(start, start + _HEAD_ROWS)
        index = torch.tensor(rows[chunk], device=hidden.device)
        logits = logits_of(hidden.index_select(0, index))
        entries += _entries(logits, targets[chunk], counts[chunk])
    chunks: list[ScoredChunk] = []
    done = 0
    for scored in ranges:
        num_rows = scored.end - scored.start
        chunks.append(ScoredChunk(scored.sequence, entries[done : done + num_rows]))
        done += num_rows
    return chunks


def add_scores(chunk: ScoredChunk) -> bool:
    """Add a chunk to its sequence; return whether it has no NaN."""
    assert chunk.sequence.prompt_logprobs is not None
    chunk.sequence.prompt_logprobs += chunk.entries
    return not any(isnan(entry.logprob) for entry in chunk.entries)


def _entries(logits: torch.Tensor, targets: list[int], counts: list[int]) -> Iterator[TokenLogprob]:
    num_rows, vocab_size = logits.shape
    step = max(1, _TABLE_LOGITS // vocab_size)
    for start in range(0, num_rows, step):
        part = logits[start : start + step].float()
        tokens, wanted = targets[start : start + step], counts[start : start + step]
        every = torch.arange(len(part), device=part.device)
        table = table_of(part, max(wanted))
        own = part[every, torch.tensor(tokens, device=part.device)]
        ranks: list[int] = ((part > own[:, None]).sum(-1) + 1).tolist()
        yield from table.entries(own, tokens, wanted, ranks)

"""Bit masks of the tokens that a grammar allows."""

from __future__ import annotations

from math import inf

import torch

_BITS_PER_BYTE = 8


class TokenMasks:
    """Applies packed masks: a word is 32 tokens, the lowest bit the first of them, 1 is allowed.

    Each byte of a mask looks up what it adds to eight logits: 0 or -inf.
    """

    def __init__(self, device: torch.device) -> None:
        values = torch.arange(1 << _BITS_PER_BYTE, device=device)
        bits = (values[:, None] >> torch.arange(_BITS_PER_BYTE, device=device)) & 1
        self._added = torch.zeros(bits.shape, device=device).masked_fill_(bits == 0, -inf)

    def apply_(self, logits: torch.Tensor, rows: list[int], masks: torch.Tensor) -> None:
        """Forbid tokens in the ``rows`` of ``logits`` [num_rows, num_tokens] in place. ``masks``:
        int32 [num_rows, num_words], that of a row in the same row; tokens past it are forbidden."""
        words = masks[torch.tensor(rows)].contiguous().to(logits.device)
        chosen = words.view(torch.uint8).view(len(rows), -1).int()
        num_tokens = logits.shape[1]
        added = self._added.index_select(0, chosen.view(-1)).view(len(rows), -1)
        width = min(num_tokens, added.shape[1])
        for place, row in enumerate(rows):
            logits[row, :width] += added[place, :width]
            logits[row, width:] = -inf

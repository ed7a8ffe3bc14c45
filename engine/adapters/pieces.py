"""Work on tensors in pieces for which torch starts no threads: an adapter is made ready while steps
run, whose own threads would wait for those."""

from __future__ import annotations

import torch

# torch shares what has 32,768 elements or more among threads.
_PIECE_ELEMENTS = 16_384


def converted(tensor: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor | None:
    """A copy of a contiguous ``tensor`` times ``scale``, rounded once; None if one of its numbers
    is not finite."""
    out = torch.empty(tensor.shape, dtype=dtype)
    for source, target in zip(_pieces(tensor), _pieces(out), strict=True):
        target.copy_(source if scale == 1.0 else source.float() * scale)
        if not target.isfinite().all():
            return None
    return out


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a view whose first dimension is the outermost in memory, too."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    rows = max(1, _PIECE_ELEMENTS // max(1, tensor[0].numel()))
    for source, target in zip(torch.split(tensor, rows), torch.split(out, rows), strict=True):
        target.copy_(source)
    return out


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor.view(-1), _PIECE_ELEMENTS)

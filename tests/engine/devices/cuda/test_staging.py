"""Staging of copies to a device through two alternating pinned pieces."""

from __future__ import annotations

import pytest
import torch

from millrace.engine.devices.cuda import device as staging
from millrace.engine.devices.cuda.device import PinnedStaging


class _Copy:
    """Event of a copy; its piece must not be filled before the copy is waited for."""

    def __init__(self) -> None:
        self.is_pending = False

    def synchronize(self) -> None:
        self.is_pending = False


@pytest.mark.parametrize("sizes", [(1,), (8,), (3, 5), (7, 1, 30, 2), (16, 16), (0, 5, 0)])
def test_parts_arrive_in_their_order(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(staging, "_PIECE_BYTES", 16)
    staged = object.__new__(PinnedStaging)  # whose constructor needs a device
    staged._pieces = [torch.zeros(16, dtype=torch.uint8) for _ in range(2)]
    copies = [_Copy(), _Copy()]
    staged._copied = copies
    parts = [torch.randint(-99, 99, (size,), dtype=torch.int16) for size in sizes]
    found = []
    for piece, copied in staged._filled(parts):
        assert not copied.is_pending
        copied.is_pending = True
        found.append(piece.clone())
    assert torch.equal(torch.cat(found).view(torch.int16), torch.cat(parts))
    assert all(len(piece) == 16 for piece in found[:-1])

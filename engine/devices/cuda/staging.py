"""The way of large things to a CUDA device beside the steps that run there."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Two of these are pinned: one is filled while the other one is copied.
_PIECE_BYTES = 8 << 20

_Bytes = npt.NDArray[np.uint8]
# torch has no types for these.
_stream: Callable[[torch.device], Any] = torch.cuda.Stream
_event: Callable[..., Any] = torch.cuda.Event


class PinnedStaging:
    """Copies from the host on a stream of its own, through pinned memory that it keeps: pinning
    holds up the device. For any thread, of which one at a time copies."""

    def __init__(self, device: torch.device) -> None:
        self._computing = torch.cuda.default_stream(device)
        self._stream = _stream(device)
        self._pieces = [torch.empty(_PIECE_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2)]
        # Whoever waits for them sleeps.
        self._copied = [_event(blocking=True) for _ in range(2)]
        self._lock = threading.Lock()

    def fill(self, target: torch.Tensor, parts: Rows[torch.Tensor]) -> None:
        """See ``Device.fill``."""
        data = target.view(-1).view(torch.uint8)
        place = 0
        with self._lock, torch.cuda.stream(self._stream):
            self._stream.wait_stream(self._computing)
            for piece, copied in self._filled(parts):
                data[place : place + len(piece)].copy_(piece, non_blocking=True)
                copied.record(self._stream)
                place += len(piece)
            for copied in self._copied:
                copied.synchronize()
        assert place == len(data), f"{place} bytes came for {len(data)}"

    def _filled(self, parts: Rows[torch.Tensor]) -> Iterator[tuple[torch.Tensor, Any]]:
        """Pinned bytes of ``parts``, and what is to be recorded when they have been copied."""
        halves = itertools.cycle(zip(self._pieces, self._copied, strict=True))
        half, copied = next(halves)
        used = 0
        for part in parts:
            # By numpy, which copies on this thread alone and lets others run meanwhile.
            source: _Bytes = part.view(-1).view(torch.uint8).numpy()
            while len(source):
                taken = min(len(source), _PIECE_BYTES - used)
                np.copyto(half[used : used + taken].numpy(), source[:taken])
                source, used = source[taken:], used + taken
                if used == _PIECE_BYTES:
                    yield half, copied
                    half, copied = next(halves)
                    copied.synchronize()
                    used = 0
        if used:
            yield half[:used], copied

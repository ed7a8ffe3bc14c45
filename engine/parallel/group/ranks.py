"""What the ranks of a group have in common."""

from __future__ import annotations

from typing import Protocol

import torch

from millrace.engine.kernels.operations import Collectives
from millrace.engine.types import DeviceLostError


class RankLostError(DeviceLostError):
    """The group cannot go on: a rank has ended or hangs. It ends the process of rank 0, too."""


class Ranks(Collectives, Protocol):
    """One rank's way to the others of its group. Whatever is called after the group has failed, or
    waits while it does, raises an error."""

    def gather(self, columns: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        """All ranks' contiguous ``columns`` [num_rows, widths[rank]] side by side, on rank 0."""

    def post(self, *parts: bytes | memoryview) -> None:
        """Say something to all other ranks, which have met since the last time: by rank 0."""

    def receive(self) -> memoryview:
        """What rank 0 says next, however long that takes; there may be something behind it. Valid
        until this rank meets the others."""

    def check(self) -> None:
        """Raise an error if the group has failed."""

    def abort(self, why: str) -> None:
        """Have the group fail; for any thread."""

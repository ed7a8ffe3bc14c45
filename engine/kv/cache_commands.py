"""What is done with blocks of a KV cache of which ranks have a part each, in memory of their own:
rank 0 does it to its part and tells the others."""

from __future__ import annotations

from typing import Protocol

import msgspec


class CopyBlock(msgspec.Struct, frozen=True, array_like=True, tag="copy_block"):
    """Give the block ``target`` the contents of ``source``."""

    source: int
    target: int


class ScrubBlocks(msgspec.Struct, frozen=True, array_like=True, tag="scrub_blocks"):
    """Zero those of the blocks whose contents are not finite."""

    blocks: list[int]


class CheckBlocks(msgspec.Struct, frozen=True, array_like=True, tag="check_blocks"):
    """Say which of the blocks hold only finite numbers."""

    blocks: list[int]


class ReserveSlots(msgspec.Struct, frozen=True, array_like=True, tag="reserve_slots"):
    """Have memory of the host for so many blocks. The first command of its kind, and the last."""

    num_slots: int


class StoreBlocks(msgspec.Struct, frozen=True, array_like=True, tag="store_blocks"):
    """Copy blocks into slots of the host's memory."""

    blocks: list[int]
    slots: list[int]


class LoadBlocks(msgspec.Struct, frozen=True, array_like=True, tag="load_blocks"):
    """Copy slots back into blocks."""

    slots: list[int]
    blocks: list[int]


CacheCommand = CopyBlock | ScrubBlocks | CheckBlocks | ReserveSlots | StoreBlocks | LoadBlocks


class OtherParts(Protocol):
    """The parts of a KV cache that other ranks have, as rank 0 sees them."""

    @property
    def block_bytes(self) -> int:
        """The size of one block in all of these parts together."""

    def tell(self, command: CacheCommand) -> None:
        """Have each part obey, behind the steps that were launched before and before those that are
        launched later. Raises DeviceLostError."""

    def ask(self, command: CheckBlocks) -> list[bool]:
        """The same; which of the blocks hold only finite numbers in all of these parts."""

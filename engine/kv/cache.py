"""The memory of the KV cache: one contiguous allocation for all layers."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from copy import copy
from itertools import accumulate
from typing import Protocol

import msgspec
import torch

from millrace.engine.config import KVBlocks, KVBytes, ResolvedEngineConfig
from millrace.engine.kernels.gpu.device_batch import CacheLayer
from millrace.engine.transfer.memory import BlockLayout, SharedPages, private_pages
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.schemas.errors import ConfigError
from millrace.schemas.transfer import BlockPart


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


class KVCache:
    """Keys and values of every block in every layer.

    ``data``: [num_layers, num_blocks + 1, block_size_tokens, 2, num_kv_heads, head_dim]; of the
    pair, 0 is the key and 1 the value. The last block, ``null_block``, is never written: block
    tables are padded with it. All contents are always finite, since masked positions are still
    multiplied (by zero); so whoever wrote NaN there must ``scrub`` it.

    ``scales``: float32 [num_layers, num_blocks + 1, block_size_tokens, 2, num_kv_heads], what
    entries of 8 bits are multiplied by, NaN where they stand for something that is not finite;
    None if the entries are wider.

    ``blocks``: [num_layers, num_blocks + 1, bytes], all there is of a block in a layer in one
    piece, its entries first and then its scales.

    A group's has the layers and heads of each of its ranks in a part, one behind the other, of
    ``part_layers`` layers each; which of the model's they are is in ``parts``, and ``layout`` is
    that of a block in a layer of a part. Whoever looks at blocks that are not being computed, or
    changes them, from outside of the steps, calls ``settle`` first: it waits for what steps that
    were launched still write. Where ranks have their parts in memory of their own, ``others`` are
    those that are not here: what is done with a block is done in them, too.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        shared: bool = False,
        pages: SharedPages | None = None,
        part_layers: tuple[int, ...] | None = None,
    ) -> None:
        """``config``: of one part, or the only one; ``part_layers``: how many layers each has.
        ``shared``: memory of a CPU in ``pages`` that other processes
        may map; these ``pages``, if there are some already."""
        self.num_blocks = num_blocks
        self.null_block = num_blocks
        self.block_size_tokens = block_size_tokens
        self.part_layers = part_layers or (config.num_hidden_layers,)
        self.settle: Callable[[], None] = _nothing
        self.others: OtherParts | None = None
        layout = _layout(config, block_size_tokens, dtype)
        self.layout = layout
        heads = config.num_key_value_heads
        self.parts: tuple[BlockPart, ...] = (BlockPart(0, config.num_hidden_layers, 0, heads),)
        shape = (sum(self.part_layers), num_blocks + 1, layout.size_bytes)
        self.pages = pages
        try:
            if shared and device.type == "cpu" and pages is None:
                self.pages = SharedPages(math.prod(shape))
            if self.pages is not None:
                self.blocks = _on_pages(self.pages.pages, shape)
            else:
                self.blocks = _zeros(shape, device)
        except (RuntimeError, OSError, OverflowError) as error:
            raise ConfigError(
                f"The KV cache of {num_blocks} blocks takes {math.prod(shape)} bytes, which "
                f"{device} does not have. Lower engine.kv_cache_bytes or engine.num_blocks."
            ) from error
        self._view(config, layout, dtype)

    def _view(self, config: ModelConfig, layout: BlockLayout, dtype: torch.dtype) -> None:
        """See ``data`` and ``scales`` in the bytes of ``blocks``."""
        shape = self.blocks.shape[:2]
        pairs = (self.block_size_tokens, 2, config.num_key_value_heads)
        data = self.blocks[:, :, : layout.data_bytes].view(dtype)
        self.data = data.view(*shape, *pairs, config.head_dim)
        self.scales: torch.Tensor | None = None
        if layout.has_scales:
            end = layout.scales_at + layout.num_vectors * torch.float32.itemsize
            scales = self.blocks[:, :, layout.scales_at : end].view(torch.float32)
            self.scales = scales.view(*shape, *pairs)
        # Copied by eight bytes where these make up a block.
        self._words = self.blocks.view(torch.int64 if layout.size_bytes % 8 == 0 else torch.uint8)

    @property
    def block_bytes(self) -> int:
        """The size of one block over all layers, those of other ranks included."""
        num_layers, _, layer_bytes = self.blocks.shape
        return num_layers * layer_bytes + (0 if self.others is None else self.others.block_bytes)

    def part(self, index: int) -> KVCache:
        """One part of it, in the same memory."""
        begin = sum(self.part_layers[:index])
        own = slice(begin, begin + self.part_layers[index])
        part = copy(self)
        part.part_layers = self.part_layers[index : index + 1]
        part.blocks, part.data = self.blocks[own], self.data[own]
        part._words = self._words[own]
        part.scales = None if self.scales is None else self.scales[own]
        return part

    def layer(self, index: int) -> CacheLayer:
        """One layer, as kernels see it."""
        return CacheLayer(self.data[index], None if self.scales is None else self.scales[index])

    @torch.inference_mode()
    def scrub(self, blocks: list[int]) -> None:
        """Zero those of the blocks whose contents are not finite."""
        if self.others is not None:
            self.others.tell(ScrubBlocks(blocks))
        self.settle()
        telling = self.data if self.scales is None else self.scales
        for block in blocks:
            if not torch.isfinite(telling[:, block]).all():
                self.blocks[:, block].zero_()

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        """Give one block the contents of another, in all layers."""
        if self.others is not None:
            self.others.tell(CopyBlock(source, target))
        self.settle()
        self._words[:, target].copy_(self._words[:, source])

    @torch.inference_mode()
    def finite_blocks(self, blocks: list[int]) -> list[bool]:
        """Which blocks hold only finite keys and values in the last layer.

        A token's hidden state that is not finite makes its keys and values in every later layer
        the same, and so does a key or value when the token attends to itself; so the last layer
        speaks for all, at a fraction of the reading.
        """
        telling = self.data if self.scales is None else self.scales
        index = torch.tensor(blocks, device=telling.device)
        last = [telling[end - 1] for end in accumulate(self.part_layers)]
        sums = [
            layer.index_select(0, index).flatten(1).sum(-1, dtype=torch.float32) for layer in last
        ]
        finite: list[bool] = torch.isfinite(torch.stack(sums).sum(0)).tolist()
        if self.others is not None:
            elsewhere = self.others.ask(CheckBlocks(blocks))
            finite = [own and other for own, other in zip(finite, elsewhere, strict=True)]
        return finite


def _nothing() -> None:
    """Where a step is over when it was launched, or what follows it waits for it by itself."""


def pieces_of(blocks: torch.Tensor, block: int) -> list[memoryview]:
    """The bytes of one of ``blocks`` ([num_layers, num_blocks, bytes], in the host's memory), a
    piece for each layer."""
    return [memoryview(layer) for layer in blocks[:, block].numpy()]


def _layout(config: ModelConfig, block_size_tokens: int, dtype: torch.dtype) -> BlockLayout:
    """Of a block with the heads of ``config``; entries of 8 bits have scales."""
    return BlockLayout(
        block_size_tokens,
        config.num_key_value_heads,
        config.head_dim * dtype.itemsize,
        has_scales=dtype.itemsize == 1,
    )


def _zeros(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Bytes that are zero; on a CPU in pages that nobody has touched, so that memory is taken as
    blocks are first used. ``torch.zeros`` writes them all: half a second for a GiB."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    return _on_pages(private_pages(math.prod(shape)), shape)


def _on_pages(pages: mmap.mmap, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(pages, dtype=torch.uint8).view(shape)


_ROUNDED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def cache_dtype(name: str | None, dtype: torch.dtype) -> torch.dtype:
    """What keys and values are kept as: ``name`` as in ``ResolvedEngineConfig.kv_cache_dtype``,
    ``dtype`` that of the weights."""
    return dtype if name is None else _ROUNDED[name]


def block_bytes(config: ModelConfig, block_size_tokens: int, dtype: torch.dtype) -> int:
    """The size of one block over all layers, with the scales of entries of 8 bits."""
    layout = _layout(config, block_size_tokens, dtype)
    return layout.size_bytes * config.num_hidden_layers


def choose_num_blocks(
    config: ModelConfig,
    engine: ResolvedEngineConfig,
    dtype: torch.dtype,
    num_layers: int | None = None,
) -> int:
    """The blocks that the settings ask for. ``config``: of one of the parts, which have
    ``num_layers`` together. Raises ConfigError if not even one fits."""
    size = engine.kv_cache_size
    if isinstance(size, KVBlocks):
        return size.num_blocks
    assert isinstance(size, KVBytes), "a share of a device's memory is measured first"
    return fitting_blocks(config, engine, size.num_bytes, dtype, num_layers)


def fitting_blocks(
    config: ModelConfig,
    engine: ResolvedEngineConfig,
    kv_cache_bytes: int,
    dtype: torch.dtype,
    num_layers: int | None = None,
) -> int:
    """The blocks that fit ``kv_cache_bytes``, but never more than the full context windows of all
    sequences of a step can use; ``config`` and ``num_layers`` as above. Raises ConfigError if not
    even one fits."""
    block_size_tokens = engine.block_size_tokens
    size_bytes = block_bytes(config, block_size_tokens, dtype)
    size_bytes = size_bytes // config.num_hidden_layers * (num_layers or config.num_hidden_layers)
    fitting = kv_cache_bytes // size_bytes
    if fitting < 1:
        raise ConfigError(
            f"engine.kv_cache_bytes is {kv_cache_bytes}, but one block of {block_size_tokens} "
            f"tokens takes {size_bytes} bytes for this model."
        )
    bounds = engine.bounds(config.context_window_tokens)
    return min(fitting, bounds.num_sequences * bounds.num_blocks)

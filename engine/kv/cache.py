"""Memory of the KV cache: one contiguous allocation for all layers."""

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

# Elements of a head that share a scale in int8; kScaleGroup in native/kv_cache.h.
INT8_GROUP = 32


class CopyBlock(msgspec.Struct, frozen=True, array_like=True, tag="copy_block"):
    """Command to copy the contents of block ``source`` to block ``target``."""

    source: int
    target: int


class ScrubBlocks(msgspec.Struct, frozen=True, array_like=True, tag="scrub_blocks"):
    """Command to zero the blocks whose contents are not finite."""

    blocks: list[int]


class CheckBlocks(msgspec.Struct, frozen=True, array_like=True, tag="check_blocks"):
    """Command to check which blocks hold only finite numbers."""

    blocks: list[int]


class ReserveSlots(msgspec.Struct, frozen=True, array_like=True, tag="reserve_slots"):
    """Command to allocate host memory for ``num_slots`` blocks.

    It is sent once, before other commands of host memory.
    """

    num_slots: int


class StoreBlocks(msgspec.Struct, frozen=True, array_like=True, tag="store_blocks"):
    """Command to copy blocks into slots of host memory."""

    blocks: list[int]
    slots: list[int]


class LoadBlocks(msgspec.Struct, frozen=True, array_like=True, tag="load_blocks"):
    """Command to copy slots back into blocks."""

    slots: list[int]
    blocks: list[int]


CacheCommand = CopyBlock | ScrubBlocks | CheckBlocks | ReserveSlots | StoreBlocks | LoadBlocks


class OtherParts(Protocol):
    """Parts of a KV cache in other ranks, as rank 0 sees them."""

    @property
    def block_bytes(self) -> int:
        """Size of one block in all of these parts together."""

    def tell(self, command: CacheCommand) -> None:
        """Send a command to each part.

        It runs after steps launched before and before steps launched later. Raises DeviceLostError.
        """

    def ask(self, command: CheckBlocks) -> list[bool]:
        """Send a check to each part, as ``tell`` does.

        Return which blocks are finite in all of them.
        """


class KVCache:
    """Keys and values of every block in every layer.

    Attributes:
        data: [num_layers, num_blocks + 1, block_size_tokens, 2, num_kv_heads, head_dim]; of the
            pair, 0 is the key and 1 the value. All contents are always finite, since masked
            positions are still multiplied (by zero); NaN that was written has to be removed by
            ``scrub``.
        null_block: The last block, which is never written. Block tables are padded with it.
        scales: Factors of 8-bit entries, NaN where an entry is not finite: of float8, float32
            [num_layers, num_blocks + 1, block_size_tokens, 2, num_kv_heads]; of int8, bfloat16
            [..., num_kv_heads, num_groups], one for each INT8_GROUP elements of a head, the last of
            which may be fewer. None if entries are wider.
        blocks: [num_layers, num_blocks + 1, bytes], all data of a block in a layer in one piece,
            first its entries and then its scales.
        part_layers: Number of layers of each part. The cache of a group has the layers and heads of
            each of its ranks in a part, one after another.
        parts: Layers and heads of the model in each part.
        layout: Layout of a block in a layer of a part.
        settle: Waits for launched steps that still write. Call it before reading or changing blocks
            outside of steps.
        others: Parts in the memory of other ranks, which run the same commands. None if all are
            here.
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
        """Allocate the cache.

        Args:
            config: Dimensions of one part, or of the only one.
            num_blocks: Number of blocks.
            block_size_tokens: Tokens of a block.
            dtype: Type of the entries.
            device: Device of the memory.
            shared: Allocate memory of a CPU in ``pages`` that other processes may map.
            pages: Existing pages to use. None: new ones.
            part_layers: Number of layers of each part.

        Raises ConfigError if the device has too little memory.
        """
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
        """Create the views ``data`` and ``scales`` of the bytes of ``blocks``."""
        shape = self.blocks.shape[:2]
        pairs = (self.block_size_tokens, 2, config.num_key_value_heads)
        data = self.blocks[:, :, : layout.data_bytes].view(dtype)
        self.data = data.view(*shape, *pairs, config.head_dim)
        self.scales: torch.Tensor | None = None
        if layout.scale_bytes:
            scales = self.blocks[:, :, layout.scales_at : layout.scales_end]
            if dtype is torch.int8:
                self.scales = scales.view(torch.bfloat16).view(*shape, *pairs, -1)
            else:
                self.scales = scales.view(torch.float32).view(*shape, *pairs)
        # Blocks are copied in words of eight bytes if their size allows it.
        self._words = self.blocks.view(torch.int64 if layout.size_bytes % 8 == 0 else torch.uint8)

    @property
    def block_bytes(self) -> int:
        """Size of one block over all layers, those of other ranks included."""
        num_layers, _, layer_bytes = self.blocks.shape
        return num_layers * layer_bytes + (0 if self.others is None else self.others.block_bytes)

    def part(self, index: int) -> KVCache:
        """Return one part of the cache, in the same memory."""
        begin = sum(self.part_layers[:index])
        own = slice(begin, begin + self.part_layers[index])
        part = copy(self)
        part.part_layers = self.part_layers[index : index + 1]
        part.blocks, part.data = self.blocks[own], self.data[own]
        part._words = self._words[own]
        part.scales = None if self.scales is None else self.scales[own]
        return part

    def layer(self, index: int) -> CacheLayer:
        """Return one layer in the format of kernels."""
        return CacheLayer(self.data[index], None if self.scales is None else self.scales[index])

    @torch.inference_mode()
    def scrub(self, blocks: list[int]) -> None:
        """Zero the blocks whose contents are not finite."""
        if self.others is not None:
            self.others.tell(ScrubBlocks(blocks))
        self.settle()
        telling = self.data if self.scales is None else self.scales
        for block in blocks:
            if not torch.isfinite(telling[:, block]).all():
                self.blocks[:, block].zero_()

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        """Copy one block to another, in all layers."""
        if self.others is not None:
            self.others.tell(CopyBlock(source, target))
        self.settle()
        self._words[:, target].copy_(self._words[:, source])

    @torch.inference_mode()
    def finite_blocks(self, blocks: list[int]) -> list[bool]:
        """Return which blocks hold only finite keys and values in the last layer.

        If a token's hidden state is not finite, its keys and values in every later layer are not
        finite either; the same is true for a key or value, since the token attends to itself. So
        the last layer decides for all layers, with a fraction of the reading.
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
    """Do nothing: a launched step is complete, or later work on the device waits for it."""


def pieces_of(blocks: torch.Tensor, block: int) -> list[memoryview]:
    """Return the bytes of one block, one piece for each layer.

    ``blocks`` is [num_layers, num_blocks, bytes], in host memory.
    """
    return [memoryview(layer) for layer in blocks[:, block].numpy()]


def _layout(config: ModelConfig, block_size_tokens: int, dtype: torch.dtype) -> BlockLayout:
    """Return the layout of a block with the heads of ``config``. 8-bit entries have scales."""
    return BlockLayout(
        block_size_tokens,
        config.num_key_value_heads,
        config.head_dim * dtype.itemsize,
        scale_bytes=_scale_bytes(config.head_dim, dtype),
    )


def _scale_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of the scales of a key or a value."""
    if dtype is torch.int8:
        return -(-head_dim // INT8_GROUP) * torch.bfloat16.itemsize
    return torch.float32.itemsize if dtype.itemsize == 1 else 0


def _zeros(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Allocate zeroed bytes.

    On a CPU the pages are untouched, so memory is taken only when blocks are first used.
    ``torch.zeros`` would write them all: half a second for a GiB.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    return _on_pages(private_pages(math.prod(shape)), shape)


def _on_pages(pages: mmap.mmap, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(pages, dtype=torch.uint8).view(shape)


_ROUNDED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def cache_dtype(name: str | None, dtype: torch.dtype) -> torch.dtype:
    """Return the type of cached keys and values.

    ``name`` is ``ResolvedEngineConfig.kv_cache_dtype``; ``dtype`` is the type of the weights.
    """
    return dtype if name is None else _ROUNDED[name]


def block_bytes(config: ModelConfig, block_size_tokens: int, dtype: torch.dtype) -> int:
    """Return the size of one block over all layers, with the scales of 8-bit entries."""
    layout = _layout(config, block_size_tokens, dtype)
    return layout.size_bytes * config.num_hidden_layers


def choose_num_blocks(
    config: ModelConfig,
    engine: ResolvedEngineConfig,
    dtype: torch.dtype,
    num_layers: int | None = None,
) -> int:
    """Return the number of blocks that the settings ask for.

    ``config`` is that of one part; all parts have ``num_layers`` together. Raises ConfigError if
    not even one block fits.
    """
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
    """Return the number of blocks that fit ``kv_cache_bytes``.

    It is at most what the full context windows of all sequences of a step use. ``config`` and
    ``num_layers`` are as in ``choose_num_blocks``. Raises ConfigError if not even one block fits.
    """
    block_size_tokens = engine.block_size_tokens
    size_bytes = block_bytes(config, block_size_tokens, dtype)
    size_bytes = size_bytes // config.num_hidden_layers * (num_layers or config.num_hidden_layers)
    fitting = kv_cache_bytes // size_bytes
    if fitting < 1:
        raise ConfigError(
            f"engine.kv_cache_bytes is {kv_cache_bytes}, but one block of {block_size_tokens} "
            f"tokens takes {size_bytes} bytes for this model; raise it."
        )
    bounds = engine.bounds(config.context_window_tokens)
    return min(fitting, bounds.num_sequences * bounds.num_blocks)

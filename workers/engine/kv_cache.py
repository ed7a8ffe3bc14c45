"""The memory of the KV cache: one contiguous allocation for all layers."""

from __future__ import annotations

import math
import mmap

import torch

from registry.checkpoint import ModelConfig
from schemas.errors import ConfigError
from workers.kernels.gpu.device_batch import CacheLayer


class KVCache:
    """Keys and values of every block in every layer.

    ``data``: [num_layers, num_blocks + 1, block_size_tokens, 2, num_kv_heads, head_dim]; of the
    pair, 0 is the key and 1 the value. The last block, ``null_block``, is never written: block
    tables are padded with it. All contents are always finite, since masked positions are still
    multiplied (by zero); so whoever wrote NaN there must ``scrub`` it.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.null_block = num_blocks
        self.block_size_tokens = block_size_tokens
        shape = (
            config.num_hidden_layers,
            num_blocks + 1,
            block_size_tokens,
            2,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.scales: torch.Tensor | None = None
        try:
            self.data = _zeros(shape, dtype, device)
        except (RuntimeError, OSError, OverflowError) as error:
            size_bytes = math.prod(shape) * dtype.itemsize
            raise ConfigError(
                f"The KV cache of {num_blocks} blocks takes {size_bytes} bytes, which {device} "
                f"does not have. Lower engine.kv_cache_bytes or engine.num_blocks."
            ) from error

    def layer(self, index: int) -> CacheLayer:
        """One layer, as kernels see it."""
        return CacheLayer(self.data[index], None if self.scales is None else self.scales[index])

    @torch.inference_mode()
    def scrub(self, blocks: list[int]) -> None:
        """Zero those of the blocks whose contents are not finite."""
        for block in blocks:
            contents = self.data[:, block]
            if not torch.isfinite(contents).all():
                contents.zero_()

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        """Give one block the contents of another, in all layers."""
        self.data[:, target].copy_(self.data[:, source])

    @torch.inference_mode()
    def finite_blocks(self, blocks: list[int]) -> list[bool]:
        """Which blocks hold only finite keys and values in the last layer.

        A token's hidden state that is not finite makes its keys and values in every later layer
        the same, and so does a key or value when the token attends to itself; so the last layer
        speaks for all, at a fraction of the reading.
        """
        index = torch.tensor(blocks, device=self.data.device)
        rows = self.data[-1].index_select(0, index).flatten(1)
        return torch.isfinite(rows.sum(-1, dtype=torch.float32)).tolist()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU in pages that nobody has touched, so that memory is taken as blocks are
    first used. ``torch.zeros`` writes them all: half a second for a GiB."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What keys and values are kept as: ``name`` as in ``EngineConfig.kv_cache_dtype``, ``dtype``
    that of the weights."""
    return torch.float8_e4m3fn if name == "fp8" else dtype


def block_bytes(config: ModelConfig, block_size_tokens: int, dtype: torch.dtype) -> int:
    """The size of one block over all layers."""
    values = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    return block_size_tokens * values * dtype.itemsize


def choose_num_blocks(
    config: ModelConfig,
    *,
    num_blocks: int,
    kv_cache_bytes: int,
    block_size_tokens: int,
    max_num_sequences: int,
    dtype: torch.dtype,
) -> int:
    """``num_blocks`` if given; else what fits ``kv_cache_bytes``, but never more than
    ``max_num_sequences`` full context windows can use.

    Raises ConfigError if not even one block fits.
    """
    if num_blocks:
        return num_blocks
    size_bytes = block_bytes(config, block_size_tokens, dtype)
    fitting = kv_cache_bytes // size_bytes
    if fitting < 1:
        raise ConfigError(
            f"engine.kv_cache_bytes is {kv_cache_bytes}, but one block of {block_size_tokens} "
            f"tokens takes {size_bytes} bytes for this model."
        )
    per_sequence = -(-config.context_window_tokens // block_size_tokens)
    return min(fitting, per_sequence * max_num_sequences)

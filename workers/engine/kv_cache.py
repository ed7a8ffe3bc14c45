"""The memory of the KV cache: one contiguous allocation for all layers."""

from __future__ import annotations

import math

import torch

from registry.checkpoint import ModelConfig
from schemas.errors import ConfigError


class KVCache:
    """Keys and values of every block in every layer.

    ``data``: [num_layers, num_blocks + 1, block_size_tokens, 2, num_kv_heads, head_dim]; of the
    pair, 0 is the key and 1 the value. The last block, ``null_block``, is never written: block
    tables are padded with it. All contents are always finite, since masked positions are still
    multiplied (by zero); so whoever wrote NaN there must ``clear`` it.
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
        try:
            # On a CPU zeros come from untouched pages: memory is taken as blocks are first used.
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            size_bytes = math.prod(shape) * dtype.itemsize
            raise ConfigError(
                f"The KV cache of {num_blocks} blocks takes {size_bytes} bytes, which {device} "
                f"does not have. Lower engine.kv_cache_bytes or engine.num_blocks."
            ) from error

    def clear(self, blocks: list[int]) -> None:
        """Zero the contents of blocks."""
        self.data[:, blocks] = 0


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
            f"kv_cache_bytes is {kv_cache_bytes}, but one block of {block_size_tokens} tokens "
            f"takes {size_bytes} bytes for this model."
        )
    per_sequence = -(-config.max_position_embeddings // block_size_tokens)
    return min(fitting, per_sequence * max_num_sequences)

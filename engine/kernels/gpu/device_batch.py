"""Arguments of the kernels: a step's batch on the device, and one layer's KV cache."""

from __future__ import annotations

from typing import NamedTuple

import torch

# The largest number of float8_e4m3fn.
FP8_MAX = 448.0


class CacheLayer(NamedTuple):
    """Keys and values of one layer, seen by blocks.

    ``data``: [num_blocks, block_size, 2, num_kv_heads, head_dim], of the pair keys first; the last
    dimension is contiguous, the others have any strides. ``scales``: float32 [num_blocks,
    block_size, 2, num_kv_heads], what the entries of one head of one token are multiplied by when
    ``data`` is float8_e4m3fn; None otherwise.
    """

    data: torch.Tensor
    scales: torch.Tensor | None


class DeviceBatch(NamedTuple):
    """One step's input, all of it on the device, in buffers that may be larger than the work.

    Tokens, [num_tokens]: ``token_ids`` and ``positions`` int64; ``slots`` int64, where in a layer's
    cache the token's key and value go (block * block_size + offset), -1 for padding, of which
    nothing is stored.

    Sequences, [num_sequences]: ``query_starts`` int32 [num_sequences + 1], the rows of sequence i
    are ``query_starts[i]`` … ``query_starts[i + 1] - 1``, consecutive tokens, possibly none.
    ``lengths`` int32: tokens in the cache once this step's are stored, the last row's own the last;
    0 for padding, whose rows attend to nothing and yield zeros. ``table_rows`` int32: which row of
    ``block_tables`` (int32 [num_rows, max_blocks]) is the sequence's; entries behind its last block
    are not read.

    The first ``num_single`` sequences have exactly one row each, rows 0 … num_single - 1 in order.
    ``num_single`` and all shapes are the same whenever a captured graph is replayed; everything
    else is read from the device.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    lengths: torch.Tensor
    table_rows: torch.Tensor
    block_tables: torch.Tensor
    num_single: int

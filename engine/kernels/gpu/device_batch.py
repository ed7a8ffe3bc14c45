"""Arguments of the kernels: a step's batch on the device, and a layer's KV cache."""

from __future__ import annotations

from typing import NamedTuple

import torch

# Largest number of float8_e4m3fn.
FP8_MAX = 448.0


class CacheLayer(NamedTuple):
    """Keys and values of one layer by blocks.

    ``data`` is [num_blocks, block_size, 2, num_kv_heads, head_dim], keys first in each pair. The
    last dimension is contiguous; others may have any strides. ``scales`` is float32 [num_blocks,
    block_size, 2, num_kv_heads], the factor of a head's entries for each token if ``data`` is
    float8_e4m3fn, otherwise None.
    """

    data: torch.Tensor
    scales: torch.Tensor | None


class DeviceBatch(NamedTuple):
    """Input of a step, all of it on the device, in buffers that may be larger than the work.

    Tokens, [num_tokens]: ``token_ids`` and ``positions`` are int64. ``slots``, int64, is the place
    of the token's key and value in a layer's cache (block * block_size + offset), or -1 for
    padding, which is not stored.

    Sequences, [num_sequences]: ``query_starts`` is int32 [num_sequences + 1]. Sequence i has the
    rows ``query_starts[i]`` … ``query_starts[i + 1] - 1``, consecutive tokens, possibly none.
    ``lengths``, int32, counts the tokens in the cache after this step's are stored; the last row's
    own token is the last. It is 0 for padding, whose rows attend to nothing and yield zeros.
    ``table_rows``, int32, is the sequence's row of ``block_tables`` (int32 [num_rows, max_blocks]);
    entries after its last block are not read.

    The first ``num_single`` sequences have exactly one row each, rows 0 … num_single - 1 in order.
    ``num_single`` and all shapes are the same in every replay of a captured graph; everything else
    is read from the device.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    lengths: torch.Tensor
    table_rows: torch.Tensor
    block_tables: torch.Tensor
    num_single: int

"""Attention over the paged KV cache in Triton."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from millrace.engine.kernels.gpu.attention_shape import AttentionShape
from millrace.engine.kernels.gpu.attention_tiles import (
    decode_tile,
    decode_tokens,
    masks_all_tiles,
    padded,
    prefill_tile,
)
from millrace.engine.kernels.gpu.device_batch import CacheLayer, DeviceBatch
from millrace.engine.kernels.gpu.jit.attention_decode import (
    combine_kernel,
    cut_kernel,
    decode_kernel,
)
from millrace.engine.kernels.gpu.jit.attention_prefill import prefill_kernel

# More tokens than any sequence has: the window of a layer that has none.
EVERYTHING = 2**31 - 1
# What a program of the kernels around the decode kernel takes at a time.
CUT_SEQUENCES, CUT_SHARES, COMBINE_SHARES = 256, 16, 16
_LOG2_E = math.log2(math.e)


class AttentionWork(NamedTuple):
    """How the tiles of keys of the sequences with one row are shared out, by distinct window.

    ``tile_starts``: int32 [num_windows, num_single + 1], how many tiles the sequences before have.
    Share s of n shares begins with tile s * total // n. ``first_sequences``: int32 [num_windows,
    n], which sequence that tile belongs to.
    """

    tile_starts: torch.Tensor
    first_sequences: torch.Tensor


class PagedAttention:
    """Causal attention of a step's rows over their sequences' blocks, in every layer of a model.

    ``num_programs``: how many programs the decode kernel has, which all run at once: two for each
    multiprocessor, since its tiles are such that two of them fit; what they have to do is cut into
    equal shares, one for each, so their number is best a multiple of the shape's ``num_kv_heads``.
    ``deterministic``: a row's result does not depend on the batch around it, nor on how its
    sequence was cut into steps, bit by bit; single rows of long contexts then take longer.

    Owns the memory for partial results, so one stream at a time may use it. Nothing here waits for
    the device or looks at what is there, so all of it may be captured in a graph.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        max_sequences: int,
        num_programs: int,
        device: torch.device,
        deterministic: bool = False,
    ) -> None:
        scale, softcap, num_kv_heads = shape.score_scale, shape.softcap, shape.num_kv_heads
        self.num_heads = shape.num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = shape.head_dim
        self.block_size = shape.block_size
        self.windows = tuple(EVERYTHING if window is None else window for window in shape.windows)
        self.deterministic = deterministic
        self._group = shape.num_heads // num_kv_heads
        self._max_sequences = max_sequences
        # Scores go to exp2 times ``factor``: plain ones, or tanh(score * cap_factor / log2(e) / 2).
        self._capped = softcap is not None
        self._factor = (scale if softcap is None else softcap) * _LOG2_E
        self._cap_factor = 0.0 if softcap is None else 2.0 * _LOG2_E * scale / softcap
        self._num_shares = max(1, num_programs // num_kv_heads)
        distinct = sorted(set(self.windows))
        self._window_indices = {window: index for index, window in enumerate(distinct)}
        self._distinct = torch.tensor(distinct, dtype=torch.int32, device=device)
        partial = (self._num_shares, num_kv_heads, 2, self._group)
        self._totals = torch.empty(*partial, shape.head_dim, dtype=torch.float32, device=device)
        self._stats = torch.empty(*partial, 2, dtype=torch.float32, device=device)

    def prepare(self, batch: DeviceBatch) -> AttentionWork:
        """Everything about a step that is the same in all layers.

        Raises ValueError if more than ``max_sequences`` sequences have one row.
        """
        num_single = 0 if self.deterministic else batch.num_single
        if num_single > self._max_sequences:
            raise ValueError(f"{num_single} sequences of one row; at most {self._max_sequences}")
        num_windows, num_shares = len(self._distinct), self._num_shares
        work = AttentionWork(
            self._distinct.new_empty(num_windows, num_single + 1),
            self._distinct.new_empty(num_windows, num_shares),
        )
        if num_single:
            cut_kernel[(-(-num_shares // CUT_SHARES), num_windows)](
                *(batch.lengths, self._distinct, *work),
                *(num_single, num_shares, num_single + 1),
                BLOCK_TOKENS=decode_tokens(self.head_dim),
                BLOCK_SEQUENCES=CUT_SEQUENCES,
                BLOCK_SHARES=CUT_SHARES,
                num_warps=4,
            )
        return work

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        cache: CacheLayer,
        batch: DeviceBatch,
        work: AttentionWork,
        out: torch.Tensor,
    ) -> None:
        """Write ``out`` [num_tokens, num_heads, head_dim] in the rows of all sequences; those of
        padding become zeros.

        ``queries``: the same shape, the last dimension contiguous. ``cache`` holds this step's keys
        and values already. Positions that a row does not see have no influence on it, whatever is
        there, except those of its own sequence's later rows in this step, which must be numbers.
        """
        window = self.windows[layer]
        num_sequences = len(batch.lengths)
        if batch.num_single and not self.deterministic:
            self._decode(window, queries, cache, batch, work, out)
        if num_sequences > (0 if self.deterministic else batch.num_single):
            self._prefill(window, queries, cache, batch, out)

    def _decode(
        self,
        window: int,
        queries: torch.Tensor,
        cache: CacheLayer,
        batch: DeviceBatch,
        work: AttentionWork,
        out: torch.Tensor,
    ) -> None:
        tile = decode_tile(self.head_dim, self._group, cache.data.dtype)
        index = self._window_indices[window]
        tile_starts, first_sequences = work.tile_starts[index], work.first_sequences[index]
        decode_kernel[(self.num_kv_heads, self._num_shares)](
            *(queries, *cache, batch.lengths, batch.table_rows, batch.block_tables),
            *(tile_starts, first_sequences, out, self._totals, self._stats),
            *(batch.num_single, window, self._num_shares),
            *self._strides(queries, cache, batch, out),
            GROUP_PADDED=tile.rows,
            BLOCK_TOKENS=tile.tokens,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **self._constants(queries, cache, window),
        )
        if self._num_shares > 1:
            combine_kernel[(self.num_heads, self._num_shares - 1)](
                *(self._totals, self._stats, tile_starts, first_sequences, out),
                *(batch.num_single, self._num_shares, out.stride(0), out.stride(1)),
                self.num_kv_heads,
                GROUP=self._group,
                HEAD_DIM=self.head_dim,
                HEAD_DIM_PADDED=padded(self.head_dim),
                BLOCK_SHARES=COMBINE_SHARES,
                num_warps=4,
            )

    def _prefill(
        self,
        window: int,
        queries: torch.Tensor,
        cache: CacheLayer,
        batch: DeviceBatch,
        out: torch.Tensor,
    ) -> None:
        cache_dtype = cache.data.dtype
        tile = prefill_tile(
            *(self.head_dim, self._group, queries.dtype, cache_dtype),
            deterministic=self.deterministic,
        )
        num_single = batch.num_single
        first_tile = 0 if self.deterministic else num_single
        num_sequences = len(batch.lengths)
        # Each sequence of many rows may have one tile more than its rows fill.
        full_tiles = (len(queries) - num_single) // (tile.rows // self._group)
        prefill_kernel[(full_tiles + num_sequences - first_tile, self.num_kv_heads)](
            *(queries, *cache, batch.query_starts, batch.lengths),
            *(batch.table_rows, batch.block_tables, out),
            *(num_sequences, num_single, first_tile, window),
            *self._strides(queries, cache, batch, out),
            BLOCK_ROWS=tile.rows,
            BLOCK_TOKENS=tile.tokens,
            FIXED=self.deterministic or masks_all_tiles(self.head_dim, cache_dtype),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **self._constants(queries, cache, window),
        )

    def _strides(
        self, queries: torch.Tensor, cache: CacheLayer, batch: DeviceBatch, out: torch.Tensor
    ) -> tuple[float, ...]:
        """The arguments that both kernels have behind those of their own."""
        scales = (0, 0, 0, 0) if cache.scales is None else cache.scales.stride()
        return (
            *(*queries.stride()[:2], *out.stride()[:2]),
            *(*cache.data.stride()[:4], *scales),
            *(batch.block_tables.stride(0), self._factor, self._cap_factor),
        )

    def _constants(
        self, queries: torch.Tensor, cache: CacheLayer, window: int
    ) -> dict[str, int | str]:
        return {
            "GROUP": self._group,
            "HEAD_DIM": self.head_dim,
            "HEAD_DIM_PADDED": padded(self.head_dim),
            "BLOCK_SIZE": self.block_size,
            "WINDOWED": window != EVERYTHING,
            "SCALED": cache.scales is not None,
            "CAPPED": self._capped,
            # Products of float32 in full; other dtypes have one way only.
            "PRECISION": "ieee" if queries.dtype == torch.float32 else "tf32",
        }

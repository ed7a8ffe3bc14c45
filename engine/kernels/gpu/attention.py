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

# Window of a layer without one: more tokens than any sequence has.
EVERYTHING = 2**31 - 1
# Elements that one program takes at a time in the kernels before and after the decode kernel.
CUT_SEQUENCES, CUT_SHARES, COMBINE_SHARES = 256, 16, 16
_LOG2_E = math.log2(math.e)


class AttentionWork(NamedTuple):
    """Division of single-row sequences' tiles of keys into shares, by distinct window.

    ``tile_starts`` is int32 [num_windows, num_single + 1], the number of tiles of earlier
    sequences. Share s of n begins with tile s * total // n. ``first_sequences`` is int32
    [num_windows, n], the sequence of that tile.
    """

    tile_starts: torch.Tensor
    first_sequences: torch.Tensor


class PagedAttention:
    """Causal attention of a step's rows over their sequences' blocks, in every layer of a model.

    ``num_programs`` is the number of programs of the decode kernel that run at the same time: two
    per multiprocessor, because tiles are sized so that two fit. The work is cut into equal shares,
    one per program, so the number is best a multiple of the shape's ``num_kv_heads``.

    ``deterministic`` makes it batch-invariant: a row's result has the same bits for any batch and
    any cut of its sequence into steps. Single rows of long contexts then take longer.

    Owns the memory for partial results, so one stream at a time may use it. It never waits for the
    device or reads from it, so a graph can capture all of it.
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
        # Scores are scaled by ``factor`` for exp2, directly or by tanh(score * cap_factor / log2(e)
        # / 2).
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
        """Compute the parts of a step that are the same in all layers.

        Raises:
            ValueError: More than ``max_sequences`` sequences have one row.
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
        """Write the attention of all sequences' rows to ``out`` [num_tokens, num_heads, head_dim].

        Rows of padding become zeros. ``queries`` has the same shape, with a contiguous last
        dimension. ``cache`` holds this step's keys and values already. Positions that a row does
        not see have no effect on it, except later rows of its own sequence in this step, which must
        not be NaN.
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
        # Each sequence with several rows may have one partial tile.
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
        """Return the arguments that both kernels have after their own."""
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
            # Multiply float32 in full precision; other dtypes have one precision only.
            "PRECISION": "ieee" if queries.dtype == torch.float32 else "tf32",
        }

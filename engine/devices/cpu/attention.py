"""Attention over the paged KV cache in plain torch."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.kernels.cpu import PagedCache
from millrace.engine.kv.cache import INT8_GROUP, KVCache
from millrace.engine.step.batch import FlatBatch, QueryRange

# Most bytes of keys and values in one gather, so that they are still in the core's own cache
# when they are read again. Measured with 2 MiB of L2: tiles of 1 MiB take 830 us, one tile of
# 6.8 MiB takes 1,250 us.
TILE_BYTES = 1 << 20
_MOST_INT8 = 127.0


class DecodeTile(NamedTuple):
    """Single-token rows ``start`` … ``end - 1``, attended together over padded block tables.

    ``block_ids`` is int64 [num_rows * num_blocks]; each row reads its tokens ``begin`` …
    ``end_token - 1``. ``mask`` is [num_rows, 1, 1, end_token - begin] of 0 or -inf, or None for a
    single row, which sees all of its tokens.
    """

    start: int
    end: int
    block_ids: torch.Tensor
    begin: int
    end_token: int
    mask: torch.Tensor | None


class PrefillChunk(NamedTuple):
    """Rows of one sequence.

    With context, ``block_ids`` are the blocks of the last ``length`` tokens. Without context, the
    rows attend to one another only. ``mask`` is [num_rows, length] of 0 or -inf, or None for a
    plain causal mask.
    """

    start: int
    end: int
    block_ids: torch.Tensor | None
    length: int
    mask: torch.Tensor | None


class TorchAttentionMetadata(NamedTuple):
    """Metadata of a step: ``slots`` int64 [num_tokens] for keys and values, the rest by window."""

    slots: torch.Tensor
    tiles: dict[int | None, list[DecodeTile]]
    chunks: dict[int | None, list[PrefillChunk]]


class TorchAttention:
    """Attention that gathers blocks into scratch, tile by tile, and calls torch's attention.

    A cache in int8 is always read as stored, including a chunk's own keys and values, so that
    results do not depend on how a prompt is cut.

    ``windows`` gives the number of tokens that a token sees in each layer, itself included, or None
    for all. Blocks before the windows of all rows of a tile are not read.
    """

    def __init__(
        self, cache: KVCache, *, num_heads: int, dtype: torch.dtype, windows: Rows[int | None]
    ) -> None:
        num_layers, num_blocks, block_size, _, num_kv_heads, head_dim = cache.data.shape
        if len(windows) != num_layers:
            raise ValueError(f"{len(windows)} windows for {num_layers} layers")
        self.windows = tuple(windows)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.block_size = block_size
        self.dtype = dtype
        self._group_size = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._null_block = cache.null_block
        self._device = cache.data.device
        self._cache = cache
        token_values = 2 * num_kv_heads * head_dim
        block_bytes = block_size * token_values * dtype.itemsize
        self._tile_blocks = max(1, TILE_BYTES // block_bytes)
        if cache.scales is None:
            slots = cache.data.view(num_layers, num_blocks * block_size, token_values)
            self._slots = slots.unbind(0)
            blocks = cache.data.view(num_layers, num_blocks, block_size * token_values)
            self._blocks = blocks.unbind(0)
            self._scratch = blocks.new_empty(self._tile_blocks, block_size * token_values)

    def prepare(self, batch: FlatBatch) -> TorchAttentionMetadata:
        """Compute the parts of a step that are the same in all layers."""
        single, several = batch.ranges[: batch.num_single], batch.ranges[batch.num_single :]
        tiles = {window: self._tiles(single, window) for window in set(self.windows)}
        return TorchAttentionMetadata(self.slots(batch.ranges), tiles, self.chunks(several))

    def slots(self, ranges: Rows[QueryRange]) -> torch.Tensor:
        """Return the slot of each row's key and value: int64 [num_tokens]."""
        size = self.block_size
        slots: list[int] = []
        for _, num_tokens, context, table in ranges:
            if num_tokens == 1:
                slots.append(table[context // size] * size + context % size)
            else:
                end = context + num_tokens
                slots += [table[p // size] * size + p % size for p in range(context, end)]
        return torch.tensor(slots, device=self._device)

    def chunks(self, ranges: Rows[QueryRange]) -> dict[int | None, list[PrefillChunk]]:
        """Return the chunks of the ranges for each window of the layers."""
        return {
            window: [self._chunk(query, window) for query in ranges] for window in set(self.windows)
        }

    def _tiles(self, ranges: list[QueryRange], window: int | None) -> list[DecodeTile]:
        """Cut rows of rising length so that a tile's padded blocks fit the scratch."""
        tiles: list[DecodeTile] = []
        start = width = 0
        for row, query in enumerate(ranges):
            count = self._end_block(query) - self._first_block(query, window)
            width = max(width, count)
            if row > start and width * (row + 1 - start) > self._tile_blocks:
                tiles.append(self._tile(ranges[start:row], window))
                start, width = row, count
        if ranges:
            tiles.append(self._tile(ranges[start:], window))
        return tiles

    def _tile(self, ranges: list[QueryRange], window: int | None) -> DecodeTile:
        size = self.block_size
        start, end = ranges[0].start, ranges[-1].start + 1
        tables = [q.block_table[self._first_block(q, window) : self._end_block(q)] for q in ranges]
        width = max(len(table) for table in tables)
        block_ids: list[int] = []
        for table in tables:
            block_ids += table
            block_ids += [self._null_block] * (width - len(table))
        ids = torch.tensor(block_ids, device=self._device)
        # Offsets and ends are counted from the first token of the row's first block.
        offsets = [self._first_block(query, window) * size for query in ranges]
        ends = [
            q.num_context_tokens + 1 - offset for q, offset in zip(ranges, offsets, strict=True)
        ]
        begins = [
            first_visible(q.num_context_tokens, window) - offset
            for q, offset in zip(ranges, offsets, strict=True)
        ]
        if len(ranges) == 1:
            return DecodeTile(start, end, ids, begins[0], ends[0], None)
        columns = torch.arange(width * size, device=self._device)
        visible = columns < torch.tensor(ends, device=self._device)[:, None]
        if window is not None:
            visible &= columns >= torch.tensor(begins, device=self._device)[:, None]
        mask = self._additive(visible)[:, None, None, :]
        return DecodeTile(start, end, ids, 0, width * size, mask)

    def _chunk(self, query: QueryRange, window: int | None) -> PrefillChunk:
        end = query.start + query.num_tokens
        first = 0
        ids = None
        if query.num_context_tokens or self._cache.scales is not None:
            first = self._first_block(query, window)
            table = query.block_table[first : self._end_block(query)]
            ids = torch.tensor(table, device=self._device)
        first *= self.block_size
        length = query.num_context_tokens + query.num_tokens - first
        if ids is None and (window is None or query.num_tokens <= window):
            return PrefillChunk(query.start, end, None, length, None)
        columns = torch.arange(length, device=self._device)
        rows = columns[query.num_context_tokens - first :, None]
        visible = columns <= rows
        if window is not None:
            visible &= columns > rows - window
        return PrefillChunk(query.start, end, ids, length, self._additive(visible))

    def _first_block(self, query: QueryRange, window: int | None) -> int:
        """Return the first block of the range's sequence that one of its rows sees."""
        return first_visible(query.num_context_tokens, window) // self.block_size

    def _end_block(self, query: QueryRange) -> int:
        return -(-(query.num_context_tokens + query.num_tokens) // self.block_size)

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(visible.shape, dtype=self.dtype, device=self._device)
        return zeros.masked_fill_(~visible, float("-inf"))

    def layer_tokens(self, layer: int) -> torch.Tensor:
        """Return one layer's keys and values by slots: [num_slots, 2, num_kv_heads, head_dim]."""
        if self._cache.scales is not None:
            return self._widened(layer, torch.arange(self._cache.data.shape[1])).flatten(0, 1)
        return self._slots[layer].view(-1, 2, self.num_kv_heads, self._head_dim)

    def paged(self, layer: int) -> PagedCache:
        """Return one layer's cache for the compiled kernels."""
        cache = self._cache
        return PagedCache(
            cache.blocks[layer].data_ptr(),
            self.block_size,
            self.num_kv_heads,
            is_int8=cache.scales is not None,
        )

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys_values: torch.Tensor,
        metadata: TorchAttentionMetadata,
    ) -> torch.Tensor:
        """Store the new keys and values in the cache, then attend causally.

        A layer with a sliding window attends to the last tokens only.

        Args:
            layer: Index of the layer.
            queries: [num_tokens, num_heads, head_dim].
            keys_values: [num_tokens, 2 * num_kv_heads, head_dim], keys first.
            metadata: Return value of ``prepare`` for this step.

        Returns:
            [num_tokens, num_heads * head_dim].
        """
        self._store(layer, metadata.slots, keys_values)
        attended = queries.new_empty(queries.shape)
        window = self.windows[layer]
        for tile in metadata.tiles[window]:
            self._attend_tile(layer, queries, attended, tile)
        self.attend_chunks(layer, queries, keys_values, attended, metadata.chunks[window])
        return attended.flatten(1)

    def attend_chunks(
        self,
        layer: int,
        queries: torch.Tensor,
        keys_values: torch.Tensor,
        attended: torch.Tensor,
        chunks: Rows[PrefillChunk],
    ) -> None:
        """Compute the rows of ``chunks`` of ``attended`` [num_tokens, num_heads, head_dim].

        Their keys and values must be in the cache already.
        """
        # Key heads are the batch; query heads that share a key head see it without a copy.
        shape = (-1, self.num_kv_heads, self._group_size, self._head_dim)
        for chunk in chunks:
            rows = slice(chunk.start, chunk.end)
            if chunk.block_ids is None:
                keys = keys_values[rows, : self.num_kv_heads]
                values = keys_values[rows, self.num_kv_heads :]
            else:
                gathered = self._gather(layer, chunk.block_ids, 1)
                keys, values = gathered[0, : chunk.length].unbind(1)
            expanded = (self.num_kv_heads, self._group_size, chunk.length, self._head_dim)
            out = F.scaled_dot_product_attention(
                queries[rows].view(shape).permute(1, 2, 0, 3),
                keys.transpose(0, 1).unsqueeze(1).expand(expanded),
                values.transpose(0, 1).unsqueeze(1).expand(expanded),
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
            )
            attended[rows].view(shape).copy_(out.permute(2, 0, 1, 3))

    def _attend_tile(
        self, layer: int, queries: torch.Tensor, attended: torch.Tensor, tile: DecodeTile
    ) -> None:
        num_rows = tile.end - tile.start
        gathered = self._gather(layer, tile.block_ids, num_rows)
        keys, values = gathered[:, tile.begin : tile.end_token].unbind(2)
        # Query heads that share a key head become the rows of one small matrix.
        shape = (num_rows, self.num_kv_heads, self._group_size, self._head_dim)
        out = F.scaled_dot_product_attention(
            queries[tile.start : tile.end].view(shape),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=tile.mask,
        )
        attended[tile.start : tile.end].view(shape).copy_(out)

    def _gather(self, layer: int, block_ids: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Gather the contents of padded block tables, valid until the next gather.

        Returns [num_rows, num_blocks * block_size, 2, num_kv_heads, head_dim], keys first.
        """
        if self._cache.scales is not None:
            widened = self._widened(layer, block_ids)
            return widened.view(num_rows, -1, 2, self.num_kv_heads, self._head_dim)
        count = len(block_ids)
        if count > len(self._scratch):
            self._scratch = self._scratch.new_empty(count, self._scratch.shape[1])
        gathered = self._scratch[:count]
        torch.index_select(self._blocks[layer], 0, block_ids, out=gathered)
        return gathered.view(num_rows, -1, 2, self.num_kv_heads, self._head_dim)

    def _store(self, layer: int, slots: torch.Tensor, keys_values: torch.Tensor) -> None:
        cache = self._cache
        if cache.scales is None:
            self._slots[layer].index_copy_(0, slots, keys_values.flatten(1))
            return
        heads = keys_values.view(-1, 2, self.num_kv_heads, self._head_dim).float()
        codes, scales = _rounded(heads)
        at = (slots // self.block_size, slots % self.block_size)
        cache.data[layer].index_put_(at, codes)
        cache.scales[layer].index_put_(at, scales)

    def _widened(self, layer: int, block_ids: torch.Tensor) -> torch.Tensor:
        """Dequantize int8 blocks to [num_blocks, block_size, 2, num_kv_heads, head_dim]."""
        cache = self._cache
        assert cache.scales is not None, "only an int8 cache is dequantized"
        codes = cache.data[layer].index_select(0, block_ids).float()
        scales = cache.scales[layer].index_select(0, block_ids)
        widened = scales.float().repeat_interleave(INT8_GROUP, -1)[..., : self._head_dim]
        return (codes * widened).to(self.dtype)


def _rounded(heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize heads in float32 to int8 [..., head_dim] and bfloat16 scales [..., num_groups].

    A scale is the largest magnitude of a group over 127, or NaN for a group that is not finite.
    """
    head_dim = heads.shape[-1]
    padded = F.pad(heads, (0, -head_dim % INT8_GROUP))
    groups = padded.view(*heads.shape[:-1], -1, INT8_GROUP)
    scales = (groups.abs().amax(-1) / _MOST_INT8).bfloat16()
    scales = torch.where(scales == 0, 1.0, scales)
    scales = torch.where(groups.isfinite().all(-1), scales, torch.nan)
    codes = (groups / scales.float().unsqueeze(-1)).nan_to_num(0.0).round()
    # A scale near the least number of bfloat16 may be rounded far down.
    codes = codes.clamp_(-_MOST_INT8, _MOST_INT8)
    return codes.flatten(-2)[..., :head_dim].to(torch.int8), scales


def first_visible(position: int, window: int | None) -> int:
    """Return the first token that the token at ``position`` sees."""
    return 0 if window is None else max(0, position + 1 - window)

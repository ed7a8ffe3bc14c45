"""Attention over the paged KV cache: the interface, and the implementation in plain torch."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from workers.engine.batch import FlatBatch, QueryRange
from workers.engine.kv_cache import KVCache

MetadataT = TypeVar("MetadataT")

# Keys and values that one gather copies, at most: what is read again at once should still be in
# the core's own cache. Measured on 2 MiB of L2: tiles of 1 MiB take 830 us where one tile of
# 6.8 MiB takes 1,250 us.
TILE_BYTES = 1 << 20


class AttentionBackend(Protocol[MetadataT]):
    """What a decoder needs of attention; the place where kernels come in."""

    def prepare(self, batch: FlatBatch) -> MetadataT:
        """Everything about a step that is the same in all layers."""

    def attend(
        self, layer: int, queries: torch.Tensor, keys_values: torch.Tensor, metadata: MetadataT
    ) -> torch.Tensor:
        """Store the new keys and values in the cache, then attend causally over all of them.

        ``queries``: [num_tokens, num_heads, head_dim]; ``keys_values``: [num_tokens,
        2 * num_kv_heads, head_dim], keys first. Returns [num_tokens, num_heads * head_dim].
        """


class DecodeTile(NamedTuple):
    """Single-token rows ``start`` … ``end - 1``, attended together over padded block tables.

    ``block_ids``: int64 [num_rows * num_blocks]. ``mask``: [num_rows, 1, 1, length], 0 or -inf;
    None for one row, which is cut to its ``length`` instead.
    """

    start: int
    end: int
    block_ids: torch.Tensor
    length: int
    mask: torch.Tensor | None


class PrefillChunk(NamedTuple):
    """Rows of one sequence. With context: ``block_ids`` of all its ``length`` tokens, and ``mask``
    [num_rows, length]; without, the rows attend to one another only."""

    start: int
    end: int
    block_ids: torch.Tensor | None
    length: int
    mask: torch.Tensor | None


class TorchAttentionMetadata(NamedTuple):
    """``slots``: int64 [num_tokens], where each row's key and value go."""

    slots: torch.Tensor
    tiles: list[DecodeTile]
    chunks: list[PrefillChunk]


class TorchAttention:
    """Gathers blocks into contiguous scratch, tile by tile, and calls torch's own attention."""

    def __init__(self, cache: KVCache, *, num_heads: int, dtype: torch.dtype) -> None:
        num_layers, num_blocks, block_size, _, num_kv_heads, head_dim = cache.data.shape
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._group_size = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._block_size = block_size
        self._null_block = cache.null_block
        self._device = cache.data.device
        self._dtype = dtype
        token_values = 2 * num_kv_heads * head_dim
        self._slots = cache.data.view(num_layers, num_blocks * block_size, token_values).unbind(0)
        blocks = cache.data.view(num_layers, num_blocks, block_size * token_values)
        self._blocks = blocks.unbind(0)
        block_bytes = block_size * token_values * dtype.itemsize
        self._tile_blocks = max(1, TILE_BYTES // block_bytes)
        self._scratch = blocks.new_empty(self._tile_blocks, block_size * token_values)

    def prepare(self, batch: FlatBatch) -> TorchAttentionMetadata:
        size = self._block_size
        slots: list[int] = []
        for _, num_tokens, context, table in batch.ranges:
            if num_tokens == 1:
                slots.append(table[context // size] * size + context % size)
            else:
                end = context + num_tokens
                slots += [table[p // size] * size + p % size for p in range(context, end)]
        return TorchAttentionMetadata(
            slots=torch.tensor(slots, device=self._device),
            tiles=self._tiles(batch.ranges[: batch.num_single]),
            chunks=[self._chunk(query) for query in batch.ranges[batch.num_single :]],
        )

    def _tiles(self, ranges: list[QueryRange]) -> list[DecodeTile]:
        """Cut rows of rising length so that a tile's padded blocks fit the scratch."""
        tiles: list[DecodeTile] = []
        start = 0
        for row in range(1, len(ranges) + 1):
            if row < len(ranges):
                width = self._num_blocks(ranges[row])
                if width * (row + 1 - start) <= self._tile_blocks:
                    continue
            tiles.append(self._tile(ranges[start:row]))
            start = row
        return tiles

    def _tile(self, ranges: list[QueryRange]) -> DecodeTile:
        width = self._num_blocks(ranges[-1])
        start, end = ranges[0].start, ranges[-1].start + 1
        block_ids: list[int] = []
        for query in ranges:
            count = self._num_blocks(query)
            block_ids += query.block_table[:count]
            block_ids += [self._null_block] * (width - count)
        ids = torch.tensor(block_ids, device=self._device)
        if len(ranges) == 1:
            return DecodeTile(start, end, ids, ranges[0].num_context_tokens + 1, None)
        length = width * self._block_size
        lengths = torch.tensor([q.num_context_tokens + 1 for q in ranges], device=self._device)
        mask = self._additive(torch.arange(length, device=self._device) < lengths[:, None])
        return DecodeTile(start, end, ids, length, mask[:, None, None, :])

    def _chunk(self, query: QueryRange) -> PrefillChunk:
        end = query.start + query.num_tokens
        length = query.num_context_tokens + query.num_tokens
        if query.num_context_tokens == 0:
            return PrefillChunk(query.start, end, None, length, None)
        ids = torch.tensor(query.block_table[: self._num_blocks(query)], device=self._device)
        columns = torch.arange(length, device=self._device)
        visible = columns <= columns[query.num_context_tokens :, None]
        return PrefillChunk(query.start, end, ids, length, self._additive(visible))

    def _num_blocks(self, query: QueryRange) -> int:
        return -(-(query.num_context_tokens + query.num_tokens) // self._block_size)

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
        return zeros.masked_fill_(~visible, float("-inf"))

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys_values: torch.Tensor,
        metadata: TorchAttentionMetadata,
    ) -> torch.Tensor:
        self._slots[layer].index_copy_(0, metadata.slots, keys_values.flatten(1))
        attended = queries.new_empty(queries.shape)
        for tile in metadata.tiles:
            self._attend_tile(layer, queries, attended, tile)
        for chunk in metadata.chunks:
            self._attend_chunk(layer, queries, keys_values, attended, chunk)
        return attended.flatten(1)

    def _attend_tile(
        self, layer: int, queries: torch.Tensor, attended: torch.Tensor, tile: DecodeTile
    ) -> None:
        num_rows = tile.end - tile.start
        keys, values = self._gather(layer, tile.block_ids, num_rows, tile.length)
        # The query heads that share a key head become the rows of one small matrix.
        shape = (num_rows, self._num_kv_heads, self._group_size, self._head_dim)
        out = F.scaled_dot_product_attention(
            queries[tile.start : tile.end].view(shape),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=tile.mask,
        )
        attended[tile.start : tile.end].view(shape).copy_(out)

    def _attend_chunk(
        self,
        layer: int,
        queries: torch.Tensor,
        keys_values: torch.Tensor,
        attended: torch.Tensor,
        chunk: PrefillChunk,
    ) -> None:
        rows = slice(chunk.start, chunk.end)
        if chunk.block_ids is None:
            keys = keys_values[rows, : self._num_kv_heads]
            values = keys_values[rows, self._num_kv_heads :]
        else:
            gathered = self._gather(layer, chunk.block_ids, 1, chunk.length)
            keys, values = gathered[0][0], gathered[1][0]
        # Key heads are the batch; each is seen, not copied, by the query heads that share it.
        shape = (-1, self._num_kv_heads, self._group_size, self._head_dim)
        expanded = (self._num_kv_heads, self._group_size, chunk.length, self._head_dim)
        out = F.scaled_dot_product_attention(
            queries[rows].view(shape).permute(1, 2, 0, 3),
            keys.transpose(0, 1).unsqueeze(1).expand(expanded),
            values.transpose(0, 1).unsqueeze(1).expand(expanded),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
        )
        attended[rows].view(shape).copy_(out.permute(2, 0, 1, 3))

    def _gather(
        self, layer: int, block_ids: torch.Tensor, num_rows: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of padded block tables: each [num_rows, length, num_kv_heads,
        head_dim], valid until the next gather."""
        count = len(block_ids)
        if count > len(self._scratch):
            self._scratch = self._scratch.new_empty(count, self._scratch.shape[1])
        gathered = self._scratch[:count]
        torch.index_select(self._blocks[layer], 0, block_ids, out=gathered)
        tokens = gathered.view(num_rows, -1, 2, self._num_kv_heads, self._head_dim)
        return tokens[:, :length, 0], tokens[:, :length, 1]

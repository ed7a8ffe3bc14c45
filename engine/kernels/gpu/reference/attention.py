"""Attention over the paged KV cache in plain torch, sequence by sequence, in float32."""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.attention_shape import AttentionShape
from millrace.engine.kernels.gpu.device_batch import CacheLayer, DeviceBatch


def attend(
    queries: torch.Tensor,
    cache: CacheLayer,
    batch: DeviceBatch,
    *,
    window: int | None,
    softcap: float | None,
    scale: float,
    fixed: bool = False,
) -> torch.Tensor:
    """Compute the attention of ``queries`` [num_tokens, num_heads, head_dim].

    Returns their shape and dtype. Rows of padding, and rows of no sequence, are zeros. Only tokens
    that a sequence's rows see are read. With ``fixed`` each row is computed by itself.
    """
    out = torch.zeros_like(queries, memory_format=torch.contiguous_format)
    starts, lengths = batch.query_starts.tolist(), batch.lengths.tolist()
    table_rows = batch.table_rows.tolist()
    for start, end, length, table_row in zip(
        starts[:-1], starts[1:], lengths, table_rows, strict=True
    ):
        table = batch.block_tables[table_row]
        for first, behind, seen in _parts(start, end, length, fixed=fixed):
            out[first:behind] = _attend_rows(
                queries[first:behind], cache, table, seen, window, softcap, scale
            )
    return out


def _parts(start: int, end: int, length: int, *, fixed: bool) -> list[tuple[int, int, int]]:
    """Return parts of a sequence of ``length``: their rows, and what the last row sees."""
    if not length or end <= start:
        return []
    if not fixed:
        return [(start, end, length)]
    return [(row, row + 1, length - end + row + 1) for row in range(start, end)]


def _attend_rows(
    queries: torch.Tensor,
    cache: CacheLayer,
    block_table: torch.Tensor,
    length: int,
    window: int | None,
    softcap: float | None,
    scale: float,
) -> torch.Tensor:
    """Compute the last rows of a sequence of ``length``, in their shape and dtype."""
    first_row = length - len(queries)
    first = 0 if window is None else max(0, first_row + 1 - window)
    keys, values = _read(cache, block_table, first, length)
    rows = torch.arange(first_row, length, device=queries.device)[:, None]
    columns = torch.arange(first, length, device=queries.device)
    hidden = columns > rows
    if window is not None:
        hidden |= columns <= rows - window
    shape = (len(queries), keys.shape[1], -1, keys.shape[2])
    grouped = queries.float().reshape(shape)
    scores = torch.einsum("thgd,shd->thgs", grouped, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores.masked_fill_(hidden[:, None, None, :], float("-inf"))
    attended = torch.einsum("thgs,shd->thgd", scores.softmax(-1), values)
    return attended.flatten(1, 2).to(queries.dtype)


def _read(
    cache: CacheLayer, block_table: torch.Tensor, first: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read keys and values of the tokens ``first`` … ``length - 1``.

    Each is float32 [num_tokens, num_kv_heads, head_dim].
    """
    block_size = cache.data.shape[1]
    positions = torch.arange(first, length, device=block_table.device)
    blocks, offsets = block_table[positions // block_size].long(), positions % block_size
    pairs = cache.data[blocks, offsets].float()
    if cache.scales is not None:
        pairs *= cache.scales[blocks, offsets][..., None]
    keys, values = pairs.unbind(1)
    return keys, values


class ReferenceAttention:
    """Reference of ``PagedAttention`` for any device.

    It reads the batch's lengths, so a graph cannot capture it. Its results depend on the shape
    alone; if ``deterministic``, a row's result depends on the row alone.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        max_sequences: int,  # noqa: ARG002
        num_programs: int,  # noqa: ARG002
        device: torch.device,  # noqa: ARG002
        deterministic: bool = False,
    ) -> None:
        self.num_heads = shape.num_heads
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.block_size = shape.block_size
        self.windows = tuple(shape.windows)
        self._softcap = shape.softcap
        self._fixed = deterministic
        self._scale = shape.score_scale

    def prepare(self, batch: DeviceBatch) -> None:
        """Do nothing: layers share only the batch itself."""

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        cache: CacheLayer,
        batch: DeviceBatch,
        work: None,  # noqa: ARG002
        out: torch.Tensor,
    ) -> None:
        """Write ``out`` [num_tokens, num_heads, head_dim] in the rows of all sequences."""
        num_rows = batch.query_starts[-1]
        window = self.windows[layer]
        attended = attend(
            queries,
            cache,
            batch,
            window=window,
            softcap=self._softcap,
            scale=self._scale,
            fixed=self._fixed,
        )
        out[:num_rows] = attended[:num_rows]

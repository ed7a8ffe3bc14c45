"""The ranks of a group as threads of this process, each with its slice of a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from millrace.engine.adapters.rows import AdapterWeights, RowAdapters
from millrace.engine.devices.cpu.attention import TorchAttention
from millrace.engine.devices.cpu.operations import TorchOperations
from millrace.engine.kernels.operations import Collectives
from millrace.engine.kv.cache import KVCache
from millrace.engine.models.decoder import Decoder, DecoderWeights
from millrace.engine.models.loader import load_weights
from millrace.engine.models.shard import check_shard
from millrace.engine.models.weight_reader import TensorSource
from millrace.engine.step.batch import FlatBatch, QueryRange
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.checkpoints.shard import Shard, shard_config
from tests.engine.support import prompt

CPU = torch.device("cpu")
BLOCK_SIZE = 16
# Prompts of two sequences; then one token of each, and a third prompt beside them.
PROMPTS = [prompt(1, 40), prompt(2, 17), prompt(3, 21)]
_TIMEOUT_S = 60.0

ResultT = TypeVar("ResultT")


class _Meeting:
    """Meeting point at which threads exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self.brought: list[torch.Tensor] = [torch.empty(0)] * size


class ThreadCollectives:
    """``Collectives`` of a thread; ``num_calls`` counts its own calls."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = len(meeting.brought)
        self.num_calls = 0
        self._meeting = meeting

    def all_reduce(self, rows: torch.Tensor) -> None:
        assert rows.is_contiguous()
        self.num_calls += 1
        self._meeting.brought[self.rank] = rows
        self._meeting.barrier.wait()
        assert {part.shape for part in self._meeting.brought} == {rows.shape}
        total = torch.zeros(rows.shape)
        for part in self._meeting.brought:
            total += part.float()
        self._meeting.barrier.wait()
        rows.copy_(total)


def on_ranks(size: int, compute: Callable[[ThreadCollectives], ResultT]) -> list[ResultT]:
    """Return the result of ``compute`` on each rank. Raise the error of the first rank that
    failed."""
    meeting = _Meeting(size)

    def of_rank(rank: int) -> ResultT:
        try:
            with torch.inference_mode():
                return compute(ThreadCollectives(rank, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(of_rank, rank) for rank in range(size)]
        failures = [failure for future in futures if (failure := future.exception()) is not None]
        for failure in failures:
            if not isinstance(failure, threading.BrokenBarrierError):
                raise failure
        return [future.result() for future in futures]


def logits_of(
    path: Path,
    *,
    size: int = 1,
    splits_experts: bool = False,
    num_stages: int = 1,
    adapters: Callable[[Shard], AdapterWeights] | None = None,
    source: Callable[[], TensorSource] | None = None,
    change: Callable[[DecoderWeights, Shard], DecoderWeights] | None = None,
    behind: Callable[[Decoder[FlatBatch, Any], torch.Tensor], torch.Tensor] = Decoder.logits,
    dtype: torch.dtype = torch.float32,
    **makers: Any,
) -> torch.Tensor:
    """Return the logits of every row of two steps: [num_rows, vocab_size].

    Each stage has ``size`` ranks, with weights after a ``change``, if given. Every other row has
    the adapter; each rank has a source of its own. ``behind`` turns the last stage's hidden states
    into the result, which is logits by default.
    """

    def compute(
        stage: int, received: list[list[torch.Tensor]], collectives: ThreadCollectives
    ) -> list[torch.Tensor]:
        shard = Shard(collectives.rank, size, splits_experts, stage, num_stages)
        own = None if adapters is None else adapters(shard)
        tensors = None if source is None else source()
        weights = weights_of(path, shard, collectives, dtype=dtype, source=tensors, **makers)
        weights = weights if change is None else change(weights, shard)
        decoder = _decoder(path, shard, collectives, weights)
        if shard.is_first:
            states = [decoder.forward(batch, rows) for batch, rows in _steps(own)]
        else:
            # A stage that is not the first needs no tokens.
            states = [
                decoder.forward_hidden(
                    batch._replace(token_ids=torch.empty(0, dtype=torch.int64)), hidden, rows
                )
                for (batch, rows), hidden in zip(
                    _steps(own), received[collectives.rank], strict=True
                )
            ]
        return [behind(decoder, hidden) for hidden in states] if shard.is_last else states

    made: list[list[torch.Tensor]] = []
    for stage in range(num_stages):
        made = on_ranks(size, partial(compute, stage, made))
    return torch.cat([torch.cat(rows) for rows in made], -1)


def weights_of(
    path: Path,
    shard: Shard,
    collectives: Collectives | None,
    *,
    dtype: torch.dtype = torch.float32,
    **makers: Any,
) -> DecoderWeights:
    """Return the weights of a rank."""
    config = read_model_config(path)
    check_shard(config, shard.size, shard.splits_experts, shard.num_stages)
    return load_weights(
        path,
        config,
        dtype=dtype,
        device=CPU,
        shard=shard,
        collectives=collectives,
        **makers,
    )


def _decoder(
    path: Path, shard: Shard, collectives: Collectives, weights: DecoderWeights
) -> Decoder[FlatBatch, Any]:
    """Return a rank's decoder by torch's operations, with a KV cache of its layers and heads."""
    own = shard_config(read_model_config(path), shard)
    cache = KVCache(
        own, num_blocks=20, block_size_tokens=BLOCK_SIZE, dtype=weights.dtype, device=CPU
    )
    attention = TorchAttention(
        cache, num_heads=own.num_attention_heads, dtype=weights.dtype, windows=own.windows
    )
    operations = TorchOperations(attention, epsilon=own.rms_norm_eps)
    return Decoder(own, weights, operations, collectives if shard.is_sliced else None)


def _steps(adapter: AdapterWeights | None) -> Iterator[tuple[FlatBatch, RowAdapters | None]]:
    """Return two steps: two prompts; then a token after each of them, and a third prompt."""
    first, second, third = PROMPTS
    tables = [list(range(4)), list(range(4, 7)), list(range(7, 10))]
    yield _step([(first, 0, tables[0]), (second, 0, tables[1])], 0, adapter)
    behind = [([9], len(first), tables[0]), ([8], len(second), tables[1])]
    yield _step([*sorted(behind, key=lambda one: one[1]), (third, 0, tables[2])], 2, adapter)


def _step(
    chunks: list[tuple[list[int], int, list[int]]], num_single: int, adapter: AdapterWeights | None
) -> tuple[FlatBatch, RowAdapters | None]:
    token_ids: list[int] = []
    positions: list[int] = []
    ranges: list[QueryRange] = []
    for tokens, num_context_tokens, table in chunks:
        ranges.append(QueryRange(len(token_ids), len(tokens), num_context_tokens, table))
        token_ids += tokens
        positions += range(num_context_tokens, num_context_tokens + len(tokens))
    batch = FlatBatch(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        ranges=ranges,
        num_single=num_single,
        sampled_rows=torch.empty(0, dtype=torch.int64),
        sampled=[],
        pooled=[],
        scored=[],
    )
    if adapter is None:
        return batch, None
    of_rows = torch.arange(len(token_ids), dtype=torch.int32) % 2 - 1
    return batch, RowAdapters([adapter], of_rows)

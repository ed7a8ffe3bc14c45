"""The decoder of rank 0, with which the others compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from millrace.engine.adapters.rows import AdapterWeights, RowAdapters
from millrace.engine.adapters.weights import LayerSlices
from millrace.engine.devices.cpu.fused_decoder import FusedDecoder
from millrace.engine.devices.cpu.loading import AnyDecoder
from millrace.engine.kernels.operations import WeightSize
from millrace.engine.models.shard import Shard, vocabulary_range
from millrace.engine.parallel.group.ranks import RankLostError, Ranks
from millrace.engine.parallel.group.step_wire import encode_logits, encode_step
from millrace.engine.step.batch import FlatBatch
from millrace.registry.checkpoints.checkpoint import ModelConfig


class GroupAdapter:
    """An adapter that all ranks have, who know it by ``number``: ``own`` is rank 0's slice."""

    def __init__(self, own: AdapterWeights, number: int) -> None:
        self.own = own
        self.number = number

    @property
    def num_weights(self) -> int:
        """Of rank 0's slice, as the weights that a step is measured by are."""
        return self.own.num_weights


class LeadDecoder:
    """Has every rank compute its part of what ``decoder`` is asked for, which is rank 0's.

    What goes wrong on rank 0 once the others have been told ends the group: they wait for rank 0
    in the middle of a step then.
    """

    def __init__(
        self,
        decoder: AnyDecoder,
        ranks: Ranks | None,
        config: ModelConfig,
        abort: Callable[[str], None],
    ) -> None:
        """``ranks``: of the first stage, None if it has one only; ``config``: of the whole model;
        ``abort`` ends the group."""
        self._decoder = decoder
        self._ranks = ranks
        self._abort = abort
        self._widths = vocabulary_widths(config, 1 if ranks is None else ranks.size)

    @property
    def dtype(self) -> torch.dtype:
        return self._decoder.dtype

    @property
    def embedding(self) -> torch.Tensor:
        """[tokens of rank 0, hidden_size]."""
        return self._decoder.embedding

    @property
    def weight_size(self) -> WeightSize:
        """Of rank 0's layers and head: every rank's step takes as long as these."""
        return self._decoder.weight_size

    def expert_choices(self) -> tuple[int, ...]:
        """See ``Decoder``: of rank 0's layers, of which every rank knows all choices."""
        return self._decoder.expert_choices()

    def adapter(self, layers: list[LayerSlices]) -> AdapterWeights:
        """Rank 0's slices of an adapter, as its decoder takes them."""
        return self._decoder.adapter(layers)

    def forward(self, batch: FlatBatch, adapters: RowAdapters | None = None) -> torch.Tensor:
        """See ``Decoder.forward``. Raises RankLostError."""
        with self._step(batch, adapters):
            return self._decoder.forward(batch, _own(adapters))

    def forward_with_features(
        self, batch: FlatBatch, adapters: RowAdapters | None, layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``FusedDecoder.forward_with_features``, of whose layers every rank has the whole
        hidden states; of one stage, whose rows are exact. Raises RankLostError."""
        assert isinstance(self._decoder, FusedDecoder), "rows are exact by steps of one call"
        with self._step(batch, adapters):
            return self._decoder.forward_with_features(batch, _own(adapters), layers)

    @contextmanager
    def _step(self, batch: FlatBatch, adapters: RowAdapters | None) -> Iterator[None]:
        """The other ranks of the stage compute the same meanwhile."""
        numbers = adapter_numbers(adapters)
        message = [] if self._ranks is None else encode_step(batch, numbers)
        with self.together():
            if self._ranks is not None:
                self._ranks.post(*message)
            yield
            if self._ranks is not None:
                self._ranks.check()

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``Decoder.normed``."""
        return self._decoder.normed(hidden)

    def labels(self, normed: torch.Tensor) -> torch.Tensor:
        """See ``Decoder.labels``."""
        return self._decoder.labels(normed)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, vocab_size] of rows of ``forward``. Raises RankLostError."""
        if not len(hidden):
            return hidden.new_empty(0, sum(self._widths))
        assert self._ranks is not None, "the last of several stages makes logits"
        with self.together():
            self._ranks.post(*encode_logits(hidden))
            logits = self._ranks.gather(self._decoder.logits(hidden), self._widths)
            self._ranks.check()
        assert logits is not None, "rank 0 gathers"
        return logits

    @contextmanager
    def together(self) -> Iterator[None]:
        """What goes wrong meanwhile ends the group. Raises RankLostError for it."""
        try:
            yield
        except Exception as error:
            self._abort(str(error))
            raise RankLostError(f"the group of ranks failed: {error}") from error


def _own(adapters: RowAdapters | None) -> RowAdapters | None:
    """Rank 0's slices."""
    if adapters is None:
        return None
    weights = [one.own for one in adapters.weights if isinstance(one, GroupAdapter)]
    return RowAdapters(weights, adapters.of_rows)


def adapter_numbers(adapters: RowAdapters | None) -> list[int]:
    """Those by which the ranks know the adapters of a batch, all of them of the group."""
    if adapters is None:
        return []
    numbers = [one.number for one in adapters.weights if isinstance(one, GroupAdapter)]
    assert len(numbers) == len(adapters.weights)
    return numbers


def vocabulary_widths(config: ModelConfig, size: int) -> list[int]:
    """How many tokens' logits each of so many ranks computes."""
    return [len(vocabulary_range(config.vocab_size, Shard(rank, size))) for rank in range(size)]

"""The decoder of rank 0 on a CPU, with which the others compute, and its pipeline of stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from millrace.engine.adapters.rows import AdapterWeights, RowAdapters
from millrace.engine.adapters.weights import LayerSlices
from millrace.engine.devices.cpu.fused_decoder import FusedDecoder
from millrace.engine.devices.cpu.loading import AnyDecoder
from millrace.engine.kernels.operations import WeightSize
from millrace.engine.kernels.stage_link import StageLink
from millrace.engine.models.shard import Shard, vocabulary_range
from millrace.engine.parallel.lead import Lead
from millrace.engine.parallel.messages import (
    PartCommand,
    StageStep,
    encode_command,
    encode_logits,
    encode_stage,
    encode_step,
)
from millrace.engine.parallel.ranks import Ranks
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
    """Has every rank compute its part of what ``decoder`` is asked for, which is rank 0's."""

    def __init__(
        self,
        decoder: AnyDecoder,
        ranks: Ranks | None,
        config: ModelConfig,
        group: Lead,
    ) -> None:
        """``ranks``: of the first stage, None if it has one only; ``config``: of the whole
        model."""
        self._decoder = decoder
        self._ranks = ranks
        self.group = group
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
        with self.group.together():
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
        with self.group.together():
            self._ranks.post(*encode_logits(hidden))
            logits = self._ranks.gather(self._decoder.logits(hidden), self._widths)
            self._ranks.check()
        assert logits is not None, "rank 0 gathers"
        return logits


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


class StepResult(NamedTuple):
    """``logits`` [num_wanted, vocab_size] of the rows that were wanted, and all ``states``
    [num_tokens, hidden_size] behind the final norm, if they were."""

    logits: torch.Tensor
    states: torch.Tensor | None


class SentStep(NamedTuple):
    """A step that is under way."""

    number: int
    num_tokens: int
    num_wanted: int
    wants_states: bool


class Pipeline:
    """Rank 0's ends of the links: ``first`` goes to the second stage, ``last`` comes from the last
    one, whose ``size`` ranks have a part of the vocabulary each.

    As many steps may be under way as the links have slots. Steps are read in the order in which
    they were sent; one that is not read is dropped when a later one is.
    """

    def __init__(
        self, lead: LeadDecoder, first: StageLink, last: StageLink, config: ModelConfig, size: int
    ) -> None:
        self._lead = lead
        self._first = first
        self._last = last
        self._hidden_size = config.hidden_size
        self._widths = vocabulary_widths(config, size)
        self._num_sent = 0
        self._num_messages = 0

    def send(self, batch: FlatBatch, wanted: torch.Tensor, *, wants_states: bool) -> SentStep:
        """Compute the first stage's part of a step and send it on. ``wanted``: int64, the rows
        whose logits are. Raises RankLostError."""
        hidden = self._lead.forward(batch, batch.adapters)
        numbers = adapter_numbers(batch.adapters)
        message = encode_stage(StageStep(batch, numbers, hidden, wanted, wants_states))
        number = self._num_sent
        self._write(message)
        self._num_sent += 1
        return SentStep(number, len(hidden), len(wanted), wants_states)

    def tell(self, command: PartCommand) -> None:
        """Have the ranks of other hosts obey, between the steps before it and those behind it.
        Raises RankLostError."""
        self._write(encode_command(command))

    def _write(self, message: Sequence[bytes | memoryview]) -> None:
        with self._lead.group.together():
            self._first.write(self._num_messages, *message)
        self._num_messages += 1

    def receive(self, sent: SentStep) -> StepResult:
        """What became of a step. Raises RankLostError."""
        number, num_tokens, num_wanted, wants_states = sent
        with self._lead.group.together():
            self._last.wait_written(number, bound=True)
            parts = [
                self._rows(self._last.part(number, rank), num_wanted, width)
                for rank, width in enumerate(self._widths)
            ]
            logits = torch.cat(parts, 1)
            states = None
            if wants_states:
                begin = num_wanted * self._widths[0] * self._lead.dtype.itemsize
                part = self._last.part(number)[begin:]
                states = self._rows(part, num_tokens, self._hidden_size).clone()
            self._last.done(number)
        return StepResult(logits, states)

    def settle(self) -> None:
        """Wait until nothing that was sent is under way any more. Raises RankLostError."""
        if self._num_sent:
            with self._lead.group.together():
                self._last.wait_written(self._num_sent - 1, bound=True)

    def _rows(self, part: memoryview, num_rows: int, width: int) -> torch.Tensor:
        dtype = self._lead.dtype
        if not num_rows:
            return torch.empty(0, width, dtype=dtype)
        return torch.frombuffer(part, dtype=dtype, count=num_rows * width).view(num_rows, width)

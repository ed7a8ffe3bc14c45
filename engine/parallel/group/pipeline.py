"""The stages behind the first: steps go to them, and come back when the last has computed them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from millrace.engine.kernels.stage_link import StageLink
from millrace.engine.parallel.group.lead_decoder import (
    LeadDecoder,
    adapter_numbers,
    vocabulary_widths,
)
from millrace.engine.parallel.group.step_wire import (
    PartCommand,
    StageStep,
    encode_command,
    encode_stage,
)
from millrace.engine.step.batch import FlatBatch
from millrace.registry.checkpoints.checkpoint import ModelConfig


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
        with self._lead.together():
            self._first.write(self._num_messages, *message)
        self._num_messages += 1

    def receive(self, sent: SentStep) -> StepResult:
        """What became of a step. Raises RankLostError."""
        number, num_tokens, num_wanted, wants_states = sent
        with self._lead.together():
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
            with self._lead.together():
                self._last.wait_written(self._num_sent - 1, bound=True)

    def _rows(self, part: memoryview, num_rows: int, width: int) -> torch.Tensor:
        dtype = self._lead.dtype
        if not num_rows:
            return torch.empty(0, width, dtype=dtype)
        return torch.frombuffer(part, dtype=dtype, count=num_rows * width).view(num_rows, width)

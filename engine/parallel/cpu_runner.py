"""Runner of a group of ranks on CPUs, one device to the engine, and its pipeline."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch

from millrace.engine.adapters.rows import AdapterWeights, RowAdapters
from millrace.engine.devices.cpu.loading import AnyDecoder, load_adapter_weights
from millrace.engine.devices.cpu.runner import ModelRunner
from millrace.engine.kernels.ranks import SharedRanks
from millrace.engine.kernels.stage_link import StageLink
from millrace.engine.kv.cache import CacheCommand, CheckBlocks, KVCache
from millrace.engine.parallel.layout import vocabulary_widths
from millrace.engine.parallel.lead import Lead
from millrace.engine.parallel.members import Members
from millrace.engine.parallel.messages import (
    PartCommand,
    StageStep,
    encode_command,
    encode_logits,
    encode_stage,
    encode_step,
)
from millrace.engine.parallel.ranks import Ranks
from millrace.engine.sampling.prompt_logprobs import ScoredChunk, score_rows
from millrace.engine.sampling.sampler import Likeliest
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.batch import FlatBatch, build_batch
from millrace.engine.step.pooling import PooledChunk, places_of, pool_rows
from millrace.engine.step.runner import ChosenTokens, InFlightStep, nothing_chosen
from millrace.engine.types import RunnerFigures
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.checkpoints.shard import Shard
from millrace.schemas.models.adapters import AdapterRef


class GroupAdapter:
    """Adapter that all ranks know by ``number``; ``own`` is rank 0's slice."""

    def __init__(self, own: AdapterWeights, number: int) -> None:
        self.own = own
        self.number = number

    @property
    def num_weights(self) -> int:
        """Elements of rank 0's slice: steps are measured by rank 0's weights."""
        return self.own.num_weights


def _own(adapters: RowAdapters | None) -> RowAdapters | None:
    """Return rank 0's slices."""
    if adapters is None:
        return None
    weights = [one.own for one in adapters.weights if isinstance(one, GroupAdapter)]
    return RowAdapters(weights, adapters.of_rows)


def adapter_numbers(adapters: RowAdapters | None) -> list[int]:
    """Return the numbers by which the ranks know a batch's adapters, which all are the group's."""
    if adapters is None:
        return []
    numbers = [one.number for one in adapters.weights if isinstance(one, GroupAdapter)]
    assert len(numbers) == len(adapters.weights)
    return numbers


class StepResult(NamedTuple):
    """Result of a step.

    ``logits``, float32 [num_wanted, vocab_size], are of the requested rows; ``states`` [num_tokens,
    hidden_size] are all rows after the final norm, if requested, in float32, too.
    """

    logits: torch.Tensor
    states: torch.Tensor | None


class SentStep(NamedTuple):
    """Step in flight through the pipeline."""

    number: int
    num_tokens: int
    num_wanted: int
    wants_states: bool


class Pipeline:
    """Rank 0's ends of the links.

    ``first`` goes to the second stage. ``last`` comes from the last stage, whose ``size`` ranks
    have a part of the vocabulary each.

    The number of steps in flight is limited by the links' slots. Results are read in the order in
    which steps were sent. Reading a step drops the unread results of earlier ones.
    """

    def __init__(
        self,
        lead: Lead,
        first: StageLink,
        last: StageLink,
        config: ModelConfig,
        size: int,
    ) -> None:
        self._lead = lead
        self._first = first
        self._last = last
        self._hidden_size = config.hidden_size
        self._widths = vocabulary_widths(config, size)
        self._num_sent = 0
        self._num_messages = 0

    def send(
        self, batch: FlatBatch, hidden: torch.Tensor, wanted: torch.Tensor, *, wants_states: bool
    ) -> SentStep:
        """Send a step on with the first stage's output, ``hidden`` [num_tokens, hidden_size].

        ``wanted``, int64, are the rows whose logits are needed. Raises RankLostError.
        """
        numbers = adapter_numbers(batch.adapters)
        message = encode_stage(StageStep(batch, numbers, hidden, wanted, wants_states))
        number = self._num_sent
        self._write(message)
        self._num_sent += 1
        return SentStep(number, len(hidden), len(wanted), wants_states)

    def tell(self, command: PartCommand) -> None:
        """Send a command to the ranks of other hosts, in order with the steps.

        Raises RankLostError.
        """
        self._write(encode_command(command))

    def _write(self, message: Rows[bytes | memoryview]) -> None:
        with self._lead.together():
            self._first.write(self._num_messages, *message)
        self._num_messages += 1

    def receive(self, sent: SentStep) -> StepResult:
        """Wait for the result of a step. Raises RankLostError."""
        number, num_tokens, num_wanted, wants_states = sent
        with self._lead.together():
            self._last.wait_written(number, bound=True)
            parts = [
                _rows(self._last.part(number, rank), num_wanted, width)
                for rank, width in enumerate(self._widths)
            ]
            logits = torch.cat(parts, 1)
            states = None
            if wants_states:
                begin = num_wanted * self._widths[0] * torch.float32.itemsize
                part = self._last.part(number)[begin:]
                states = _rows(part, num_tokens, self._hidden_size).clone()
            self._last.done(number)
        return StepResult(logits, states)

    def settle(self) -> None:
        """Wait until no sent step is in flight. Raises RankLostError."""
        if self._num_sent:
            with self._lead.together():
                self._last.wait_written(self._num_sent - 1, bound=True)


def _rows(part: memoryview, num_rows: int, width: int) -> torch.Tensor:
    """Return the float32 rows at the start of ``part``, in the same memory."""
    if not num_rows:
        return torch.empty(0, width)
    count = num_rows * width
    return torch.frombuffer(part, dtype=torch.float32, count=count).view(num_rows, width)


class GroupParts(NamedTuple):
    """Parts of a group's runner.

    ``config`` is the whole model's and ``cache`` holds all ranks' blocks. ``shard`` is rank 0's
    share, computed by ``decoder`` with the ``ranks`` of its stage.
    """

    config: ModelConfig
    decoder: AnyDecoder
    cache: KVCache
    likeliest: Likeliest | None
    lead: Lead
    shard: Shard
    ranks: Ranks | None
    is_row_exact: bool


class GroupRunner(ModelRunner):
    """Rank 0's runner, which computes steps together with the other ranks.

    Its KV cache covers all ranks, so that blocks are moved for all of them at once. A rank that
    ends or hangs ends the group: the next launch raises RankLostError, and the function given to
    ``watch`` is called.
    """

    def __init__(self, parts: GroupParts) -> None:
        config, decoder, cache, likeliest, lead, shard, ranks, is_row_exact = parts
        super().__init__(config, decoder, cache, likeliest, is_row_exact=is_row_exact)
        self.members = lead.members
        self._lead = lead
        self._shard = shard
        self._ranks = ranks
        self._widths = vocabulary_widths(config, shard.size)

    def watch(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, on another thread, once a rank has ended."""
        self._lead.watch(wake)

    def check(self) -> None:
        """Raise RankLostError if the group has failed."""
        self._lead.check()

    def close(self) -> None:
        """End the processes of the other ranks."""
        self._lead.members.close()

    def figures(self) -> RunnerFigures:
        """Return the counts of steps, and of rank 0's exchanges with its stage in shared memory."""
        figures, ranks = super().figures(), self._ranks
        if not isinstance(ranks, SharedRanks):
            return figures
        num_exchanges, num_bytes, waited_s = ranks.traffic
        return figures._replace(
            num_exchanges=num_exchanges, num_exchanged_bytes=num_bytes, exchange_wait_s=waited_s
        )

    def _forward(self, batch: FlatBatch, adapters: RowAdapters | None) -> torch.Tensor:
        """Compute hidden states with the other ranks of the stage. Raises RankLostError."""
        ranks = self._ranks
        message = [] if ranks is None else encode_step(batch, adapter_numbers(adapters))
        with self._lead.together():
            if ranks is not None:
                ranks.post(*message)
            hidden = super()._forward(batch, _own(adapters))
            if ranks is not None:
                ranks.check()
        return hidden

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits with the other ranks, which have a part of the vocabulary each.

        Raises RankLostError.
        """
        if not len(hidden):
            return torch.empty(0, sum(self._widths))
        assert self._ranks is not None, "the last of several stages makes logits"
        with self._lead.together():
            self._ranks.post(*encode_logits(hidden))
            logits = self._ranks.gather(self._decoder.logits(hidden), self._widths)
            self._ranks.check()
        assert logits is not None, "rank 0 gathers"
        return logits

    def load_adapter(
        self,
        adapter: AdapterRef,
        slot: int,  # noqa: ARG002 (adapters are wherever there is memory)
        *,
        max_rank: int,
    ) -> AdapterWeights:
        """Read every rank's slices of an adapter. Raises AdapterError, ModelSourceError."""
        number = self.members.load_adapter(adapter, max_rank)
        try:
            own = load_adapter_weights(self._decoder, self.config, adapter, max_rank, self._shard)
            self.members.wait_loaded(number)
        except BaseException:
            self.members.drop_adapter(number)
            raise
        weights = GroupAdapter(own, number)
        weakref.finalize(weights, self.members.drop_adapter, number)
        return weights


class PipelineRunner(GroupRunner):
    """Group runner for several stages.

    A launched step is read once the last stage has computed it; meanwhile the first stage computes
    another step.
    """

    def __init__(self, parts: GroupParts, pipeline: Pipeline, num_stages: int) -> None:
        super().__init__(parts)
        self.num_stages = num_stages
        self._pipeline = pipeline
        self.cache.settle = pipeline.settle

    def launch(self, plan: Rows[ScheduledSequence]) -> InFlightStep:
        """Start to compute a plan's tokens. Raises RankLostError."""
        with torch.inference_mode():
            batch = build_batch(plan, self._device, exact=self.is_row_exact)
            num_sampled = len(batch.sampled_rows)
            scored = [row for rows in batch.scored for row in range(rows.start, rows.end)]
            wanted = torch.cat((batch.sampled_rows, torch.tensor(scored, dtype=torch.int64)))
            hidden = self._forward(batch, batch.adapters)
            sent = self._pipeline.send(batch, hidden, wanted, wants_states=bool(batch.pooled))
            pooled_places = places_of(batch.pooled)
            logits = torch.empty(num_sampled, self.config.vocab_size)
        pooled: list[PooledChunk] = []
        scores: list[ScoredChunk] = []

        def read() -> ChosenTokens:
            with torch.inference_mode():
                result = self._pipeline.receive(sent)
                logits.copy_(result.logits[:num_sampled])
                if result.states is not None:
                    labels = self._decoder.labels
                    pooled.extend(pool_rows(batch.pooled, result.states, labels, pooled_places))
                if batch.scored:
                    # Row of the logits for each scored row.
                    places = torch.zeros(sent.num_tokens, 1, dtype=torch.int64)
                    places[scored, 0] = torch.arange(num_sampled, sent.num_wanted)
                    scores.extend(
                        score_rows(batch.scored, places, lambda rows: result.logits[rows[:, 0]])
                    )
            return nothing_chosen()

        return InFlightStep([], batch.sampled, logits, pooled, scores, read)


class RemoteParts:
    """Parts of the KV cache on other hosts, see ``OtherParts``.

    Commands go from stage to stage in order with the steps. Answers come by the ranks' sockets.
    """

    def __init__(
        self, pipeline: Pipeline, members: Members, block_bytes: int, timeout_s: float
    ) -> None:
        """Use ``pipeline`` for commands and ``members`` for answers.

        ``block_bytes`` is the size of one block in all of these parts. Waiting for an answer ends
        after ``timeout_s``.
        """
        self.block_bytes = block_bytes
        self._pipeline = pipeline
        self._members = members
        self._timeout_s = timeout_s

    def tell(self, command: CacheCommand) -> None:
        """Send a command to each rank. Raises RankLostError."""
        self._pipeline.tell(PartCommand(0, command))

    def ask(self, command: CheckBlocks) -> list[bool]:
        """Return for each KV cache block whether its numbers are finite in all remote parts."""
        number = self._members.expect_checked()
        self._pipeline.tell(PartCommand(number, command))
        return self._members.wait_checked(number, self._timeout_s)

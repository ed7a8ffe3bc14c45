"""The runner of a group of ranks on CPUs: what the engine sees of it is one device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch

from millrace.engine.adapters.rows import AdapterWeights
from millrace.engine.devices.cpu.loading import load_adapter_weights
from millrace.engine.devices.cpu.runner import ModelRunner
from millrace.engine.kernels.ranks import SharedRanks
from millrace.engine.kv.cache import KVCache
from millrace.engine.kv.cache_commands import CacheCommand, CheckBlocks
from millrace.engine.models.shard import Shard
from millrace.engine.parallel.cpu_decoder import GroupAdapter, LeadDecoder, Pipeline
from millrace.engine.parallel.members import Members
from millrace.engine.parallel.messages import PartCommand
from millrace.engine.parallel.ranks import Ranks
from millrace.engine.sampling.prompt_logprobs import ScoredChunk, score_rows
from millrace.engine.sampling.sampler import Likeliest
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.batch import FlatBatch, build_batch
from millrace.engine.step.features import give_features
from millrace.engine.step.pooling import PooledChunk, places_of, pool_rows
from millrace.engine.step.runner import ChosenTokens, InFlightStep, nothing_chosen
from millrace.engine.types import RunnerFigures
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.schemas.models.adapters import AdapterRef


class GroupParts(NamedTuple):
    """What a group's runner is made of; ``config`` is the whole model's, ``cache`` that of all
    ranks, ``shard`` what rank 0 computes, with the ``ranks`` of its stage."""

    config: ModelConfig
    decoder: LeadDecoder
    cache: KVCache
    likeliest: Likeliest | None
    shard: Shard
    ranks: Ranks | None
    is_row_exact: bool


class GroupRunner(ModelRunner):
    """Rank 0's runner, which has the other ranks compute with it. Its KV cache is that of all
    ranks, so that blocks are moved for all of them at once.

    A rank that ends or hangs ends the group, with RankLostError in whatever is launched next;
    ``watch`` says whom to wake then.
    """

    def __init__(self, parts: GroupParts) -> None:
        config, decoder, cache, likeliest, shard, ranks, is_row_exact = parts
        super().__init__(config, decoder, cache, likeliest, is_row_exact=is_row_exact)
        self.members = decoder.group.members
        self._shard = shard
        self._ranks = ranks
        self._lead = decoder

    def watch(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, on another thread, once a rank has ended."""
        self._lead.group.watch(wake)

    def check(self) -> None:
        """Raise RankLostError if the group has failed."""
        self._lead.group.check()

    def figures(self) -> RunnerFigures:
        """What was counted of its steps, and of what rank 0 has exchanged with the other ranks of
        its stage where these have memory in common."""
        figures, ranks = super().figures(), self._ranks
        if not isinstance(ranks, SharedRanks):
            return figures
        num_exchanges, num_bytes, waited_s = ranks.traffic
        return figures._replace(
            num_exchanges=num_exchanges, num_exchanged_bytes=num_bytes, exchange_wait_s=waited_s
        )

    def _forward(self, batch: FlatBatch) -> torch.Tensor:
        layers = self._feature_layers
        if not layers:
            return super()._forward(batch)
        hidden, features = self._lead.forward_with_features(batch, batch.adapters, layers)
        give_features(batch, features)
        return hidden

    def load_adapter(
        self,
        adapter: AdapterRef,
        slot: int,  # noqa: ARG002 (adapters are wherever there is memory)
        *,
        max_rank: int,
    ) -> AdapterWeights:
        """Have every rank read its slices of an adapter. Raises AdapterError, ModelSourceError."""
        number = self.members.load_adapter(adapter, max_rank)
        try:
            own = load_adapter_weights(self._lead, self.config, adapter, max_rank, self._shard)
            self.members.wait_loaded(number)
        except BaseException:
            self.members.drop_adapter(number)
            raise
        weights = GroupAdapter(own, number)
        weakref.finalize(weights, self.members.drop_adapter, number)
        return weights


class PipelineRunner(GroupRunner):
    """The same for several stages. A step that is launched is read when the last stage has computed
    it; meanwhile the first one computes another."""

    def __init__(self, parts: GroupParts, pipeline: Pipeline, num_stages: int) -> None:
        super().__init__(parts)
        self.num_stages = num_stages
        self._pipeline = pipeline
        self.cache.settle = pipeline.settle

    def launch(self, plan: Rows[ScheduledSequence]) -> InFlightStep:
        """Have a plan's tokens computed. Raises RankLostError."""
        with torch.inference_mode():
            batch = build_batch(plan, self._device, exact=self.is_row_exact)
            num_sampled = len(batch.sampled_rows)
            scored = [row for rows in batch.scored for row in range(rows.start, rows.end)]
            wanted = torch.cat((batch.sampled_rows, torch.tensor(scored, dtype=torch.int64)))
            sent = self._pipeline.send(batch, wanted, wants_states=bool(batch.pooled))
            pooled_places = places_of(batch.pooled)
            logits = torch.empty(num_sampled, self.config.vocab_size, dtype=self._lead.dtype)
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
                    # Where each of the scored rows has its logits.
                    places = torch.zeros(sent.num_tokens, 1, dtype=torch.int64)
                    places[scored, 0] = torch.arange(num_sampled, sent.num_wanted)
                    scores.extend(
                        score_rows(batch.scored, places, lambda rows: result.logits[rows[:, 0]])
                    )
            return nothing_chosen()

        return InFlightStep([], batch.sampled, logits, pooled, scores, read)


class RemoteParts:
    """See ``OtherParts``: commands go from stage to stage like steps, and so are obeyed between
    those before them and those behind them; answers come by the sockets of the ranks."""

    def __init__(
        self, pipeline: Pipeline, members: Members, block_bytes: int, timeout_s: float
    ) -> None:
        """``block_bytes``: of one block in all of these parts. An answer is given up after
        ``timeout_s``."""
        self.block_bytes = block_bytes
        self._pipeline = pipeline
        self._members = members
        self._timeout_s = timeout_s

    def tell(self, command: CacheCommand) -> None:
        """Have each part obey. Raises RankLostError."""
        self._pipeline.tell(PartCommand(0, command))

    def ask(self, command: CheckBlocks) -> list[bool]:
        """Which of the blocks hold only finite numbers in all of these parts."""
        number = self._members.expect_checked()
        self._pipeline.tell(PartCommand(number, command))
        return self._members.wait_checked(number, self._timeout_s)

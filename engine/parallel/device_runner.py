"""Rank 0's runner of a model over several devices."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import partial

import torch

from millrace.engine.adapters.rows import AdapterWeights
from millrace.engine.devices.cuda.inputs import ToldStep
from millrace.engine.devices.cuda.runner import DeviceRunner, PlannedStep
from millrace.engine.devices.cuda.steps import ALL_LAYERS, Stage, StepParts
from millrace.engine.kernels.ranks import RanksFailedError
from millrace.engine.parallel.device_ranks import PipelineStage
from millrace.engine.parallel.lead import DeviceLead
from millrace.engine.parallel.messages import SharedRows, WantedRows
from millrace.engine.sampling.prompt_logprobs import ScoredChunk, score_rows
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.pooling import ChunkPlace, PooledChunk, places_of, pool_rows
from millrace.engine.step.runner import ChosenTokens, InFlightStep
from millrace.engine.step.sequence import SequenceState
from millrace.registry.checkpoints.shard import Shard
from millrace.schemas.models.adapters import AdapterRef


class DeviceGroupRunner(DeviceRunner):
    """Runner of a group of devices on rank 0.

    It announces each step to the other ranks before it tells its own device, and samples for all of
    them. Chosen tokens go to every rank's state within the step.

    A rank that ends or hangs ends the group: the next launch or read raises RankLostError, and the
    function given to ``watch`` is called.
    """

    def __init__(
        self, parts: StepParts, lead: DeviceLead, *, is_row_exact: bool, stage: Stage = ALL_LAYERS
    ) -> None:
        super().__init__(parts, is_row_exact=is_row_exact, stage=stage)
        self._lead = lead
        self._is_told = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return self._lead.members.pids

    def watch(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, on another thread, once a rank has ended."""
        self._lead.watch(wake)

    def check(self) -> None:
        """Raise RankLostError if the group has failed."""
        self._lead.check()

    def close(self) -> None:
        """End the processes of the other ranks."""
        self._lead.members.close()

    def load_adapter(self, adapter: AdapterRef, slot: int, *, max_rank: int) -> AdapterWeights:
        """Read every rank's slices of an adapter into a slot, see ``DeviceRunner``.

        Raises AdapterError, ModelSourceError.
        """
        if not self.takes_adapters:
            return super().load_adapter(adapter, slot, max_rank=max_rank)
        lead = self._lead
        number = lead.members.load_adapter(adapter, max_rank, slot=slot, num_posted=lead.num_posted)
        try:
            own = super().load_adapter(adapter, slot, max_rank=max_rank)
            lead.members.wait_loaded(number)
        finally:
            lead.members.drop_adapter(number)
        return own

    def launch(self, plan: Rows[ScheduledSequence]) -> InFlightStep:
        """Launch a step as ``DeviceRunner`` does. Raises RankLostError."""
        self._lead.check()
        self._is_told = False
        step = super().launch(plan)

        def read() -> ChosenTokens:
            with self._lead.waiting():
                return step.read()

        return step._replace(read=read)

    def _failed(self, error: Exception) -> BaseException:
        """Return the error of a step; one before the announcement does not end the group."""
        if self._is_told or isinstance(error, RanksFailedError):
            return self._lead.failure(error)
        return super()._failed(error)

    def _tell_all(self, step: ToldStep) -> None:
        self._lead.post(step)
        self._is_told = True
        self._tell(step)

    def _choose(
        self,
        wanted: torch.Tensor,
        state_rows: torch.Tensor,
        token_indices: torch.Tensor,
        chosen: torch.Tensor,
    ) -> None:
        super()._choose(wanted, state_rows, token_indices, chosen)
        self._lead.ranks.share(chosen)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self._lead.ranks.gather(super()._logits(rows), self.config.vocab_size)
        assert logits is not None, "rank 0 gathers"
        return logits

    def _scored_logits(self, rows: torch.Tensor) -> torch.Tensor:
        self._lead.post(SharedRows(len(rows)))
        self._lead.ranks.share(rows)
        return self._logits(rows)

    def _host_logits(self, places: list[int]) -> torch.Tensor:
        with self._lead.waiting():
            return super()._host_logits(places)


# Sections of the sampled rows in a packed vector, see ``PackedInputs``.
_SAMPLED_SECTIONS = 3
_STATE_ROWS, _INDICES = 1, 2


class PipelineGroupRunner(DeviceGroupRunner):
    """Runner of a pipeline's first stage.

    A launch ends with the first stage's output. Logits come from the last stage when the step is
    read, and tokens are chosen then. Meanwhile the first stage computes a step of other sequences.

    The host knows all tokens before a launch, so ranks keep none.
    """

    def __init__(
        self, parts: StepParts, lead: DeviceLead, *, is_row_exact: bool, shard: Shard
    ) -> None:
        links = lead.ranks.links
        assert links is not None, "a pipeline has several stages"
        stage = PipelineStage(parts, shard, links)
        super().__init__(parts, lead, is_row_exact=is_row_exact, stage=stage)
        self.num_stages = shard.num_stages
        self._links = links
        # Number of launched steps that keep their states.
        self._num_kept = 0

    def _warm_up_rest(self) -> None:
        super()._warm_up_rest()
        _, _, logits, chosen, _ = self._buffers
        with torch.inference_mode():
            rows = torch.full_like(chosen[:1], self._padding_row)
            self._sampler.sample(logits[:1], rows.int(), torch.zeros_like(rows), chosen[:1])

    def _begin(self, planned: PlannedStep) -> InFlightStep:
        _, layout, choice, told = planned
        self._run(told)
        self._num_kept += told.keeps_states
        number = self._num_kept
        places = places_of(layout.pooled)
        logits = torch.empty(len(choice.host_places), self.config.vocab_size)
        pooled: list[PooledChunk] = []
        scored: list[ScoredChunk] = []

        def read() -> ChosenTokens:
            with torch.inference_mode():
                self._receive(planned)
                read_back = self._read_back(planned)
                logits.copy_(self._host_logits(choice.host_places))
                pooled.extend(self._pooled(planned, number, places))
                scored.extend(self._scored(planned, number))
            return read_back()

        return InFlightStep(choice.by_device, choice.by_host, logits, pooled, scored, read)

    def _receive(self, planned: PlannedStep) -> None:
        """Receive the last stage's output of a step into the buffers, and choose its tokens."""
        _, num_tokens, _, count = planned.told.shape
        _, _, logits, chosen, finite = self._buffers
        if not count:
            self._links.receive_results(finite[:num_tokens])
            return
        self._links.receive_results(logits[:count], finite[:num_tokens])
        sampled = planned.told.packed[-_SAMPLED_SECTIONS * count :].reshape(-1, count).copy()
        for sequence, place in zip(
            planned.choice.by_device, planned.choice.device_places, strict=True
        ):
            # A sequence that has ended meanwhile may have lost its row to another.
            if sequence.state is not SequenceState.RUNNING:
                sampled[_STATE_ROWS, place] = self._padding_row
        uploaded = self._device.upload(sampled)
        self._sampler.sample(
            logits[:count], uploaded[_STATE_ROWS].int(), uploaded[_INDICES], chosen[:count]
        )

    def _pooled(
        self, planned: PlannedStep, number: int, places: list[ChunkPlace]
    ) -> list[PooledChunk]:
        """Pool the states of step ``number``, counted among the steps that keep their states."""
        if not planned.layout.pooled:
            return []
        every = torch.arange(planned.told.shape.num_tokens)
        states = self._rows(every, number, makes_logits=False)
        return pool_rows(planned.layout.pooled, states, self._decoder.labels, places)

    def _scored(self, planned: PlannedStep, number: int) -> list[ScoredChunk]:
        """Score the rows of step ``number``, like ``_pooled``, by their indices."""
        every = torch.arange(planned.told.shape.num_tokens)
        return score_rows(
            planned.layout.scored, every, partial(self._rows, number=number, makes_logits=True)
        )

    def _rows(self, rows: torch.Tensor, number: int, *, makes_logits: bool) -> torch.Tensor:
        """Fetch logits or normed states of some rows (int64, on the host) of a step."""
        config = self.config
        width, dtype = config.hidden_size, self._decoder.dtype
        if makes_logits:
            width, dtype = config.vocab_size, torch.float32
        self._lead.post(WantedRows(rows.numpy(), makes_logits, self._num_kept - number))
        made = torch.empty(len(rows), width, dtype=dtype, device=self._device.torch_device)
        self._links.receive_rows(made)
        return made

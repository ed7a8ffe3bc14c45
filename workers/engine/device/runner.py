"""Runs plans on a device that computes by itself: the host only tells it what the next step is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import torch

from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.schemas.errors import AdapterError
from millrace.schemas.frames import TokenLogprob
from millrace.schemas.models.adapters import AdapterRef
from millrace.workers.adapters.rows import AdapterWeights
from millrace.workers.engine.batch import BatchLayout, lay_out
from millrace.workers.engine.device.adapters import DeviceAdapters, has_adapters
from millrace.workers.engine.device.buffers import Bounds, Buffers
from millrace.workers.engine.device.device import Array, Device, Stopwatch
from millrace.workers.engine.device.graphs import RecordedSteps, ladder
from millrace.workers.engine.device.inputs import (
    SampledRow,
    exact_shape,
    finite_items,
    pack,
    shifted,
)
from millrace.workers.engine.device.operations import DeviceMetadata
from millrace.workers.engine.device.sampler import DeviceSampler
from millrace.workers.engine.device.state import DeviceState, StateRow
from millrace.workers.engine.in_flight_step import ChosenTokens, InFlightStep
from millrace.workers.engine.kv.cache import KVCache
from millrace.workers.engine.pooling import PooledChunk, pool_rows
from millrace.workers.engine.sampling.prompt_logprobs import ScoredChunk, score_rows
from millrace.workers.engine.scheduling.schedule import ScheduledSequence
from millrace.workers.engine.sequence import Sequence
from millrace.workers.engine.types import DeviceLostError, RunnerFigures
from millrace.workers.kernels.gpu.device_batch import DeviceBatch
from millrace.workers.kernels.gpu.kernel_set import KernelSet
from millrace.workers.kernels.gpu.step_inputs import PackedInputs, StepShape
from millrace.workers.kernels.operations import WeightSize
from millrace.workers.models.decoder import Decoder

_log = logging.getLogger(__name__)

DeviceDecoder = Decoder[DeviceBatch, DeviceMetadata]


class Adapted(NamedTuple):
    """``decoder`` computes steps with ``adapters``."""

    adapters: DeviceAdapters
    decoder: DeviceDecoder


class _Choice(NamedTuple):
    """Which sampled rows there are, and who chooses from them: the device or the host; places are
    indices of ``rows``."""

    rows: list[SampledRow]
    by_device: list[Sequence]
    device_places: list[int]
    by_host: list[Sequence]
    host_places: list[int]


class DeviceRunner:
    """Owns the weights and the KV cache's memory. Which block belongs to whom is the planner's.

    A launch tells the device what the next step is and returns. Tokens that the device chose are
    the next step's inputs there before anybody has read them. Steps of shapes that were recorded
    are padded to them and replayed. Those with adapters are computed by another decoder of the same
    weights, and recorded by themselves: a step without any costs what it does where there are none.

    Tokens that are proposed for a sequence are single rows like those of others, and the host draws
    from them: so a step has no more rows with proposals than ``bounds`` has sequences.
    """

    overlaps = True
    num_stages = 1
    likeliest = None

    def __init__(
        self,
        config: ModelConfig,
        decoder: DeviceDecoder,
        cache: KVCache,
        *,
        kernels: KernelSet,
        device: Device,
        bounds: Bounds,
        adapted: Adapted | None = None,
        is_row_exact: bool = False,
    ) -> None:
        self.config = config
        self.is_row_exact = is_row_exact
        self.cache = cache
        self.takes_adapters = adapted is not None
        self._decoder = decoder
        self._adapted = adapted
        self._kernels = kernels
        self._device = device
        self._bounds = bounds
        where = device.torch_device
        num_rows = bounds.num_sequences + 1
        self._sampler = DeviceSampler(config.vocab_size, num_rows, where, kernels=kernels.name)
        self._state = DeviceState(
            device,
            _suits,
            max_num_sequences=bounds.num_sequences,
            max_blocks=bounds.num_blocks,
        )
        self._buffers = Buffers.make(bounds, config.vocab_size, decoder.dtype, where)
        self._recorded = RecordedSteps()
        self._recorded_adapted = RecordedSteps()

    @property
    def weight_size(self) -> WeightSize:
        """Of what a step multiplies with."""
        return self._decoder.weight_size

    @property
    def host_device(self) -> torch.device:
        return torch.device("cpu")

    def record(self) -> None:
        """Record the steps that will come again and again, and have all kernels ready. Steps of
        embeddings are never recorded: their hidden states are wanted, which do not stay."""
        shapes = ladder(self._bounds.num_sequences, self._bounds.num_tokens)
        watch = Stopwatch(self._device)
        for shape in shapes:
            self.warm_up(shape)
            if self.takes_adapters:
                self.warm_up(shape, adapted=True)
        if not self.config.has_head:
            _log.info("warmed up in %.1f s", watch.lap_s())
            return
        with torch.inference_mode():
            _, _, logits, chosen, _ = self._buffers
            self._sampler.logprobs(logits, chosen, [0], [1], self._device.upload)
        warm_s = watch.lap_s()
        with torch.inference_mode():
            self._recorded.record(self._device, shapes, self._compute)
            if self.takes_adapters:
                self._recorded_adapted.record(self._device, shapes, self._compute_adapted)
        num_recorded = len(self._recorded) + len(self._recorded_adapted)
        _log.info(
            "warmed up in %.1f s, recorded %d steps of up to %d tokens in %.1f s",
            *(warm_s, num_recorded, shapes[0].num_tokens, watch.lap_s()),
        )

    def warm_up(self, shape: StepShape, *, adapted: bool = False) -> None:
        """Compute a step that is padding only, so that all its kernels are there; without logits
        where the model has none."""
        if not self.config.has_head:
            shape = shape._replace(num_sampled=0)
        layout = lay_out(())
        with torch.inference_mode():
            self._tell(pack(layout, (), (), shape, self._state.padding_row))
            if self._adapted is not None and adapted:
                self._adapted.adapters.tell(layout, shape)
                self._compute_adapted(shape)
            else:
                self._compute(shape)

    def figures(self) -> RunnerFigures:
        """Nothing is counted on the device."""
        return RunnerFigures()

    def watch(self, wake: Callable[[], None]) -> None:
        """A device that has failed is found out by the next step."""

    def check(self) -> None:
        """See ``watch``."""

    def load_adapter(self, adapter: AdapterRef, slot: int, *, max_rank: int) -> AdapterWeights:
        """Read an adapter of at most such a rank into a slot, which no step that is launched
        meanwhile reads; for any thread. Raises AdapterError, ModelSourceError."""
        if self._adapted is None:
            raise AdapterError(
                f"This engine has no slot for {adapter.name}; engine.max_adapters says how many."
            )
        return self._adapted.adapters.load(adapter, slot, max_rank=max_rank)

    def launch(self, plan: Rows[ScheduledSequence]) -> InFlightStep:
        """Have a plan's tokens computed, and the next ones chosen as far as the device can do that.

        Launching a plan again gives the same: it only writes the cache where it wrote before.
        """
        try:
            return self._launch(plan)
        except Exception as error:
            raise self._failed(error) from error

    def _launch(self, plan: Rows[ScheduledSequence]) -> InFlightStep:
        layout = lay_out(plan)
        rows = {sequence: self._state.row_of(sequence) for sequence in layout.sequences}
        exact = exact_shape(layout)
        adapted = self._adapted
        if adapted is not None and not has_adapters(layout):
            adapted = None
        steps = self._recorded if adapted is None else self._recorded_adapted
        keeps_states = bool(layout.pooled or layout.scored)
        recorded = None if keeps_states else steps.find(exact)
        shape = exact if recorded is None else recorded
        choice = self._divide(layout, rows, shape)
        with torch.inference_mode():
            numbers = [rows[sequence].number for sequence in layout.sequences]
            self._tell(pack(layout, numbers, choice.rows, shape, self._state.padding_row))
            if adapted is not None:
                adapted.adapters.tell(layout, shape)
            pooled: list[PooledChunk] = []
            scored: list[ScoredChunk] = []
            if recorded is not None:
                steps.replay(recorded)
            else:
                compute = self._compute if adapted is None else self._compute_adapted
                states = compute(shape)
                if layout.pooled:
                    normed = self._decoder.normed(states)
                    pooled = pool_rows(layout.pooled, normed, self._decoder.labels)
                scored = score_rows(layout.scored, states, self._decoder.logits)
            read = self._read_back(plan, layout, shape, choice)
            logits = self._host_logits(choice.host_places)
        if layout.proposed_rows:
            self._forget_proposed(choice.by_host)
        return InFlightStep(choice.by_device, choice.by_host, logits, pooled, scored, read)

    def _failed(self, error: Exception) -> BaseException:
        """What a launch or a read fails with: after an error on the device itself nothing works.

        Not all who come upon such an error say so by its type, so the device is asked.
        """
        self._state.distrust()
        try:
            self._device.synchronize()
        except torch.AcceleratorError as lost:
            return DeviceLostError(f"the device failed: {lost}")
        if isinstance(error, torch.AcceleratorError):
            return DeviceLostError(f"the device failed: {error}")
        return error

    def _divide(
        self, layout: BatchLayout, rows: dict[Sequence, StateRow], shape: StepShape
    ) -> _Choice:
        """Who chooses the next token of which sequence; behind proposed tokens the host does."""
        choice = _Choice([], [], [], [], [])
        for place, (sequence, row) in enumerate(
            zip(layout.sampled, layout.sampled_rows, strict=True)
        ):
            state_row = rows[sequence]
            number = self._state.padding_row
            if state_row.suits and not sequence.forks and not sequence.proposed:
                number = state_row.number
                if not state_row.begun:
                    self._sampler.add(number, sequence)
                choice.by_device.append(sequence)
                choice.device_places.append(place)
            else:
                choice.by_host.append(sequence)
                choice.host_places.append(place)
            state_row.begun = number == state_row.number
            choice.rows.append(
                SampledRow(shifted(row, layout, shape), number, sequence.num_output_tokens)
            )
        # They are in the order of their sequences, all of which are the host's.
        first, padding_row = len(choice.rows), self._state.padding_row
        choice.host_places.extend(range(first, first + len(layout.proposed_rows)))
        choice.rows.extend([SampledRow(row, padding_row, 0) for row in layout.proposed_rows])
        return choice

    def _forget_proposed(self, sequences: list[Sequence]) -> None:
        """Nobody knows yet which of the blocks behind their own tokens they keep."""
        size = self.cache.block_size_tokens
        for sequence in sequences:
            if sequence.proposed:
                self._state.forget_behind(sequence, sequence.num_computed_tokens // size + 1)

    def _tell(self, packed: Array) -> None:
        """Bring the device what it needs to know for the next step."""
        self._state.send()
        self._sampler.upload(self._device.upload)
        self._device.write(self._buffers.packed[: len(packed)], packed)

    def _compute_adapted(self, shape: StepShape) -> torch.Tensor:
        """``_compute``, with the adapters that the device was told of."""
        assert self._adapted is not None
        return self._compute(shape, self._adapted.decoder)

    def _compute(self, shape: StepShape, decoder: DeviceDecoder | None = None) -> torch.Tensor:
        """What the layers make of the step that the device was told of: [shape.num_tokens,
        hidden_size]. The rest is left in the buffers, chosen tokens in the state too."""
        packed, all_inputs, logits, tokens, finite = self._buffers
        inputs = all_inputs.of_shape(shape)
        self._kernels.prepare_inputs(
            packed[: shape.num_packed],
            self._state.tensors,
            inputs,
            shape,
            block_size=self.cache.block_size_tokens,
        )
        states = (decoder or self._decoder).forward(
            DeviceBatch(
                token_ids=inputs.token_ids,
                positions=inputs.positions,
                slots=inputs.slots,
                query_starts=inputs.query_starts,
                lengths=inputs.lengths,
                table_rows=inputs.table_rows,
                block_tables=self._state.tensors.block_tables,
                num_single=shape.num_single,
            )
        )
        finite[: shape.num_tokens].copy_(torch.isfinite(states.sum(-1, dtype=torch.float32)))
        count = shape.num_sampled
        if count:
            sections = PackedInputs.of(packed[: shape.num_packed], shape)
            wanted = states.index_select(0, sections.sampled_rows)
            logits[:count].copy_(self._decoder.logits(wanted))
            self._sampler.sample(
                logits[:count], inputs.state_rows, sections.token_indices, tokens[:count]
            )
            self._state.tensors.last_tokens.index_copy_(0, sections.state_rows, tokens[:count])
        return states

    def _read_back(
        self,
        plan: Rows[ScheduledSequence],
        layout: BatchLayout,
        shape: StepShape,
        choice: _Choice,
    ) -> Callable[[], ChosenTokens]:
        """Have what came of a step brought to the host."""
        _, _, logits, chosen, finite = self._buffers
        num_tokens, count = shape.num_tokens, shape.num_sampled
        asking = [
            (place, sequence.request.sampling.logprobs)
            for place, sequence in zip(choice.device_places, choice.by_device, strict=True)
            if sequence.request.sampling.logprobs is not None
        ]
        table = None
        made = [torch.cat((chosen[:count], finite[:num_tokens].long()))]
        if asking:
            places, counts = zip(*asking, strict=True)
            table = self._sampler.logprobs(
                logits[:count], chosen[:count], list(places), list(counts), self._device.upload
            )
            made.append(table.values)
        wait = self._device.read_back(made)

        def read() -> ChosenTokens:
            try:
                arrays = wait()
            except Exception as error:
                raise self._failed(error) from error
            numbers = arrays[0]
            flags = numbers[count:].astype(np.bool_)
            tokens: list[int] = numbers[:count].tolist()
            logprobs: list[TokenLogprob | None] = [None] * count
            if table is not None:
                logprobs = table.entries(torch.from_numpy(arrays[1]), tokens)
            return ChosenTokens(
                [tokens[place] for place in choice.device_places],
                [logprobs[place] for place in choice.device_places],
                finite_items(flags, plan, layout, shape),
            )

        return read

    def _host_logits(self, places: list[int]) -> torch.Tensor:
        """Logits of sampled rows, on the host; waits for them."""
        if not places:
            return torch.empty(0, self.config.vocab_size)
        rows = self._device.upload(np.array(places, dtype=np.int64))
        return self._buffers.logits.index_select(0, rows).cpu()


def _suits(sequence: Sequence) -> bool:
    """Whether the device can choose a sequence's tokens; those of beams depend on one another."""
    if sequence.beams is not None:
        return False
    return sequence.prompt_logprobs is None and DeviceSampler.suits(sequence.request.sampling)

"""Runner of plans on an asynchronous device: the host only describes the next step."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np
import torch

from millrace.engine.adapters.rows import AdapterWeights
from millrace.engine.devices.cuda.adapters import has_adapters
from millrace.engine.devices.cuda.inputs import (
    DeviceState,
    SampledRow,
    StateRow,
    ToldStep,
    exact_shape,
    finite_items,
    pack,
    shifted,
)
from millrace.engine.devices.cuda.sampler import DeviceSampler
from millrace.engine.devices.cuda.steps import ALL_LAYERS, DeviceSteps, Stage, StepParts
from millrace.engine.kernels.gpu.step_inputs import StepShape
from millrace.engine.kernels.operations import WeightSize
from millrace.engine.sampling.prompt_logprobs import ScoredChunk, score_rows
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.batch import BatchLayout, lay_out
from millrace.engine.step.pooling import PooledChunk, pool_rows
from millrace.engine.step.runner import ChosenTokens, InFlightStep, Runner
from millrace.engine.step.sequence import Sequence
from millrace.engine.types import DeviceLostError
from millrace.schemas.errors import AdapterError
from millrace.schemas.frames import TokenLogprob
from millrace.schemas.models.adapters import AdapterRef


class TokenChoice(NamedTuple):
    """Sampled rows, and which of them the device or the host chooses; places index ``rows``."""

    rows: list[SampledRow]
    by_device: list[Sequence]
    device_places: list[int]
    by_host: list[Sequence]
    host_places: list[int]


class PlannedStep(NamedTuple):
    """Plan and the step that describes it to the device."""

    plan: Rows[ScheduledSequence]
    layout: BatchLayout
    choice: TokenChoice
    told: ToldStep


class DeviceRunner(DeviceSteps, Runner):
    """Runner for a device.

    A launch describes the next step to the device and returns. Tokens that the device chose are
    inputs of the next step before the host has read them. Steps are padded to recorded shapes.

    Tokens proposed for a sequence are single rows, and the host draws from their logits. A step has
    at most as many rows with proposals as ``bounds`` has sequences.
    """

    overlaps = True
    likeliest = None

    def __init__(
        self, parts: StepParts, *, is_row_exact: bool = False, stage: Stage = ALL_LAYERS
    ) -> None:
        config, bounds = parts.config, parts.bounds
        super().__init__(parts, num_logits=config.vocab_size, stage=stage)
        self.is_row_exact = is_row_exact
        self.max_drawn_rows = bounds.num_sequences
        self._sampler = DeviceSampler(
            config.vocab_size,
            bounds.num_sequences + 1,
            parts.device.torch_device,
            kernels=parts.kernels.name,
        )
        self._state = DeviceState(
            _suits, num_rows=bounds.num_sequences, max_blocks=bounds.num_blocks
        )

    @property
    def weight_size(self) -> WeightSize:
        return self._decoder.weight_size

    @property
    def host_device(self) -> torch.device:
        return torch.device("cpu")

    def _warm_up_rest(self) -> None:
        _, _, logits, chosen, _ = self._buffers
        with torch.inference_mode():
            self._sampler.logprobs(logits, chosen, [0], [1], self._device.upload)

    def load_adapter(self, adapter: AdapterRef, slot: int, *, max_rank: int) -> AdapterWeights:
        if self._adapted is None:
            raise AdapterError(
                f"The engine has no slot for {adapter.name}. Raise engine.max_adapters."
            )
        return self._adapted.adapters.load(adapter, slot, max_rank=max_rank)

    def launch(self, plan: Rows[ScheduledSequence]) -> InFlightStep:
        try:
            return self._launch(plan)
        except Exception as error:
            raise self._failed(error) from error

    def _launch(self, plan: Rows[ScheduledSequence]) -> InFlightStep:
        planned = self._lay_out(plan)
        with torch.inference_mode():
            self._tell_all(planned.told)
            step = self._begin(planned)
        if planned.layout.proposed_rows:
            self._forget_proposed(planned.choice.by_host)
        return step

    def _lay_out(self, plan: Rows[ScheduledSequence]) -> PlannedStep:
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
        numbers = [rows[sequence].number for sequence in layout.sequences]
        told = ToldStep(
            shape,
            pack(layout, numbers, choice.rows, shape, self._padding_row),
            self._state.take_unsent(),
            None if adapted is None else adapted.adapters.pack(layout, shape),
            is_recorded=recorded is not None,
            keeps_states=keeps_states,
        )
        return PlannedStep(plan, layout, choice, told)

    def _begin(self, planned: PlannedStep) -> InFlightStep:
        """Compute a step that all ranks were told of."""
        _, layout, choice, told = planned
        states = self._run(told)
        pooled: list[PooledChunk] = []
        scored: list[ScoredChunk] = []
        if states is not None:
            if layout.pooled:
                normed = self._decoder.normed(states)
                pooled = pool_rows(layout.pooled, normed, self._decoder.labels)
            scored = score_rows(layout.scored, states, self._scored_logits)
        read = self._read_back(planned)
        logits = self._host_logits(choice.host_places)
        return InFlightStep(choice.by_device, choice.by_host, logits, pooled, scored, read)

    def _failed(self, error: Exception) -> BaseException:
        """Return the error for a failed launch or read: after a device error the engine is lost.

        Device errors do not always have a specific type, so the device is synchronized to check.
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
    ) -> TokenChoice:
        """Assign next tokens to the device or the host, which chooses after proposals."""
        choice = TokenChoice([], [], [], [], [])
        for place, (sequence, row) in enumerate(
            zip(layout.sampled, layout.sampled_rows, strict=True)
        ):
            state_row = rows[sequence]
            number = self._padding_row
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
        # Proposed rows are in the order of their sequences, and the host draws all of them.
        first, padding_row = len(choice.rows), self._padding_row
        choice.host_places.extend(range(first, first + len(layout.proposed_rows)))
        choice.rows.extend([SampledRow(row, padding_row, 0) for row in layout.proposed_rows])
        return choice

    def _forget_proposed(self, sequences: list[Sequence]) -> None:
        """Forget blocks after the sequences' own tokens: rejected proposals may free them."""
        size = self.cache.block_size_tokens
        for sequence in sequences:
            if sequence.proposed:
                self._state.forget_behind(sequence, sequence.num_computed_tokens // size + 1)

    def _tell_all(self, step: ToldStep) -> None:
        """Tell all ranks that compute a step."""
        self._tell(step)

    def _tell(self, step: ToldStep) -> None:
        self._sampler.upload(self._device.upload)
        super()._tell(step)

    def _choose(
        self,
        wanted: torch.Tensor,
        state_rows: torch.Tensor,
        token_indices: torch.Tensor,
        chosen: torch.Tensor,
    ) -> None:
        logits = self._buffers.logits[: len(chosen)]
        logits.copy_(self._logits(wanted))
        self._sampler.sample(logits, state_rows, token_indices, chosen)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute float32 logits [num_rows, vocab_size] of rows of ``_compute``, during a step."""
        return self._decoder.logits(rows)

    def _scored_logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute the same logits after a step."""
        return self._logits(rows)

    def _read_back(self, planned: PlannedStep) -> Callable[[], ChosenTokens]:
        """Start to copy a step's results to the host; return a function that waits for them."""
        plan, layout, choice, told = planned
        shape = told.shape
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
        """Return logits of sampled rows on the host, and wait for them."""
        if not places:
            return torch.empty(0, self.config.vocab_size)
        rows = self._device.upload(np.array(places, dtype=np.int64))
        return self._buffers.logits.index_select(0, rows).cpu()


def _suits(sequence: Sequence) -> bool:
    """Return whether the device can choose a sequence's tokens; it cannot for forks."""
    if sequence.fork_group is not None:
        return False
    return sequence.prompt_logprobs is None and DeviceSampler.suits(sequence.request.sampling)

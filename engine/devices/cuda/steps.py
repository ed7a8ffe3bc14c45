"""Steps on a device, for a single runner or for each rank of a group."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch

from millrace.engine.config import StepBounds
from millrace.engine.devices.cuda.adapters import DeviceAdapters
from millrace.engine.devices.cuda.device import Device, Stopwatch
from millrace.engine.devices.cuda.inputs import NO_TABLES, ToldStep, fits, pack
from millrace.engine.devices.cuda.operations import DeviceMetadata
from millrace.engine.kernels.gpu.device_batch import DeviceBatch
from millrace.engine.kernels.gpu.kernel_set import KernelSet
from millrace.engine.kernels.gpu.step_inputs import PackedInputs, StepInputs, StepShape, StepState
from millrace.engine.kv.cache import KVCache
from millrace.engine.models.decoder import Decoder
from millrace.engine.step.batch import lay_out
from millrace.registry.checkpoints.checkpoint import ModelConfig


class Buffers(NamedTuple):
    """Buffers of steps at fixed addresses.

    They hold the packed vector and the inputs made of it, float32 logits and tokens of sampled
    rows, and which rows are finite.
    """

    packed: torch.Tensor
    inputs: StepInputs
    logits: torch.Tensor
    tokens: torch.Tensor
    finite: torch.Tensor

    @classmethod
    def make(cls, bounds: StepBounds, vocab_size: int, device: torch.device) -> Buffers:
        sequences = bounds.num_sequences
        # Padding may add one sequence beyond the bound.
        largest = StepShape(sequences, bounds.num_tokens, 2 * sequences + 1, sequences)
        return cls(
            packed=torch.zeros(largest.num_packed, dtype=torch.int64, device=device),
            inputs=StepInputs.empty(largest, device),
            logits=torch.zeros(sequences, vocab_size, device=device),
            tokens=torch.zeros(sequences, dtype=torch.int64, device=device),
            finite=torch.ones(bounds.num_tokens, dtype=torch.bool, device=device),
        )


DeviceDecoder = Decoder[DeviceBatch, DeviceMetadata]


class Stage:
    """Pipeline stage that computes steps; this one computes all layers.

    A stage of a pipeline receives hidden states from the stage before and sends them to the next.
    ``forward`` and ``leave`` are recorded, ``receive`` and ``send`` are not.
    """

    is_last = True

    def receive(self, num_tokens: int) -> None:
        """Receive ``num_tokens`` rows from the stage before."""

    def forward(self, decoder: DeviceDecoder, batch: DeviceBatch) -> torch.Tensor:
        """Compute a step by the layers: [num_tokens, hidden_size]."""
        return decoder.forward(batch)

    def leave(self, states: torch.Tensor) -> None:
        """Store the states for ``send``, on a stage that is not the last."""

    def send(self, num_tokens: int) -> None:
        """Send ``num_tokens`` rows to the next stage."""


ALL_LAYERS = Stage()


# Decodes of up to this many sequences are recorded exactly: padding would cost noticeable time.
_FEW = (1, 2, 4)
_FINE_STEP, _FINE_END = 8, 256
_COARSE_STEP = 32
# Tokens of recorded steps with prompts. For larger steps the device takes longer than the host
# needs to launch the kernels one at a time.
_CHUNK_TOKENS = (32, 64, 128, 256)
_CHUNK_SINGLES = (0, 8, 32, 128)
# Prompts in a recorded step; one more sequence is padding.
_MOST_CHUNKS = 8


def ladder(bounds: StepBounds) -> list[StepShape]:
    """Return the shapes to record, largest first, so that smaller ones reuse their memory."""
    num_sequences, num_tokens, _ = bounds
    most = min(num_sequences, num_tokens)
    sizes = {most, *(size for size in _FEW if size < most)}
    sizes.update(range(_FINE_STEP, min(most, _FINE_END + 1), _FINE_STEP))
    sizes.update(range(_FINE_END + _COARSE_STEP, most, _COARSE_STEP))
    shapes = [StepShape(size, size, size, size) for size in sizes]
    for singles in {*(count for count in _CHUNK_SINGLES if count < most), most}:
        for tokens in _CHUNK_TOKENS:
            if singles + tokens <= num_tokens:
                chunks = min(_MOST_CHUNKS, num_sequences)
                num_sampled = min(singles + chunks, num_sequences)
                shapes.append(
                    StepShape(singles, singles + tokens, singles + chunks + 1, num_sampled)
                )
    return sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_sequences), reverse=True)


class RecordedSteps:
    """Recorded steps by shape."""

    def __init__(self) -> None:
        self._replays: dict[StepShape, Callable[[], object]] = {}
        self._decodes: list[int] = []
        self._mixed: list[StepShape] = []

    def __len__(self) -> int:
        return len(self._replays)

    def record(
        self, device: Device, shapes: Iterable[StepShape], compute: Callable[[StepShape], object]
    ) -> None:
        """Record ``compute`` of each shape, whose return value is dropped.

        ``compute`` must leave its results in tensors of its own.
        """
        for shape in shapes:
            self._replays[shape] = device.record(partial(compute, shape))
        known = sorted(self._replays, key=lambda shape: shape.num_tokens)
        self._decodes = [shape.num_single for shape in known if _is_decode(shape)]
        self._mixed = [shape for shape in known if not _is_decode(shape)]

    def find(self, exact: StepShape) -> StepShape | None:
        """Return the smallest recorded shape that a step can be padded to, or None."""
        if _is_decode(exact):
            place = bisect_left(self._decodes, exact.num_single)
            if place == len(self._decodes):
                return None
            size = self._decodes[place]
            return StepShape(size, size, size, size)
        return next((shape for shape in self._mixed if fits(exact, shape)), None)

    def replay(self, shape: StepShape) -> None:
        self._replays[shape]()


def _is_decode(shape: StepShape) -> bool:
    """Return whether a shape has single-token rows only."""
    return shape.num_single == shape.num_tokens


_log = logging.getLogger(__name__)


class Adapted(NamedTuple):
    """Decoder that computes steps with ``adapters``."""

    adapters: DeviceAdapters
    decoder: DeviceDecoder


class StepParts(NamedTuple):
    """Parts of ``DeviceSteps``.

    ``config`` is the whole model's; ``decoder``, ``cache`` and adapters are the rank's share.
    """

    config: ModelConfig
    decoder: DeviceDecoder
    cache: KVCache
    kernels: KernelSet
    device: Device
    bounds: StepBounds
    adapted: Adapted | None


class DeviceSteps(ABC):
    """Owner of shares of the weights and the KV cache's memory, and of the state between steps.

    Steps of recorded shapes are replayed. Steps with adapters have another decoder of the same
    weights and recordings of their own, so that a step without adapters costs no more than in an
    engine without any.
    """

    def __init__(self, parts: StepParts, *, num_logits: int, stage: Stage = ALL_LAYERS) -> None:
        """Allocate the buffers; ``num_logits`` is the number of logits of a row kept here."""
        config, decoder, cache, kernels, device, bounds, adapted = parts
        self.config = config
        self.cache = cache
        self.takes_adapters = adapted is not None
        self._decoder = decoder
        self._adapted = adapted
        self._kernels = kernels
        self._device = device
        self._bounds = bounds
        self._stage = stage
        where = device.torch_device
        num_rows = bounds.num_sequences + 1
        self._padding_row = bounds.num_sequences
        self._tensors = StepState(
            last_tokens=torch.zeros(num_rows, dtype=torch.int64, device=where),
            block_tables=torch.zeros(num_rows, bounds.num_blocks, dtype=torch.int32, device=where),
        )
        self._buffers = Buffers.make(bounds, num_logits, where)
        self._recorded = RecordedSteps()
        self._recorded_adapted = RecordedSteps()

    def record(self) -> None:
        """Warm up all kernels and record the steps of common shapes.

        Steps of embeddings are never recorded, because their hidden states are needed afterwards.
        """
        shapes = ladder(self._bounds)
        watch = Stopwatch(self._device)
        for shape in shapes:
            self.warm_up(shape)
            if self.takes_adapters:
                self.warm_up(shape, adapted=True)
        if not self.config.has_head:
            _log.info("warmed up in %.1f s", watch.lap_s())
            return
        self._warm_up_rest()
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

    @abstractmethod
    def _warm_up_rest(self) -> None:
        """Warm up the remaining kernels of steps."""

    def warm_up(self, shape: StepShape, *, adapted: bool = False) -> None:
        """Compute a step of padding only to compile its kernels; each stage does so for itself.

        A model without a head computes no logits.
        """
        if not self.config.has_head:
            shape = shape._replace(num_sampled=0)
        layout = lay_out(())
        packed = pack(layout, (), (), shape, self._padding_row)
        rows = None
        if self._adapted is not None and adapted:
            rows = self._adapted.adapters.pack(layout, shape)
        step = ToldStep(shape, packed, NO_TABLES, rows, is_recorded=False)
        with torch.inference_mode():
            self._tell(step)
            self._run_stage(step)

    def _tell(self, step: ToldStep) -> None:
        """Send the device the inputs of the next step."""
        _, packed, tables, adapters, *_ = step
        if tables.shape[1]:
            places, blocks = self._device.upload(tables)
            self._tensors.block_tables.view(-1).index_copy_(0, places, blocks.int())
        self._device.write(self._buffers.packed[: len(packed)], packed)
        if adapters is not None:
            assert self._adapted is not None, "the step has adapters, but the engine has no slots"
            self._adapted.adapters.tell(adapters)

    def _run(self, step: ToldStep) -> torch.Tensor | None:
        """Receive, compute and send the step that the device was told of, see ``_run_stage``."""
        num_tokens = step.shape.num_tokens
        self._stage.receive(num_tokens)
        states = self._run_stage(step)
        self._stage.send(num_tokens)
        return states

    def _run_stage(self, step: ToldStep) -> torch.Tensor | None:
        """Compute this stage; return states as ``_compute`` does, or None if it was replayed."""
        if step.is_recorded:
            steps = self._recorded if step.adapters is None else self._recorded_adapted
            steps.replay(step.shape)
            return None
        compute = self._compute if step.adapters is None else self._compute_adapted
        return compute(step.shape)

    def _compute_adapted(self, shape: StepShape) -> torch.Tensor:
        """Run ``_compute`` with the adapters that the device was told of."""
        assert self._adapted is not None
        return self._compute(shape, self._adapted.decoder)

    def _compute(self, shape: StepShape, decoder: DeviceDecoder | None = None) -> torch.Tensor:
        """Compute the step that the device was told of: [shape.num_tokens, hidden_size].

        The last stage also leaves logits and tokens in the buffers, and chosen tokens in the state.
        Another stage leaves the states for the next stage.
        """
        packed, all_inputs, _, tokens, finite = self._buffers
        inputs = all_inputs.of_shape(shape)
        self._kernels.prepare_inputs(
            packed[: shape.num_packed],
            self._tensors,
            inputs,
            shape,
            block_size=self.cache.block_size_tokens,
        )
        batch = DeviceBatch(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            slots=inputs.slots,
            query_starts=inputs.query_starts,
            lengths=inputs.lengths,
            table_rows=inputs.table_rows,
            block_tables=self._tensors.block_tables,
            num_single=shape.num_single,
        )
        states = self._stage.forward(decoder or self._decoder, batch)
        if not self._stage.is_last:
            self._stage.leave(states)
            return states
        finite[: shape.num_tokens].copy_(torch.isfinite(states.sum(-1, dtype=torch.float32)))
        count = shape.num_sampled
        if count:
            sections = PackedInputs.of(packed[: shape.num_packed], shape)
            wanted = states.index_select(0, sections.sampled_rows)
            self._choose(wanted, inputs.state_rows, sections.token_indices, tokens[:count])
            self._tensors.last_tokens.index_copy_(0, sections.state_rows, tokens[:count])
        return states

    @abstractmethod
    def _choose(
        self,
        wanted: torch.Tensor,
        state_rows: torch.Tensor,
        token_indices: torch.Tensor,
        chosen: torch.Tensor,
    ) -> None:
        """Choose a token from the logits of each row of ``wanted`` [num_sampled, hidden_size].

        Writes to ``chosen``; see ``DeviceSampler.sample``.
        """

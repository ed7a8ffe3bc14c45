"""Computing steps on a device that is told of them, by one runner or by each rank of a group."""

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
    """What steps read and leave, always in the same place: the packed vector and what is made of
    it, logits and tokens of what is sampled, and which rows are finite."""

    packed: torch.Tensor
    inputs: StepInputs
    logits: torch.Tensor
    tokens: torch.Tensor
    finite: torch.Tensor

    @classmethod
    def make(
        cls, bounds: StepBounds, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> Buffers:
        sequences = bounds.num_sequences
        # Padding may be a sequence more than there are.
        largest = StepShape(sequences, bounds.num_tokens, 2 * sequences + 1, sequences)
        return cls(
            packed=torch.zeros(largest.num_packed, dtype=torch.int64, device=device),
            inputs=StepInputs.empty(largest, device),
            logits=torch.zeros(sequences, vocab_size, dtype=dtype, device=device),
            tokens=torch.zeros(sequences, dtype=torch.int64, device=device),
            finite=torch.ones(bounds.num_tokens, dtype=torch.bool, device=device),
        )


DeviceDecoder = Decoder[DeviceBatch, DeviceMetadata]


class Stage:
    """Which of a model's layers steps are computed with: all of them here. A stage of a pipeline
    receives hidden states from the stage before and sends them to the one behind.

    ``receive`` and ``send`` are outside of what is recorded, ``forward`` and ``leave`` within it.
    """

    is_last = True

    def receive(self, num_tokens: int) -> None:
        """Bring what the stage before has made of so many rows."""

    def forward(self, decoder: DeviceDecoder, batch: DeviceBatch) -> torch.Tensor:
        """Compute what the layers make of a step: [num_tokens, hidden_size]."""
        return decoder.forward(batch)

    def leave(self, states: torch.Tensor) -> None:
        """Keep the states where ``send`` finds them; of a stage that is not the last."""

    def send(self, num_tokens: int) -> None:
        """Give so many rows to the stage behind."""


ALL_LAYERS = Stage()


# Up to here a step decodes so few sequences that each more would be felt.
_FEW = (1, 2, 4)
_FINE_STEP, _FINE_END = 8, 256
_COARSE_STEP = 32
# Prompts beside decodes: steps of more tokens take the device longer than the host needs to launch
# them one kernel at a time.
_CHUNK_TOKENS = (32, 64, 128, 256)
_CHUNK_SINGLES = (0, 8, 32, 128)
# Prompts that a recorded step of them has room for; one sequence more is padding.
_MOST_CHUNKS = 8


def ladder(bounds: StepBounds) -> list[StepShape]:
    """The shapes worth recording, the largest first, so that the smaller ones find their memory in
    what the larger ones took."""
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
    """What replays each of some shapes."""

    def __init__(self) -> None:
        self._replays: dict[StepShape, Callable[[], object]] = {}
        self._decodes: list[int] = []
        self._mixed: list[StepShape] = []

    def __len__(self) -> int:
        return len(self._replays)

    def record(
        self, device: Device, shapes: Iterable[StepShape], compute: Callable[[StepShape], object]
    ) -> None:
        """Record ``compute`` of each of the shapes. What it returns is dropped: what is wanted of
        it, it leaves in tensors of its own."""
        for shape in shapes:
            self._replays[shape] = device.record(partial(compute, shape))
        known = sorted(self._replays, key=lambda shape: shape.num_tokens)
        self._decodes = [shape.num_single for shape in known if _is_decode(shape)]
        self._mixed = [shape for shape in known if not _is_decode(shape)]

    def find(self, exact: StepShape) -> StepShape | None:
        """The smallest of the shapes that a step can be padded to."""
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
    """Single tokens only."""
    return shape.num_single == shape.num_tokens


_log = logging.getLogger(__name__)


class Adapted(NamedTuple):
    """``decoder`` computes steps with ``adapters``."""

    adapters: DeviceAdapters
    decoder: DeviceDecoder


class StepParts(NamedTuple):
    """What steps are computed by. ``config`` is the whole model's, of which a rank's ``decoder``,
    ``cache`` and adapters are its share."""

    config: ModelConfig
    decoder: DeviceDecoder
    cache: KVCache
    kernels: KernelSet
    device: Device
    bounds: StepBounds
    adapted: Adapted | None


class DeviceSteps(ABC):
    """Owns a share of the weights, of the KV cache's memory and of what stays on the device from
    step to step.

    Steps of shapes that were recorded are replayed. Those with adapters are computed by another
    decoder of the same weights, and recorded by themselves: a step without any costs what it does
    where there are none.
    """

    def __init__(self, parts: StepParts, *, num_logits: int, stage: Stage = ALL_LAYERS) -> None:
        """``num_logits``: of a row, that are kept here."""
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
        self._buffers = Buffers.make(bounds, num_logits, decoder.dtype, where)
        self._recorded = RecordedSteps()
        self._recorded_adapted = RecordedSteps()

    def record(self) -> None:
        """Record the steps that will come again and again, and have all kernels ready. Steps of
        embeddings are never recorded: their hidden states are wanted, which do not stay."""
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
        """Have those kernels ready that steps have besides."""

    def warm_up(self, shape: StepShape, *, adapted: bool = False) -> None:
        """Compute a step that is padding only, so that all its kernels are there; without logits
        where the model has none. Each stage does so for itself."""
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
        """Bring the device what it needs to know for the next step."""
        _, packed, tables, adapters, *_ = step
        if tables.shape[1]:
            places, blocks = self._device.upload(tables)
            self._tensors.block_tables.view(-1).index_copy_(0, places, blocks.int())
        self._device.write(self._buffers.packed[: len(packed)], packed)
        if adapters is not None:
            assert self._adapted is not None, "a step has adapters where none are taken"
            self._adapted.adapters.tell(adapters)

    def _run(self, step: ToldStep) -> torch.Tensor | None:
        """Compute the step that the device was told of, behind the stage before and before the one
        behind; see ``_run_stage``."""
        num_tokens = step.shape.num_tokens
        self._stage.receive(num_tokens)
        states = self._run_stage(step)
        self._stage.send(num_tokens)
        return states

    def _run_stage(self, step: ToldStep) -> torch.Tensor | None:
        """What is computed here; states as ``_compute`` returns them, None where it is replayed."""
        if step.is_recorded:
            steps = self._recorded if step.adapters is None else self._recorded_adapted
            steps.replay(step.shape)
            return None
        compute = self._compute if step.adapters is None else self._compute_adapted
        return compute(step.shape)

    def _compute_adapted(self, shape: StepShape) -> torch.Tensor:
        """``_compute``, with the adapters that the device was told of."""
        assert self._adapted is not None
        return self._compute(shape, self._adapted.decoder)

    def _compute(self, shape: StepShape, decoder: DeviceDecoder | None = None) -> torch.Tensor:
        """What the layers make of the step that the device was told of: [shape.num_tokens,
        hidden_size]. The rest is left in the buffers, chosen tokens in the state too, by the last
        stage; by another, what goes to the next."""
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
        """Choose a token from the logits of each of the rows ``wanted`` [num_sampled, hidden_size],
        into ``chosen``; see ``DeviceSampler.sample``."""

"""Steps that are recorded once and replayed: which shapes there are, and which one a step takes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial

from millrace.engine.devices.cuda.device import Device
from millrace.engine.devices.cuda.inputs import fits
from millrace.engine.kernels.gpu.step_inputs import StepShape

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


def ladder(max_num_sequences: int, max_batch_tokens: int) -> list[StepShape]:
    """The shapes worth recording, the largest first, so that the smaller ones find their memory in
    what the larger ones took."""
    most = min(max_num_sequences, max_batch_tokens)
    sizes = {most, *(size for size in _FEW if size < most)}
    sizes.update(range(_FINE_STEP, min(most, _FINE_END + 1), _FINE_STEP))
    sizes.update(range(_FINE_END + _COARSE_STEP, most, _COARSE_STEP))
    shapes = [StepShape(size, size, size, size) for size in sizes]
    for singles in {*(count for count in _CHUNK_SINGLES if count < most), most}:
        for tokens in _CHUNK_TOKENS:
            if singles + tokens <= max_batch_tokens:
                chunks = min(_MOST_CHUNKS, max_num_sequences)
                num_sampled = min(singles + chunks, max_num_sequences)
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

"""Reader of a checkpoint's linear maps and other tensors, each of which it reads once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from millrace.engine.kernels.gpu.kernel_set import Stack
from millrace.engine.kernels.operations import Collectives, Linear
from millrace.engine.models.gguf_tensors import GgufTensors
from millrace.engine.models.stacked_experts import StackedExperts
from millrace.engine.quantization.checkpoint import is_stored_wide, parts_of, read_quantized
from millrace.engine.quantization.device_experts import MakeStack
from millrace.engine.quantization.linear import MakeQuantized, SplitLinear
from millrace.engine.quantization.rounding import Quantize
from millrace.engine.quantization.slicing import sliced
from millrace.engine.quantization.weight import QuantizedWeight, in_one_form
from millrace.registry.checkpoints.families import ExpertsConfig
from millrace.registry.checkpoints.quantization.scheme import QuantizationConfig
from millrace.registry.checkpoints.shard import WHOLE, WHOLE_MODEL, Shard, Slice
from millrace.registry.checkpoints.tensors import ALL_DTYPES, TensorIndex
from millrace.schemas.errors import CheckpointError

_log = logging.getLogger(__name__)

# Scales of parts that are computed wide here, or whose scale is computed from the inputs.
_UNUSED_SCALES = ("k_scale", "v_scale", "kv_scale", "input_scale", "activation_scale")
# Tensors that some writers add to every module; they are ignored if all values are 0.
_ZERO_IF_UNUSED = (".bias", "_zero_point")
_MAX_NAMED = 8


class TensorSource(Protocol):
    """Source of tensors; iterates over the names of its tensors."""

    @property
    def path(self) -> Path | str: ...

    def __iter__(self) -> Iterator[str]: ...

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor: ...


# Maker of a mixture from a router and its experts' weights, see ``StackedExperts``.
MakeExperts = Callable[[torch.Tensor, Stack, Stack, ExpertsConfig], StackedExperts]
# Maker of a product from a weight [num_outputs, num_inputs] and a bias [num_outputs] or None.
MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]


# Part to read of the weight of each named linear map; others are read as a whole.
Slices = Mapping[str, Slice]
EVERYTHING: Slices = {}


class Makers(NamedTuple):
    """Makers of linear maps and mixtures.

    ``product`` makes maps of wide weights, ``quantized`` of quantized ones; ``quantize`` quantizes
    wide weights first. ``experts`` makes mixtures, with ``stacks`` of their quantized weights, or
    of widened ones without it. ``collectives`` sums products of which a rank has a part of the
    inputs.
    """

    product: MakeLinear
    quantized: MakeQuantized
    quantize: Quantize | None
    experts: MakeExperts | None
    stacks: MakeStack | None = None
    collectives: Collectives | None = None


class WeightReader:
    """Reader of the tensors of ``source`` to ``dtype`` on ``device``; it finds unread tensors.

    Without ``quantization`` all weights are wide. Sizes are the whole model's, even if slices are
    read. Tensors of a ``shard`` are copies, so that memory holds only its slices.
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        makers: Makers,
        quantization: QuantizationConfig | None,
        shard: Shard = WHOLE_MODEL,
    ) -> None:
        self.path = source.path
        self.makers = makers
        self.shard = shard
        self._source = source
        self._dtype = dtype
        self._device = device
        self._quantization = quantization
        self._left = set(source)
        self._said_wide = False

    @property
    def keeps_quantized(self) -> bool:
        """True if the weights of a GGUF file are multiplied as they are stored."""
        return isinstance(self._source, GgufTensors)

    def tensor(self, name: str, shape: tuple[int, ...], part: Slice = WHOLE) -> torch.Tensor:
        """Read a tensor that is wide in every checkpoint, or a part of it."""
        tensor = self._load(name, shape, part)
        self._left.discard(name)
        if self.shard.is_whole:
            return tensor.to(device=self._device, dtype=self._dtype)
        return tensor.to(
            device=self._device,
            dtype=self._dtype,
            copy=True,
            memory_format=torch.contiguous_format,
        )

    def _load(self, name: str, shape: tuple[int, ...], part: Slice) -> torch.Tensor:
        if part == WHOLE:
            return self._source.load(name, shape)
        rows, columns = part
        if isinstance(self._source, TensorIndex):
            return self._source.load(name, shape, rows=rows, columns=columns)
        tensor = self._source.load(name, shape)
        tensor = tensor if rows is None else tensor[rows.start : rows.stop]
        return tensor if columns is None else tensor[:, columns.start : columns.stop]

    def weight(
        self, module: str, num_outputs: int, num_inputs: int, part: Slice = WHOLE
    ) -> torch.Tensor | QuantizedWeight:
        """Read the weight of a linear map as it is stored, or a part of it."""
        name = f"{module}.weight"
        if isinstance(self._source, GgufTensors) and self._source.is_quantized(name):
            own = self._source.load_quantized(name, (num_outputs, num_inputs), part.rows)
            self._left.discard(name)
            return self._cut(own, Slice(columns=part.columns), module)
        scheme = self._quantization.scheme_of(module) if self._quantization else None
        if scheme is None or not isinstance(self._source, TensorIndex):
            return self.tensor(name, (num_outputs, num_inputs), part)
        stored = _Stored(self._source, self._left)
        if is_stored_wide(stored, module) and not self._source[name].dtype.startswith(("I", "F8")):
            return self.tensor(name, (num_outputs, num_inputs), part)
        weight = read_quantized(stored, module, scheme, num_outputs, num_inputs)
        return self._cut(weight, part, module)

    def _cut(
        self, weight: QuantizedWeight, part: Slice, module: str
    ) -> torch.Tensor | QuantizedWeight:
        if part == WHOLE:
            return _on(weight, self._device)
        own = sliced(weight, part, module)
        if isinstance(own, QuantizedWeight):
            return _on(own, self._device)
        if not self._said_wide:
            self._said_wide = True
            _log.warning(
                "%s: the inputs of %s and other modules are reordered, so a rank's slice of them "
                "is kept in %s. A checkpoint without activation order takes less memory",
                self.path,
                module,
                self._dtype,
            )
        return own.to(device=self._device, dtype=self._dtype)

    def widened(
        self,
        module: str,
        num_outputs: int,
        num_inputs: int,
        part: Slice = WHOLE,
        *,
        is_looked_up: bool = False,
    ) -> torch.Tensor:
        """Read the weight of a module that is computed wide, in any stored format, or a part of it.

        Raises CheckpointError if its inputs would have to be rounded. Tables that are looked up
        (``is_looked_up``) have no inputs to round.
        """
        weight = self.weight(module, num_outputs, num_inputs, part)
        if is_looked_up and isinstance(weight, QuantizedWeight):
            return weight.values().to(self._dtype)
        return self._wide(weight, module)

    def _wide(self, weight: torch.Tensor | QuantizedWeight, module: str) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            return weight
        if not weight.activations.may_stay_wide:
            raise CheckpointError(
                f"{self.path}: the inputs of {module} are rounded ({weight.activations.value}), "
                "which is not supported for a router, nor for experts on this device. Use a "
                "checkpoint with rounded weights only."
            )
        return weight.values().to(self._dtype)

    def has_weight(self, module: str) -> bool:
        """Return whether any tensor of a linear ``module`` exists and was not read yet."""
        return any(name in self._left for name in parts_of(module))

    def skip(self, name: str) -> None:
        """Mark a tensor, if it exists, as not needed."""
        self._left.discard(name)

    def skip_weight(self, module: str) -> None:
        """Mark a linear map, if it exists, as not needed."""
        self._left.difference_update(parts_of(module))

    def skip_below(self, prefixes: tuple[str, ...]) -> None:
        """Mark tensors whose names begin with one of ``prefixes`` as read by another stage."""
        self._left = {name for name in self._left if not name.startswith(prefixes)}

    def fused(
        self,
        prefix: str,
        outputs: dict[str, int],
        *,
        num_inputs: int,
        bias: bool,
        slices: Slices = EVERYTHING,
    ) -> Linear:
        """Read the projections ``prefix`` + each name, one after another, or ``slices`` of them.

        If inputs are sliced, the bias belongs to the first slice.
        """
        parts = [
            self._multiplied(prefix + name, size, num_inputs, slices.get(name, WHOLE))
            for name, size in outputs.items()
        ]
        biases = None
        if bias:
            biases = [
                self.tensor(f"{prefix}{name}.bias", (size,), Slice(slices.get(name, WHOLE).rows))
                for name, size in outputs.items()
            ]
            if any(_is_behind_others(slices.get(name, WHOLE)) for name in outputs):
                biases = None
        return self._linear(parts, biases)

    def _multiplied(
        self, module: str, num_outputs: int, num_inputs: int, part: Slice
    ) -> torch.Tensor | QuantizedWeight:
        """Read the weight of a linear map for multiplication; wide outputs are not quantized yet.

        Scales cover all inputs of an output, or groups counted from the first input. So for sliced
        inputs the whole weight is quantized: a rank's codes then equal the whole model's, at the
        cost of reading more than is kept.
        """
        quantize = self.makers.quantize
        if quantize is None or part.columns is None:
            return self.weight(module, num_outputs, num_inputs, part)
        weight = self.weight(module, num_outputs, num_inputs)
        return self._cut(
            quantize(weight) if isinstance(weight, torch.Tensor) else weight, part, module
        )

    def _linear(
        self,
        parts: Sequence[torch.Tensor | QuantizedWeight],
        biases: Sequence[torch.Tensor] | None,
    ) -> Linear:
        bias = None if biases is None else torch.cat(list(biases))
        wide = [part for part in parts if isinstance(part, torch.Tensor)]
        rounded = [part for part in parts if isinstance(part, QuantizedWeight)]
        if not rounded:
            return linear_of(torch.cat(wide), bias, self.makers, self.makers.quantize)
        if not wide and (joined := in_one_form(rounded)) is not None:
            return self.makers.quantized(joined, bias)
        return SplitLinear(
            [
                linear_of(part, None if biases is None else biases[number], self.makers, None)
                for number, part in enumerate(parts)
            ]
        )

    def stack(
        self,
        prefixes: list[str],
        outputs: dict[str, int],
        *,
        num_inputs: int,
        slices: Slices = EVERYTHING,
    ) -> Stack:
        """Stack the weights of each prefix, with the named outputs one after another.

        Returns [len(prefixes), sum of outputs, num_inputs], or ``slices`` of it. Raises
        CheckpointError for quantized weights that cannot be multiplied together.
        """
        if self.makers.stacks is not None and (self._quantization or self.makers.quantize):
            experts = [self._expert(prefix, outputs, num_inputs, slices) for prefix in prefixes]
            rounded = [expert for expert in experts if isinstance(expert, QuantizedWeight)]
            if len(rounded) == len(experts):
                return self.makers.stacks(rounded)
            return torch.stack([self._wide(expert, prefixes[0]) for expert in experts])
        return self._wide_stack(prefixes, outputs, num_inputs, slices)

    def _expert(
        self, prefix: str, outputs: dict[str, int], num_inputs: int, slices: Slices
    ) -> torch.Tensor | QuantizedWeight:
        parts = [
            self._multiplied(prefix + name, size, num_inputs, slices.get(name, WHOLE))
            for name, size in outputs.items()
        ]
        wide = [part for part in parts if isinstance(part, torch.Tensor)]
        rounded = [part for part in parts if isinstance(part, QuantizedWeight)]
        if not rounded:
            whole = torch.cat(wide)
            return whole if self.makers.quantize is None else self.makers.quantize(whole)
        if not wide and (joined := in_one_form(rounded)) is not None:
            return joined
        return torch.cat([self._wide(part, prefix) for part in parts])

    def _wide_stack(
        self, prefixes: list[str], outputs: dict[str, int], num_inputs: int, slices: Slices
    ) -> torch.Tensor:
        parts = {name: slices.get(name, WHOLE) for name in outputs}
        widths = [len(parts[name].rows or range(size)) for name, size in outputs.items()]
        # All parts have the same inputs.
        columns = next(iter(parts.values())).columns or range(num_inputs)
        shape = (len(prefixes), sum(widths), len(columns))
        stack = torch.empty(shape, dtype=self._dtype, device=self._device)
        for prefix, own in zip(prefixes, stack, strict=True):
            for (name, size), rows in zip(outputs.items(), own.split(widths), strict=True):
                rows.copy_(self.widened(prefix + name, size, num_inputs, parts[name]))
        return stack

    def refuse_leftovers(self) -> None:
        """Raise CheckpointError with the names of tensors that were not read."""
        if self._quantization is not None:
            self._ignore_leftovers(self._quantization)
        if self._left:
            names = ", ".join(sorted(self._left)[:_MAX_NAMED])
            raise CheckpointError(
                f"The checkpoint {self.path} holds {len(self._left)} tensors that "
                f"config.json does not account for: {names}."
            )

    def _ignore_leftovers(self, quantization: QuantizationConfig) -> None:
        """Ignore tensors of quantized checkpoints that have no effect here."""
        self._left -= {name for name in self._left if self._is_zero(name)}
        unused = {name for name in self._left if name.rpartition(".")[2] in _UNUSED_SCALES}
        self._left -= unused
        if unused or quantization.has_cache_scales:
            _log.warning(
                "%s: %d scales are ignored: engine.kv_cache_dtype sets the KV cache's format, and "
                "scales of inputs are computed at run time",
                self.path,
                len(unused),
            )

    def _is_zero(self, name: str) -> bool:
        if not name.endswith(_ZERO_IF_UNUSED) or not isinstance(self._source, TensorIndex):
            return False
        info = self._source[name]
        if info.dtype not in ALL_DTYPES:
            return False
        return not self._source.load(name, info.shape, ALL_DTYPES).float().any()


def linear_of(
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None,
    makers: Makers,
    quantize: Quantize | None,
) -> Linear:
    """Return the product of a weight; a wide one goes through ``quantize`` if given."""
    if isinstance(weight, torch.Tensor):
        if quantize is None:
            return makers.product(weight, bias)
        weight = quantize(weight)
    return makers.quantized(weight, bias)


def _is_behind_others(part: Slice) -> bool:
    """Return whether there are inputs before those of ``part``."""
    return part.columns is not None and part.columns.start > 0


class _Stored(NamedTuple):
    """Unread (``left``) tensors of ``stored``; loading a tensor marks it as read."""

    stored: TensorIndex
    left: set[str]

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return self.stored[name].shape if name in self.left else None

    def load(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> torch.Tensor:
        tensor = self.stored.load(name, shape, dtypes)
        self.left.discard(name)
        return tensor


def _on(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    return replace(
        weight,
        codes=weight.codes.to(device),
        scales=weight.scales.to(device),
        zeros=None if weight.zeros is None else weight.zeros.to(device),
        offsets=None if weight.offsets is None else weight.offsets.to(device),
        order=None if weight.order is None else weight.order.to(device),
    )

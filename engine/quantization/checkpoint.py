"""Reader of a quantized module's tensors in a checkpoint, see ``Layout``."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch

from millrace.engine.quantization.weight import Activations, QuantizedWeight
from millrace.registry.checkpoints.quantization.scheme import Layout, Scheme
from millrace.registry.checkpoints.tensors import FLOATS
from millrace.schemas.errors import CheckpointError

# AutoAWQ packs columns 0, 2, 4, 6, 1, 3, 5, 7 of each eight from the lowest bits to the highest.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
_INPUT_SCALES = ("input_scale", "activation_scale")
_WORD_BITS = 32
_PARTS = (
    *("weight", "weight_packed", "weight_shape", "weight_g_idx", "weight_zero_point", "qweight"),
    *("qzeros", "scales", "g_idx", *_WEIGHT_SCALES, *_INPUT_SCALES),
)


def num_words(num_codes: int, bits: int) -> int:
    """Return the number of int32 words that hold ``num_codes``."""
    return -(-num_codes * bits // _WORD_BITS)


def unpacked(words: torch.Tensor, bits: int, num_codes: int) -> torch.Tensor:
    """Unpack int32 ``words`` [num_rows, num_words] to signed codes, int8 [num_rows, num_codes].

    The first code is in the lowest bits. Stored codes are offset by half their range.
    """
    stored = words.contiguous().view(torch.uint8)
    if bits == 4:
        stored = torch.stack((stored & 15, stored >> 4), -1).flatten(1)
        return (stored[:, :num_codes].view(torch.int8) - 8).contiguous()
    return (stored[:, :num_codes] ^ 128).view(torch.int8).contiguous()


def unpacked_by_awq(words: torch.Tensor, num_codes: int) -> torch.Tensor:
    """Unpack 4-bit codes in AutoAWQ's order, see ``unpacked``."""
    codes = unpacked(words, 4, num_codes)
    eights = codes.view(len(codes), -1, len(_AWQ_PLACES))
    return eights[..., list(_AWQ_PLACES)].flatten(1)


def plus_one(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Add one to every code in ``words``.

    GPTQModel stores a zero point of 0 as -1: it subtracts 1 from each code in one subtraction of
    whole words. One addition also undoes the borrows.
    """
    return words + sum(1 << place for place in range(0, _WORD_BITS, bits))


class StoredTensors(Protocol):
    """Tensors of a checkpoint by name, see ``TensorIndex``."""

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, or None if it is missing."""

    def load(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> torch.Tensor:
        """Load a tensor. Raises CheckpointError, with its name, if it is missing or differs."""


def parts_of(module: str) -> list[str]:
    """Return the names that tensors of a linear ``module`` may have, except its bias."""
    return [f"{module}.{part}" for part in _PARTS]


def is_stored_wide(tensors: StoredTensors, module: str) -> bool:
    """Return whether ``module`` has a plain weight and no tensors of a quantized one.

    Libraries disagree on the names in a config's ignore list, but the stored tensors are
    unambiguous.
    """
    there = [name for name in parts_of(module) if tensors.shape_of(name) is not None]
    return there == [f"{module}.weight"]


def read_quantized(
    tensors: StoredTensors, module: str, scheme: Scheme, num_outputs: int, num_inputs: int
) -> QuantizedWeight:
    """Read the weight [num_outputs, num_inputs] of ``module`` to the CPU.

    Raises CheckpointError, with the tensor's name, if a tensor is missing, does not have the shape
    or dtype of ``scheme``, or holds invalid numbers.
    """
    read = _Module(tensors, module, scheme, num_outputs, num_inputs)
    if scheme.layout is Layout.PLAIN:
        return _read_plain(read)
    if scheme.layout is Layout.PACKED:
        return _read_packed(read)
    if scheme.layout is Layout.AWQ:
        return _read_awq(read)
    return _read_gptq(read)


class _Module(NamedTuple):
    tensors: StoredTensors
    name: str
    scheme: Scheme
    num_outputs: int
    num_inputs: int

    @property
    def group_inputs(self) -> int:
        return self.scheme.group_inputs or self.num_inputs

    @property
    def num_groups(self) -> int:
        return math.ceil(self.num_inputs / self.group_inputs)

    def has(self, part: str) -> bool:
        return self.tensors.shape_of(f"{self.name}.{part}") is not None

    def part(self, part: str, shape: tuple[int, ...], *dtypes: str) -> torch.Tensor:
        return self.tensors.load(f"{self.name}.{part}", shape, dtypes)

    def scales(self, part: str, *shapes: tuple[int, ...]) -> torch.Tensor:
        """Load scales in float32 in the one of ``shapes`` that is stored."""
        name = f"{self.name}.{part}"
        stored = self.tensors.shape_of(name)
        shape = stored if stored in shapes else shapes[0]
        scales = self.tensors.load(name, shape, FLOATS).float()
        if not scales.isfinite().all():
            raise CheckpointError(f"Tensor {name} holds scales that are not finite.")
        return scales

    def weight(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        order: torch.Tensor | None = None,
    ) -> QuantizedWeight:
        if zeros is not None:
            zeros = zeros.to(torch.int16).contiguous() if zeros.any() else None
        activations = Activations(self.scheme.inputs.value)
        return QuantizedWeight(
            codes=codes,
            scales=scales.contiguous(),
            group_inputs=self.group_inputs,
            bits=self.scheme.bits,
            zeros=zeros,
            order=order,
            activations=activations,
            activation_scale=self._activation_scale() if activations.is_static else None,
        )

    def _activation_scale(self) -> float:
        part = _first_of(self, _INPUT_SCALES)
        scale = float(self.scales(part, (), (1,)))
        if scale <= 0:
            raise CheckpointError(f"Tensor {self.name}.{part} must be above 0, and is {scale}.")
        return scale


def _first_of(module: _Module, parts: tuple[str, ...]) -> str:
    """Return the first part that exists, else the first name, for the error message."""
    return next((part for part in parts if module.has(part)), parts[0])


def _read_plain(module: _Module) -> QuantizedWeight:
    shape = (module.num_outputs, module.num_inputs)
    codes = module.part("weight", shape, "F8_E4M3" if module.scheme.is_float else "I8")
    part = _first_of(module, _WEIGHT_SCALES)
    stored = module.tensors.shape_of(f"{module.name}.{part}") or ()
    scales = _scales_of_outputs(module, part)
    zeros = None
    if module.scheme.has_zeros or (not module.scheme.is_float and module.has("weight_zero_point")):
        zeros = _of_outputs(module, module.part("weight_zero_point", stored, "I8"))
    return module.weight(codes, scales, zeros)


def _scales_of_outputs(module: _Module, part: str) -> torch.Tensor:
    """Load scales [num_outputs, num_groups], stored so, per block, per channel or per tensor."""
    outputs, blocks = module.num_outputs, module.scheme.block_outputs
    if module.scheme.group_inputs is not None:
        shape = (math.ceil(outputs / blocks), module.num_groups)
        return _of_outputs(module, module.scales(part, shape))
    return _of_outputs(module, module.scales(part, (outputs, 1), (outputs,), (1,), (), (1, 1)))


def _of_outputs(module: _Module, stored: torch.Tensor) -> torch.Tensor:
    if module.scheme.group_inputs is None:
        return stored.reshape(-1, 1).expand(module.num_outputs, 1).contiguous()
    repeated = stored.repeat_interleave(module.scheme.block_outputs, 0)
    return repeated[: module.num_outputs]


def _read_packed(module: _Module) -> QuantizedWeight:
    outputs, inputs, bits = module.num_outputs, module.num_inputs, module.scheme.bits
    shape = module.part("weight_shape", (2,), "I64", "I32")
    if shape.tolist() != [outputs, inputs]:
        raise CheckpointError(
            f"Tensor {module.name}.weight_shape is {shape.tolist()}, but config.json asks for "
            f"{[outputs, inputs]}."
        )
    words = module.part("weight_packed", (outputs, num_words(inputs, bits)), "I32")
    codes = unpacked(words, bits, inputs)
    scales = _scales_of_outputs(module, "weight_scale")
    zeros = None
    if module.scheme.has_zeros:
        stored = (num_words(outputs, bits), module.num_groups)
        packed = module.part("weight_zero_point", stored, "I32")
        zeros = unpacked(packed.t(), bits, outputs).t()
    codes, order = _in_groups(module, "weight_g_idx", codes)
    return module.weight(codes, scales, zeros, order)


def _read_awq(module: _Module) -> QuantizedWeight:
    outputs, inputs, groups = module.num_outputs, module.num_inputs, module.num_groups
    _refuse_partial_words(module, outputs)
    words = num_words(outputs, module.scheme.bits)
    codes = unpacked_by_awq(module.part("qweight", (inputs, words), "I32"), outputs)
    zeros = unpacked_by_awq(module.part("qzeros", (groups, words), "I32"), outputs)
    scales = module.scales("scales", (groups, outputs))
    return module.weight(codes.t().contiguous(), scales.t(), zeros.t())


def _read_gptq(module: _Module) -> QuantizedWeight:
    outputs, inputs, bits = module.num_outputs, module.num_inputs, module.scheme.bits
    groups = module.num_groups
    _refuse_partial_words(module, outputs, inputs)
    words = module.part("qweight", (num_words(inputs, bits), outputs), "I32")
    codes = unpacked(words.t(), bits, inputs)
    packed_zeros = module.part("qzeros", (groups, num_words(outputs, bits)), "I32")
    if module.scheme.layout is Layout.GPTQ:
        packed_zeros = plus_one(packed_zeros, bits)
    zeros = unpacked(packed_zeros, bits, outputs)
    scales = module.scales("scales", (groups, outputs))
    codes, order = _in_groups(module, "g_idx", codes)
    return module.weight(codes, scales.t(), zeros.t(), order)


def _refuse_partial_words(module: _Module, *sizes: int) -> None:
    """Raise CheckpointError for partly filled words, which these layouts do not have."""
    per_word = _WORD_BITS // module.scheme.bits
    if any(size % per_word for size in sizes):
        raise CheckpointError(
            f"Tensor {module.name}.qweight: {module.num_outputs} outputs and {module.num_inputs} "
            f"inputs cannot be packed {per_word} in a word."
        )


def _in_groups(
    module: _Module, part: str, codes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sort the columns of ``codes`` by group; return them and their order.

    The order is None if they were sorted. The tensor ``part`` gives each column's group; -1 in all
    means no groups.
    """
    if not module.has(part):
        return codes, None
    inputs, size = module.num_inputs, module.group_inputs
    groups = module.part(part, (inputs,), "I32", "I64").long()
    own = torch.arange(inputs) // size
    if torch.equal(groups, own) or bool((groups == -1).all()):
        return codes, None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], own):
        raise CheckpointError(
            f"Tensor {module.name}.{part} must have each group from 0 to {module.num_groups - 1} "
            f"{size} times, the last one for the rest of {inputs} inputs."
        )
    return codes[:, order].contiguous(), order

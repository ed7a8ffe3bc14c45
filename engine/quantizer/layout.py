"""A quantized weight as the tensors that compressed-tensors stores of it.

https://github.com/vllm-project/compressed-tensors: ``int-quantized`` and ``float-quantized`` store
codes as they are, ``pack-quantized`` eight codes of 4 bits in an int32, the first in the lowest
bits, each plus 8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from millrace.engine.quantization.weight import QuantizedWeight

_PER_WORD, _BITS, _OFFSET = 8, 4, 8


def stored_tensors(
    module: str, weight: QuantizedWeight, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors of ``module``, by their names in the checkpoint, on the CPU; scales in ``dtype``,
    which they were made for. The weight is symmetric, its inputs are in their own order."""
    assert weight.order is None, "this layout has inputs in their own order"
    assert weight.zeros is None, "the schemes that are made are symmetric"
    tensors = {"weight_scale": weight.scales.to(dtype)}
    if weight.bits == _BITS:
        tensors["weight_packed"] = packed(weight.codes)
        tensors["weight_shape"] = torch.tensor(weight.codes.shape, dtype=torch.int64)
    else:
        tensors["weight"] = weight.codes
    return {f"{module}.{name}": tensor.cpu().contiguous() for name, tensor in tensors.items()}


def packed(codes: torch.Tensor) -> torch.Tensor:
    """int32 [num_rows, ceil(num_columns / 8)] of ``codes`` from -8 to 7, [num_rows,
    num_columns]."""
    nibbles = F.pad(codes.to(torch.int32) + _OFFSET, (0, -codes.shape[1] % _PER_WORD))
    words = nibbles.reshape(len(codes), -1, _PER_WORD)
    shifts = torch.arange(0, _PER_WORD * _BITS, _BITS, dtype=torch.int32, device=codes.device)
    return (words << shifts).sum(-1).to(torch.int32)

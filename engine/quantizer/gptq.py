"""GPTQ: rounding that compensates its own errors.

Frantar, Ashkboos, Hoefler and Alistarh: GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers, 2022, https://arxiv.org/abs/2210.17323, algorithm 1. Inputs with the
largest sums of squares come first, as in the authors' code with ``--act-order`` and
``--static-groups``, so that each scale belongs to neighbouring inputs in their own order.
"""

from __future__ import annotations

import torch

from millrace.engine.quantization.rounding import (
    GROUP_INPUTS,
    fitting_group,
    int4_codes,
    int4_scales,
    rounded_int4,
)
from millrace.engine.quantization.weight import QuantizedWeight

# Dampings added to the diagonal, as a share of its mean; the next one if it is still singular.
_DAMPINGS = (0.01, 0.1, 1.0)
_BLOCK_INPUTS = 128


def gptq_int4(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    *,
    group_inputs: int = GROUP_INPUTS,
    scale_dtype: torch.dtype = torch.float32,
) -> QuantizedWeight:
    """Quantize ``weight`` [num_outputs, num_inputs] to int4, in the format of ``rounded_int4``.

    The rounding error of each input's codes is compensated by the inputs that are not yet rounded.
    ``hessian`` is float32 [num_inputs, num_inputs], the sum of x x^T over inputs x of the weight.
    If it is all 0, the weight is rounded to nearest.
    """
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    if not mean > 0:
        return rounded_int4(weight, group_inputs=group_inputs, scale_dtype=scale_dtype)
    values = weight.float()
    size = fitting_group(weight.shape[1], group_inputs)
    scales, _ = int4_scales(
        values.reshape(len(values), -1, size),
        scale_dtype=scale_dtype,
        importance=(diagonal + _DAMPINGS[0] * mean).reshape(-1, size),
    )
    scales = scales.squeeze(-1)
    order = diagonal.argsort(descending=True, stable=True)
    codes = _compensated(
        values.t()[order].contiguous(),
        scales.t()[order // size],
        _inverse_factor(hessian[order][:, order]),
    )
    in_place = torch.empty_like(codes).index_copy_(0, order, codes)
    return QuantizedWeight(
        in_place.t().contiguous().to(torch.int8),
        scales,
        group_inputs=size,
        bits=4,
    )


def _compensated(rest: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return codes of ``rest``, all [num_inputs, num_outputs]; ``rest`` is overwritten.

    Blocks of inputs collect their changes to later inputs in one product.
    """
    codes = torch.empty_like(rest)
    for begin in range(0, len(rest), _BLOCK_INPUTS):
        end = min(begin + _BLOCK_INPUTS, len(rest))
        errors = torch.empty_like(rest[begin:end])
        for row in range(begin, end):
            codes[row] = int4_codes(rest[row], scales[row])
            errors[row - begin] = (rest[row] - codes[row] * scales[row]) / factor[row, row]
            rest[row + 1 : end].addr_(factor[row, row + 1 : end], errors[row - begin], alpha=-1)
        rest[end:].addmm_(factor[begin:end, end:].t(), errors, alpha=-1)
    return codes


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Return the upper triangular U with U^T U the inverse of the damped ``hessian``."""
    mean = hessian.diagonal().mean()
    identity = torch.eye(len(hessian), device=hessian.device)
    for damping in _DAMPINGS:
        lower, failed = torch.linalg.cholesky_ex(hessian + damping * mean * identity)
        if failed:
            continue
        upper: torch.Tensor
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper
    # Too close to singular for any compensation.
    return identity

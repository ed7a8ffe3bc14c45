"""Operations of a step in plain torch, except attention, experts and sampling.

See the modules with the same functions in ``engine.kernels.gpu``.
"""

from __future__ import annotations

import torch

from millrace.engine.kernels.gpu.adapter_step import AdaptedRows, AdapterProduct, AdapterTiling
from millrace.engine.kernels.gpu.device_batch import FP8_MAX, CacheLayer
from millrace.engine.kernels.gpu.step_inputs import PackedInputs, StepInputs, StepShape, StepState
from millrace.engine.kernels.operations import HeadNorms


def prepare_inputs(
    packed: torch.Tensor,
    state: StepState,
    inputs: StepInputs,
    shape: StepShape,
    *,
    block_size: int,
) -> None:
    """Unpack ``packed`` (see ``PackedInputs``) into ``inputs``, both of ``shape``."""
    given = PackedInputs.of(packed, shape)
    chosen = state.last_tokens[given.token_rows]
    inputs.token_ids.copy_(torch.where(given.token_ids < 0, chosen, given.token_ids).clamp(min=0))
    positions = given.positions.clamp(min=0)
    inputs.positions.copy_(positions)
    blocks = state.block_tables[given.token_rows, positions // block_size].long()
    slots = blocks * block_size + positions % block_size
    inputs.slots.copy_(torch.where(given.positions < 0, -1, slots))
    inputs.query_starts.copy_(given.query_starts)
    inputs.lengths.copy_(given.lengths)
    inputs.table_rows.copy_(given.table_rows)
    inputs.state_rows.copy_(given.state_rows)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Compute RMSNorm, see ``engine.kernels.gpu.rows``."""
    values = rows.float()
    scales = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return (values * scales * weight.float()).to(rows.dtype)


def add_rms_norm(
    total: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Add and compute RMSNorm, see ``engine.kernels.gpu.rows``."""
    total.copy_(total.float() + delta.float())
    return rms_norm(total, weight, epsilon)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up, see ``engine.kernels.gpu.rows``."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def rotate_store(
    heads: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    norms: HeadNorms | None,
    epsilon: float,
    cache: CacheLayer,
    slots: torch.Tensor,
) -> None:
    """Rotate heads and store keys and values, see ``engine.kernels.gpu.heads``."""
    block_size, num_keys = cache.data.shape[1], cache.data.shape[3]
    num_queries = heads.shape[1] - 2 * num_keys
    queries, keys = heads[:, :num_queries].float(), heads[:, num_queries:-num_keys].float()
    values = heads[:, -num_keys:].float()
    if norms is not None:
        queries = rms_norm(queries, norms.query, epsilon)
        keys = rms_norm(keys, norms.key, epsilon)
    heads[:, :num_queries] = _rotated(queries, cosines, sines).to(heads.dtype)
    pairs = torch.stack((_rotated(keys, cosines, sines), values), 1)

    kept = slots >= 0
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    pairs = pairs[kept]
    if cache.scales is not None:
        scales = pairs.abs().amax(-1).clamp_min(1e-30) / FP8_MAX
        scales = torch.where(pairs.isfinite().all(-1), scales, torch.nan)
        cache.scales[blocks, offsets] = scales
        pairs = (pairs / scales.unsqueeze(-1)).nan_to_num(0.0)
    # As bytes: not every operation supports every dtype.
    stored = pairs.to(cache.data.dtype).view(torch.uint8)
    cache.data.view(torch.uint8)[blocks, offsets] = stored


def _rotated(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, -1)
    cosines, sines = cosines.unsqueeze(1), sines.unsqueeze(1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


def linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    fixed: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply rows with a weight, see ``engine.kernels.gpu.matmul``."""
    transposed = weight.float().t()
    if fixed:
        result = rows.new_empty(rows.shape[0], weight.shape[0], dtype=torch.float32)
        for index, row in enumerate(rows):
            # A separate copy: the alignment of memory may change the order of summation.
            result[index] = row.to(torch.float32, copy=True) @ transposed
    else:
        result = rows.float() @ transposed
    if bias is not None:
        result += bias.float()
    if residual is not None:
        result += residual.float()
    return result.to(dtype or rows.dtype)


def gated_linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply and apply SwiGLU, see ``engine.kernels.gpu.matmul``."""
    return swiglu(linear(rows.float(), weight)).to(rows.dtype)


def add_adapters(
    rows: torch.Tensor,
    out: torch.Tensor,
    product: AdapterProduct,
    step: AdaptedRows,
    tiling: AdapterTiling,  # noqa: ARG001 (each row is computed by itself)
) -> None:
    """Add adapters' products, see ``engine.kernels.gpu.adapters``."""
    for slot, first, count, _ in step.tiles.tolist():
        if slot < 0:
            continue
        data, numbers = product.data[slot], product.table[slot].tolist()
        a = _matrix(data, numbers[0], numbers[1], product.num_inputs).float()
        begin = 0
        for index, width in enumerate(product.widths):
            place, ranks, first_rank = numbers[2 + 3 * index : 5 + 3 * index]
            if ranks:
                b = _matrix(data, place, width, ranks).float()
                for row in step.order[first : first + count].tolist():
                    # A separate copy: the alignment of memory may change the order of summation.
                    own_row = rows[row].to(torch.float32, copy=True)
                    shrunk = a[first_rank : first_rank + ranks] @ own_row
                    own = out[row, begin : begin + width]
                    own.copy_(own.float() + b @ shrunk.to(data.dtype).float())
            begin += width


def _matrix(data: torch.Tensor, place: int, height: int, width: int) -> torch.Tensor:
    return data[place : place + height * width].view(height, width)

"""Choice of each row's next token, and log-probabilities, on the device alone.

No function waits for the device or reads from it, and all grids depend on shapes, so that a CUDA
graph can hold them. A row's token depends on its logits and its state alone, not on other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from millrace.engine.kernels.gpu.jit.sampling_choose import choose_kernel
from millrace.engine.kernels.gpu.jit.sampling_logprobs import logprobs_kernel
from millrace.engine.kernels.gpu.jit.sampling_summary import summarise_kernel, summarise_raw_kernel
from millrace.engine.kernels.gpu.sampler_state import SamplerState, num_groups
from millrace.engine.kernels.gpu.tiles import power_of_two


class SamplingTiles(NamedTuple):
    """Tile shapes of sampling; all numbers are powers of two.

    A program summarises ``summary_groups`` of 64 tokens, in parts of ``part_groups`` if they are
    penalised. Narrowing looks at the ``likeliest_groups`` first, then reads ``pass_groups`` at a
    time, and bisects at most ``capacity`` tokens.
    """

    summary_groups: int = 64
    part_groups: int = 16
    likeliest_groups: int = 64
    pass_groups: int = 32
    capacity: int = 4096


_TILES = SamplingTiles()
_SUMMARY_WARPS = 4
_CHOICE_WARPS = 16


def choose_tokens(
    logits: torch.Tensor,
    state_rows: torch.Tensor,
    token_indices: torch.Tensor,
    state: SamplerState,
    tokens_out: torch.Tensor,
    tiles: SamplingTiles = _TILES,
) -> None:
    """Choose the next token of each row, and count it for penalised rows.

    Reads all logits once. Rows with top-k or top-p read some groups of 64 tokens again: the 64
    likeliest groups if these hold all kept tokens, otherwise all groups that may, three to four
    times.

    Args:
        logits: [num_rows, vocab_size] of any float dtype; rows may be strided. They stay unchanged.
        state_rows: int32 [num_rows], each row's row of ``state``. Penalised rows must not share
        one.
        token_indices: int64 [num_rows], the number of each row's draw in its random stream.
        state: The sampler's state.
        tokens_out: int64 [num_rows], written: the token, or -1 if the logits have NaN or +inf or
        are
            all -inf.
        tiles: Tile shapes.
    """
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    groups = num_groups(vocab_size)
    tops = torch.empty(num_rows, groups, dtype=torch.float32, device=logits.device)
    masses = torch.empty_like(tops)
    listing = torch.empty(num_rows, groups, dtype=torch.int32, device=logits.device)
    gathered = torch.empty(num_rows, tiles.capacity, dtype=torch.int32, device=logits.device)
    summarise_kernel[(-(-groups // tiles.summary_groups), num_rows)](
        *(logits, state_rows, state.params, state.counts, tops, masses),
        *(logits.stride(0), vocab_size, groups),
        BLOCK_GROUPS=tiles.summary_groups,
        PART_GROUPS=tiles.part_groups,
        num_warps=_SUMMARY_WARPS,
        enable_fp_fusion=False,  # penalties round as they do on the CPU
    )
    choose_kernel[(num_rows,)](
        *(logits, state_rows, token_indices, state.params, state.counts, tops, masses),
        *(listing, gathered, tokens_out, logits.stride(0), vocab_size, groups),
        ALL_GROUPS=power_of_two(groups),
        LIKELIEST_GROUPS=tiles.likeliest_groups,
        TILE_GROUPS=tiles.pass_groups,
        CAPACITY=tiles.capacity,
        num_warps=_CHOICE_WARPS,
        enable_fp_fusion=False,
    )


def token_logprobs(
    logits: torch.Tensor,
    picked: torch.Tensor,
    tokens: torch.Tensor,
    num_top: int,
    tiles: SamplingTiles = _TILES,
) -> torch.Tensor:
    """Compute log-probabilities of the ``picked`` rows of ``logits`` [num_rows, vocab_size].

    They are before penalties and at temperature 1. ``picked`` is int64 [num_picked] and ``num_top``
    is at most ``vocab_size``. The picked rows are read once.

    Returns:
        float64 [num_picked, 1 + 2 * num_top]: the log-probability of the row's token in ``tokens``
        (int64 [num_rows]; undefined for a negative token), then the ``num_top`` likeliest tokens in
        falling order, of equal ones the first, then their log-probabilities.
    """
    num_picked, vocab_size = len(picked), logits.shape[1]
    out = torch.empty(num_picked, 1 + 2 * num_top, dtype=torch.float64, device=logits.device)
    if not num_picked:
        return out
    groups = num_groups(vocab_size)
    tops = torch.empty(num_picked, groups, dtype=torch.float32, device=logits.device)
    masses = torch.empty_like(tops)
    summarise_raw_kernel[(-(-groups // tiles.summary_groups), num_picked)](
        *(logits, picked, tops, masses, logits.stride(0), vocab_size, groups),
        BLOCK_GROUPS=tiles.summary_groups,
        num_warps=_SUMMARY_WARPS,
    )
    logprobs_kernel[(num_picked,)](
        *(logits, picked, tokens, tops, masses, out),
        *(logits.stride(0), vocab_size, groups, num_top),
        ALL_GROUPS=power_of_two(groups),
        num_warps=_CHOICE_WARPS,
    )
    return out

"""Who multiplies on this CPU: oneDNN or the compiled kernels, by a measurement."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from workers.kernels.cpu import CpuKernels
from workers.kernels.operations import Linear
from workers.models.loader import MakeLinear
from workers.models.packed_projection import PackedProjection
from workers.models.projection import Projection

# A sample large enough that threads share it as they share a model's, small enough to be measured
# in a tenth of a second: 16 MB of weights, for a decode of one, of several streams and a prefill.
_NUM_OUTPUTS, _NUM_INPUTS = 8192, 1024
_NUM_ROWS = (1, 8, 32, 128)
_REPEATS = 3

_log = logging.getLogger(__name__)


def choose_product(
    kernels: CpuKernels, clock: Callable[[], float] = time.perf_counter
) -> MakeLinear:
    """What makes a model's linear maps: the compiled kernels if they have products of its dtype and
    take less time for them than oneDNN, as a mean over numbers of rows."""
    if not kernels.has_products:
        return Projection
    packed: MakeLinear = partial(PackedProjection, kernels)
    with torch.inference_mode():
        weight = torch.full((_NUM_OUTPUTS, _NUM_INPUTS), 0.01, dtype=torch.bfloat16)
        ratio = _time_ratio(packed(weight, None), Projection(weight, None), clock)
    _log.info("the compiled kernels multiply in %.2f of the time that oneDNN takes", ratio)
    return packed if ratio < 1.0 else Projection


def _time_ratio(own: Linear, other: Linear, clock: Callable[[], float]) -> float:
    """The mean over numbers of rows of the least time of one over that of the other, measured in
    turns: whatever else runs on the machine disturbs both."""
    total = 0.0
    for num_rows in _NUM_ROWS:
        rows = torch.full((num_rows, _NUM_INPUTS), 0.01, dtype=torch.bfloat16)
        least_s = [float("inf"), float("inf")]
        for _ in range(_REPEATS):
            for index, linear in enumerate((own, other)):
                begin_s = clock()
                linear(rows)
                least_s[index] = min(least_s[index], clock() - begin_s)
        total += least_s[0] / least_s[1]
    return total / len(_NUM_ROWS)

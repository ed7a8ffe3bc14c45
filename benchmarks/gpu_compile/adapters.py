"""Kernels of adapters for each product of a model, by every tile, on tensors without memory."""

from __future__ import annotations

import torch

from benchmarks.gpu_compile.compiling import Compilation
from benchmarks.gpu_compile.models import model_config
from benchmarks.gpu_compile.steps import FORMATS
from millrace.engine.adapters.slots import AdapterSlots, Product
from millrace.engine.kernels.gpu.adapter_step import AdapterTiling
from millrace.engine.kernels.gpu.adapters import add_adapters

_META = torch.device("meta")
_NUM_SLOTS = 20
# Default of the settings; the compiled kernels support all ranks of adapters up to it.
_MAX_RANK = 64
# Fewest and most rows of each tile: odd numbers, and multiples of 16.
_ROWS = (1, 2, 16, 33, 511, 512, 8191)


def compile_adapters(compilation: Compilation, model: str, formats: str) -> None:
    """Compile the kernels of any adapters of a model in one of ``FORMATS``."""
    dtype = FORMATS[formats].weights
    slots = AdapterSlots(
        model_config(model), num_slots=_NUM_SLOTS, max_rank=_MAX_RANK, dtype=dtype, device=_META
    )
    with compilation.instead_of_launching(), torch.inference_mode():
        for fixed in (False, True):
            compilation.user = f"{model} {formats} adapters" + (" deterministic" if fixed else "")
            tiling = AdapterTiling(_NUM_SLOTS, fixed)
            for num_rows in _ROWS:
                packed = torch.empty(tiling.num_packed(num_rows), dtype=torch.int32, device=_META)
                for kind in Product:
                    product = slots.product(0, kind)
                    size = (num_rows, sum(product.widths))
                    add_adapters(
                        torch.empty(num_rows, product.num_inputs, dtype=dtype, device=_META),
                        torch.empty(size, dtype=dtype, device=_META),
                        product,
                        tiling.views(packed, num_rows),
                        tiling,
                    )

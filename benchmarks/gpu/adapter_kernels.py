"""Kernels of adapters for the products of a layer, with twenty adapters of rank 16 by row."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.kernel_cases import Cost, Work, measure
from benchmarks.gpu.loads import write_config
from benchmarks.gpu.report import LLAMA_8B
from benchmarks.gpu.scope import Scope
from millrace.engine.adapters.slots import AdapterSlots, Product, packed_slot
from millrace.engine.adapters.weights import LayerSlices, LowRank
from millrace.engine.kernels.gpu import adapters
from millrace.engine.kernels.gpu.adapter_step import AdapterProduct, AdapterTiling
from millrace.engine.kernels.gpu.reference import operations as reference
from millrace.registry.checkpoints.checkpoint import ModelConfig

NUM_ADAPTERS, RANK = 20, 16
SMOKE_ADAPTERS = 2
_ROWS, _SMOKE_ROWS = (1, 8, 32, 256, 2048), (3,)
_PRODUCTS, _SMOKE_PRODUCTS = tuple(Product), (Product.QKV,)


def run(scope: Scope) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder), LLAMA_8B, tiny=scope.smoke, num_hidden_layers=1)
    for kind in _SMOKE_PRODUCTS if scope.smoke else _PRODUCTS:
        for num_rows in _SMOKE_ROWS if scope.smoke else _ROWS:
            name = f"adapters of {kind.name.lower()}, {num_rows} rows"
            work = partial(_work, scope, config, kind, num_rows)
            measure(scope, name, work, _cost(scope, config, kind, num_rows))


def num_adapters(scope: Scope) -> int:
    return SMOKE_ADAPTERS if scope.smoke else NUM_ADAPTERS


def _cost(scope: Scope, config: ModelConfig, kind: Product, num_rows: int) -> Cost:
    """Return the cost: each adapter in use once, the rows, and the sums."""
    product = _slots(config, 1, scope.dtype, torch.device("meta")).product(0, kind)
    num_inputs, num_outputs = product.num_inputs, sum(product.widths)
    weights = RANK * (num_inputs * len(product.widths) + num_outputs)
    elements = min(num_rows, num_adapters(scope)) * weights
    elements += num_rows * (num_inputs + 2 * num_outputs)
    return Cost(elements * scope.dtype.itemsize, 2 * num_rows * weights)


def _work(scope: Scope, config: ModelConfig, kind: Product, num_rows: int, number: int) -> Work:
    generator = scope.generator(number)
    slots = _slots(config, num_adapters(scope), scope.dtype, scope.device)
    product = slots.product(0, kind)
    tiling = AdapterTiling(num_adapters(scope), fixed=False)
    rows_of_slots = {
        slot: range(slot, num_rows, num_adapters(scope))
        for slot in range(min(num_rows, num_adapters(scope)))
    }
    for slot in rows_of_slots:
        _fill(scope, generator, slots, product, kind, slot)
    packed = torch.from_numpy(tiling.pack(rows_of_slots, num_rows)).to(scope.device)
    step = tiling.views(packed, num_rows)
    rows = scope.normal(generator, num_rows, product.num_inputs)
    out = scope.normal(generator, num_rows, sum(product.widths))

    def run() -> None:
        adapters.add_adapters(rows, out, product, step, tiling)

    def expected() -> list[torch.Tensor]:
        exact = out.to(torch.float32, copy=True)
        reference.add_adapters(rows.float(), exact, product, step, tiling)
        return [exact]

    return Work(run, lambda _: [out], expected)


def _slots(
    config: ModelConfig, num_slots: int, dtype: torch.dtype, device: torch.device
) -> AdapterSlots:
    return AdapterSlots(config, num_slots=num_slots, max_rank=RANK, dtype=dtype, device=device)


def _fill(
    scope: Scope,
    generator: torch.Generator,
    slots: AdapterSlots,
    product: AdapterProduct,
    kind: Product,
    slot: int,
) -> None:
    """Fill slots with random matrices of one product."""
    slices = tuple(
        LowRank(
            scope.normal(generator, RANK, product.num_inputs, std=product.num_inputs**-0.5),
            scope.normal(generator, width, RANK, std=RANK**-0.5),
        )
        for width in product.widths
    )
    own: dict[str, Any] = {LayerSlices._fields[kind]: slices}
    layer = LayerSlices((None, None, None), (None,), (None, None), (None,))._replace(**own)
    packed = packed_slot([layer])
    data = torch.cat([part.flatten() for part in packed.parts])
    slots.data[slot, : len(data)] = data
    slots.table[slot] = packed.numbers.to(slots.table.device)

"""Products of adapters by the kernels and by plain torch, compared with float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.adapters.slots import AdapterSlots, Product, packed_slot
from millrace.engine.adapters.weights import LayerSlices, LowRank
from millrace.engine.kernels.gpu.adapter_step import AdaptedRows, AdapterProduct, AdapterTiling
from millrace.engine.kernels.gpu.adapters import add_adapters
from millrace.engine.kernels.gpu.reference.operations import add_adapters as reference_add_adapters
from millrace.registry.checkpoints.checkpoint import ModelConfig
from tests.engine.kernels.gpu.closeness import assert_close, poisoned
from tests.support.engine.triton_products import rows_by_themselves

CONFIG = ModelConfig(
    architecture="Shapes",
    hidden_size=48,
    num_hidden_layers=1,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=80,
    vocab_size=9,
    max_position_embeddings=64,
)
NUM_INPUTS = {Product.QKV: 48, Product.OUTPUT: 96, Product.GATE_UP: 48, Product.DOWN: 80}
WIDTHS = {
    Product.QKV: (96, 32, 32),
    Product.OUTPUT: (48,),
    Product.GATE_UP: (80, 80),
    Product.DOWN: (48,),
}
# Of slots whose most are 33: below, at and above what matrix units take.
RANKS = (1, 16, 33)
SUBSETS_OF_SLICES = [
    (product, present)
    for product, widths in WIDTHS.items()
    for present in itertools.product((True, False), repeat=len(widths))
    if any(present)
]
Slices = Sequence[LowRank | None]
Add = Callable[..., None]
KERNELS: list[Add] = [add_adapters, reference_add_adapters]


@pytest.fixture(autouse=True)
def _poisoned(poisoned_outputs: None) -> None:
    """Poison outputs, so that unwritten elements show."""


def drawn(product: Product, ranks: Sequence[int], dtype: torch.dtype) -> Slices:
    """Draw matrices of these ranks, 0 for none."""
    return [
        LowRank(
            (torch.randn(rank, NUM_INPUTS[product]) * NUM_INPUTS[product] ** -0.5).to(dtype),
            (torch.randn(width, rank) * rank**-0.5).to(dtype),
        )
        if rank
        else None
        for width, rank in zip(WIDTHS[product], ranks, strict=True)
    ]


def in_slots(product: Product, adapters: Sequence[Slices], dtype: torch.dtype) -> AdapterProduct:
    """Put each adapter into a slot of its own, as full as possible beside poison."""
    slots = AdapterSlots(
        CONFIG, num_slots=len(adapters), max_rank=33, dtype=dtype, device=torch.device("cpu")
    )
    slots.data.fill_(torch.nan)
    for number, slices in enumerate(adapters):
        one: list[Slices] = [[None] * len(widths) for widths in WIDTHS.values()]
        one[product] = slices
        packed = packed_slot([LayerSlices(*map(tuple, one))])  # type: ignore[arg-type]
        place = 0
        for part in packed.parts:
            slots.data[number, place : place + part.numel()] = part.flatten()
            place += part.numel()
        assert place == packed.num_elements
        slots.table[number] = packed.numbers
    return slots.product(0, product)


def step_of(of_rows: Sequence[int], tiling: AdapterTiling) -> AdaptedRows:
    """Return a step with each row's slot, -1 for none. Unread entries are out of bounds."""
    packed = torch.full((tiling.num_packed(len(of_rows)),), 1 << 30, dtype=torch.int32)
    step = tiling.views(packed, len(of_rows))
    step.tiles[:, 0] = -1
    tile = place = 0
    for slot in sorted({*of_rows} - {-1}):
        rows = [row for row, own in enumerate(of_rows) if own == slot]
        size = tiling.tile_rows(len(of_rows))
        for begin in range(0, len(rows), size):
            own = rows[begin : begin + size]
            step.tiles[tile, :3] = torch.tensor([slot, place, len(own)])
            step.order[place : place + len(own)] = torch.tensor(own)
            tile, place = tile + 1, place + len(own)
    return step


def exact(
    rows: torch.Tensor, out: torch.Tensor, adapters: Sequence[Slices], of_rows: Sequence[int]
) -> torch.Tensor:
    result = out.double()
    for row, slot in enumerate(of_rows):
        begin = 0
        for width, one in zip(_widths(out, adapters), adapters[slot], strict=True):
            if slot >= 0 and one is not None:
                added = one.b.double() @ (one.a.double() @ rows[row].double())
                result[row, begin : begin + width] += added
            begin += width
    return result.to(out.dtype)


def _widths(out: torch.Tensor, adapters: Sequence[Slices]) -> tuple[int, ...]:
    return next(
        widths
        for widths in WIDTHS.values()
        if (len(widths), sum(widths)) == (len(adapters[0]), out.shape[1])
    )


def check(
    add: Add,
    product: Product,
    adapters: Sequence[Slices],
    of_rows: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    fixed: bool = False,
    device: str = "cpu",
) -> None:
    rows = torch.randn(len(of_rows), NUM_INPUTS[product]).to(dtype)
    base = torch.randn(len(of_rows), sum(WIDTHS[product])).to(dtype)
    tiling = AdapterTiling(len(adapters), fixed)
    slots = in_slots(product, adapters, dtype)
    slots = slots._replace(data=slots.data.to(device), table=slots.table.to(device))
    tiles, order = step_of(of_rows, tiling)
    moved = base.to(device, copy=True)
    add(rows.to(device), moved, slots, AdaptedRows(tiles.to(device), order.to(device)), tiling)
    out = moved.cpu()
    assert_close(out, exact(rows, base, adapters, of_rows))
    without = [row for row, slot in enumerate(of_rows) if slot < 0]
    assert torch.equal(out[without], base[without])


@pytest.mark.parametrize("add", KERNELS, ids=["triton", "reference"])
@pytest.mark.parametrize(("product", "present"), SUBSETS_OF_SLICES)
def test_each_subset_of_slices(product: Product, present: tuple[bool, ...], add: Add) -> None:
    torch.manual_seed(1)
    adapters = [drawn(product, [rank * one for one in present], torch.float32) for rank in RANKS]
    check(add, product, adapters, [1, -1, 2, 0, 2, -1])


@settings(deadline=None, max_examples=10)
@given(
    product=st.sampled_from(Product),
    of_rows=st.lists(st.integers(-1, 2), max_size=40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    fixed=st.booleans(),
    data=st.data(),
)
def test_any_step(
    product: Product,
    of_rows: list[int],
    dtype: torch.dtype,
    fixed: bool,
    data: st.DataObject,
) -> None:
    torch.manual_seed(2)
    number = len(WIDTHS[product])
    ranks = st.lists(st.sampled_from([0, 1, 5, 16, 33]), min_size=number, max_size=number)
    adapters = [drawn(product, data.draw(ranks), dtype) for _ in range(3)]
    for add in (add_adapters, reference_add_adapters):
        check(add, product, adapters, of_rows, dtype=dtype, fixed=fixed)


def test_many_rows_make_larger_tiles() -> None:
    torch.manual_seed(3)
    adapters = [drawn(Product.DOWN, [rank], torch.float32) for rank in RANKS]
    assert AdapterTiling(3, fixed=False).tile_rows(513) == 64
    check(add_adapters, Product.DOWN, adapters, [0] * 70 + [-1] * 372 + [2] * 71)


@pytest.fixture
def _rows_by_themselves() -> Iterator[None]:
    with rows_by_themselves():
        yield


@pytest.mark.usefixtures("_rows_by_themselves")
@pytest.mark.parametrize("add", KERNELS, ids=["triton", "reference"])
def test_fixed_sums_of_a_row_do_not_depend_on_others(add: Add) -> None:
    torch.manual_seed(4)
    adapters = [drawn(Product.QKV, [rank, 0, rank], torch.bfloat16) for rank in RANKS]
    product = in_slots(Product.QKV, adapters, torch.bfloat16)
    tiling = AdapterTiling(3, fixed=True)
    rows, base = torch.randn(600, 48).bfloat16(), torch.randn(600, 160).bfloat16()
    made = []
    for others in ([], [-1, 0, 1, 0], [2] * 17, [-1] * 599):
        of_rows = [*others, 2]
        out = base[-len(of_rows) :].clone()
        add(rows[-len(of_rows) :], out, product, step_of(of_rows, tiling), tiling)
        made.append(out[-1])
    assert not torch.equal(made[0], base[-1])
    assert all(torch.equal(one, made[0]) for one in made)


def test_a_step_without_adapters_changes_nothing() -> None:
    product = in_slots(Product.QKV, [drawn(Product.QKV, [1, 1, 1], torch.float32)], torch.float32)
    tiling = AdapterTiling(1, fixed=False)
    for num_rows in (0, 3):
        out = torch.randn(num_rows, 160)
        before = out.clone()
        rows = poisoned(num_rows, 48, dtype=torch.float32)
        add_adapters(rows, out, product, step_of([-1] * num_rows, tiling), tiling)
        assert torch.equal(out, before)


def test_there_is_room_for_the_tiles_of_any_step() -> None:
    for num_slots, num_rows in itertools.product((1, 2, 7, 20), (0, 1, 2, 16, 17, 255, 512, 700)):
        tiling = AdapterTiling(num_slots, fixed=False)
        worst = list(range(min(num_slots, num_rows)))
        worst += [0] * (num_rows - len(worst))
        step_of(worst, tiling)

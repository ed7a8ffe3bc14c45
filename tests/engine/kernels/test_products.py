"""Products with packed weights beside torch, with the CPU's own instructions and without."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.kernels import build
from millrace.engine.kernels.cpu import CpuProducts
from millrace.engine.models.linears import PackedProjection
from tests.engine.kernels.compiled import BUILDS, compiled, compiled_products

# Sums of some hundred products of numbers about 1, rounded to 8 bits at the end.
TOLERANCE = 2e-2


@pytest.fixture(scope="module", params=BUILDS, ids=lambda flags: " ".join(flags) or "native")
def kernels(request: pytest.FixtureRequest) -> CpuProducts:
    return compiled_products(request.param)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(0, 30) | st.sampled_from([48, 97, 200]),
    num_inputs=st.integers(1, 40).map(lambda eighths: 8 * eighths),
    num_outputs=st.integers(1, 130),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_a_projection_is_that_of_torch(
    kernels: CpuProducts,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    has_bias: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    weight, rows = _random(num_outputs, num_inputs), _random(num_rows, num_inputs)
    bias = _random(num_outputs) if has_bias else None
    total = _random(num_rows, num_outputs)
    projection = PackedProjection.of_wide(kernels, weight, bias)
    expected = torch.nn.functional.linear(
        rows.float(), weight.float(), None if bias is None else bias.float()
    )
    scale = num_inputs**0.5
    torch.testing.assert_close(
        projection(rows).float() / scale, expected / scale, atol=TOLERANCE, rtol=TOLERANCE
    )
    torch.testing.assert_close(
        projection.plus(total.clone(), rows).float() / scale,
        (expected + total.float()) / scale,
        atol=TOLERANCE,
        rtol=TOLERANCE,
    )


@pytest.mark.parametrize("width", [8, 16, 20, 24, 48, 160])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_projection_is_swiglu_of_it(
    kernels: CpuProducts, width: int, has_bias: bool
) -> None:
    torch.manual_seed(width)
    weight, rows = _random(2 * width, 64) / 8, _random(13, 64)
    bias = _random(2 * width) if has_bias else None
    projection = PackedProjection.of_wide(kernels, weight, bias)

    def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

    whole = torch.nn.functional.linear(
        rows.float(), weight.float(), None if bias is None else bias.float()
    )
    torch.testing.assert_close(
        projection.gated(rows, swiglu).float(), swiglu(whole), atol=TOLERANCE, rtol=TOLERANCE
    )


def test_a_row_is_the_same_in_every_company_and_by_any_number_of_threads(
    kernels: CpuProducts,
) -> None:
    torch.manual_seed(5)
    projection = PackedProjection.of_wide(kernels, _random(200, 256), _random(200))
    rows = _random(120, 256)
    alone = torch.cat([projection(row[None]) for row in rows])
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            for end in (2, 12, 13, 31, 120):
                assert torch.equal(projection(rows[:end]), alone[:end])
    finally:
        torch.set_num_threads(before)


def test_what_is_not_finite_stays_in_its_row(kernels: CpuProducts) -> None:
    projection = PackedProjection.of_wide(kernels, _random(40, 64), None)
    rows = _random(14, 64)
    rows[3, 9] = float("nan")
    rows[12, 1] = float("inf")
    result = projection(rows)
    assert not result[[3, 12]].isfinite().any()
    assert result[[0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 13]].isfinite().all()


def test_rows_need_not_lie_one_behind_the_other(kernels: CpuProducts) -> None:
    projection = PackedProjection.of_wide(kernels, _random(32, 64), None)
    wide = _random(6, 128)
    assert torch.equal(projection(wide[:, :64]), projection(wide[:, :64].contiguous()))


def test_inputs_that_would_be_read_past_their_end_are_refused(kernels: CpuProducts) -> None:
    with pytest.raises(ValueError, match="12 inputs are no multiple of 8"):
        PackedProjection.of_wide(kernels, _random(32, 12), None)


def test_only_bfloat16_has_products() -> None:
    assert compiled(torch.bfloat16).has_products
    assert not compiled(torch.float32).has_products


@pytest.mark.parametrize("flags", BUILDS[1:], ids=" ".join)
def test_all_kernels_compile_without_the_instructions(flags: tuple[str, ...]) -> None:
    """The code never runs, and is not optimized: that takes the compiler a sixth of the time."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("There is no C++ compiler.")
    source = Path(build.__file__).with_name("native") / "cpu_kernels.cpp"
    options = ("-std=c++20", "-march=native", "-fopenmp", *flags, "-O0", "-S", "-o", os.devnull)
    done = subprocess.run([compiler, *options, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

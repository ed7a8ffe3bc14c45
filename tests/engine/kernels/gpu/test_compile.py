"""Compilation of every kernel for a Hopper GPU, by the repository's tool.

The tool runs in other processes: in this one kernels are interpreted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.compiling_process import CompilingProcess, compiling_process

pytestmark = [
    pytest.mark.slow(reason="compiles every GPU kernel for Hopper without a GPU"),
    pytest.mark.timeout(300),
]

# Kernels of one's own that have what the tool is there to find.
BROKEN = """
import torch
import triton
import triton.language as tl

from benchmarks.gpu_compile.compiling import Compilation


@triton.jit
def copy_kernel(source, target, count, WIDTH: tl.constexpr):
    places = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(target + places, tl.load(source + places, mask=places < count), mask=places < count)


@triton.jit
def spread_kernel(numbers, WIDTH: tl.constexpr):
    values = tl.load(numbers + tl.arange(0, WIDTH))
    tl.store(numbers + tl.arange(0, WIDTH), values - tl.max(values))


compilation = Compilation()
compilation.user = "test"
numbers = torch.empty(99, device="meta")
with compilation.instead_of_launching():
    for count in (33, 34):
        copy_kernel[(1,)](numbers, numbers, count, WIDTH=64)
    assert not compilation.failures
    assert not compilation.specialised()
    assert len(compilation.variants) == 1
    copy_kernel[(1,)](numbers, numbers, 48, WIDTH=64)
    copy_kernel[(1, 70_000)](numbers, numbers, 33, WIDTH=64)
    copy_kernel[(1,)](numbers, numbers, 33, WIDTH=65)
    spread_kernel[(1,)](numbers, WIDTH=1 << 14, num_warps=1)
for sentence in (*compilation.specialised(), *compilation.failures):
    print(sentence)
print(*(variant.problem for variant in compilation.variants.values() if variant.problem))
"""

# What the loops over tiles of keys are compiled to, printed.
LOOPS = """
import torch

from benchmarks.gpu_compile import compiling
from benchmarks.gpu_compile.models import model_config
from benchmarks.gpu_compile.steps import Step, compile_model


def printed(name, constants, kernel, own=compiling._variant):
    if name in ("decode_kernel", "prefill_kernel"):
        print(kernel.asm["ttgir"])
    return own(name, constants, kernel)


compiling._variant = printed
for formats in ("bf16", "fp8"):
    compile_model(
        compiling.Compilation(),
        "Qwen3-0.6B",
        model_config("Qwen3-0.6B"),
        formats=formats,
        deterministic=False,
        steps=[Step(2, 1, 33)],
    )
"""
_RESULT = re.compile(r"\s*(%\w+)(?::\d+)? = (.*)")


@pytest.fixture(scope="module")
def compiler(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[CompilingProcess]:
    """Yield a compiler whose results are kept between runs of the tests, until
    ``--cache-clear``."""
    assert pytestconfig.cache is not None
    compiled = pytestconfig.cache.mkdir("triton")
    with compiling_process(tmp_path_factory.mktemp("compiler"), compiled) as process:
        yield process


@pytest.mark.parametrize(
    ("model", "formats", "kernels_with_wgmma"),
    [
        pytest.param("Qwen3-0.6B", "bf16", {"prefill_kernel", "product_kernel"}, id="bf16"),
        pytest.param(
            "Qwen3-30B-A3B", "fp8", {"prefill_kernel", "expert_products_kernel"}, id="experts-fp8"
        ),
    ],
)
def test_what_an_engine_launches_compiles_once_for_any_length(
    compiler: CompilingProcess, model: str, formats: str, kernels_with_wgmma: set[str]
) -> None:
    done = compiler.run(
        "-m", "benchmarks.gpu_compile", "--model", model, "--formats", formats, "--json"
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["problems"] == []
    assert done.returncode == 0
    with_wgmma = {variant["kernel"] for variant in found["variants"] if variant["has_wgmma"]}
    assert kernels_with_wgmma <= with_wgmma


def test_products_with_quantized_weights_compile_once_for_any_number_of_rows(
    compiler: CompilingProcess,
) -> None:
    layouts = ("int4 zeros", "int4 offsets")
    done = compiler.run("-m", "benchmarks.gpu_compile", "--json", "--quantized", *layouts)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == []
    assert done.returncode == 0
    # Weights are widened in the registers that matrix units take them from.
    tiled = [v for v in found["variants"] if "BLOCK_ROWS=64" in v["constants"]]
    assert tiled
    assert all(variant["has_wgmma"] for variant in tiled)


def test_what_adapters_add_compiles_once_for_any_number_of_rows(compiler: CompilingProcess) -> None:
    wanted = ("--adapters", "head-dim-64", "--formats", "bf16")
    done = compiler.run("-m", "benchmarks.gpu_compile", "--json", *wanted)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == []
    assert done.returncode == 0
    large = [v for v in found["variants"] if "BLOCK_ROWS=64" in v["constants"]]
    assert {variant["kernel"] for variant in large} == {"shrink_kernel", "expand_kernel"}
    assert all(variant["has_wgmma"] for variant in large)


def test_the_tool_finds_what_it_is_there_to_find(
    tmp_path: Path, compiler: CompilingProcess
) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    done = compiler.run(script)
    assert done.returncode == 0, done.stderr
    again, grid, width, spill = done.stdout.splitlines()
    assert again == ("test: copy_kernel was compiled 2 times for WIDTH=64, with 33 and with 48")
    assert grid == "test: copy_kernel (WIDTH=64): its grid has 70000 programs along axis 1"
    assert width.startswith("test: copy_kernel (WIDTH=65): ")
    assert spill.startswith("spills ")


def test_a_whole_engine_compiles_each_kernel_once(compiler: CompilingProcess) -> None:
    """The runner itself is compiled, from its warm-up to the last token, for requests of every
    kind."""
    done = compiler.run("-m", "benchmarks.gpu_compile", "--engine", "--json")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert not found["problems"]
    kernels = {variant["kernel"] for variant in found["variants"]}
    assert {"prepare_inputs_kernel", "decode_kernel", "prefill_kernel", "choose_kernel"} <= kernels
    assert {"shrink_kernel", "expand_kernel"} <= kernels


def test_no_copy_of_keys_waits_for_the_lookup_of_its_blocks(
    tmp_path: Path, compiler: CompilingProcess
) -> None:
    script = tmp_path / "loops.py"
    script.write_text(LOOPS)
    done = compiler.run(script)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    starts = [index for index, line in enumerate(lines) if " = scf.for " in line]
    num_loops = 0
    for start in starts:
        end = next(i for i in range(start, len(lines)) if lines[i].lstrip().startswith("scf.yield"))
        loop = [match for match in map(_RESULT.match, lines[start + 1 : end]) if match]
        if not any("async_copy" in match[2] for match in loop):
            continue
        num_loops += 1
        looked_up: set[str] = set()
        for match in loop:
            result, operation = match.groups()
            is_lookup = "tt.load" in operation and "x!tt.ptr<i32>" in operation
            if is_lookup or looked_up.intersection(re.findall(r"%\w+", operation)):
                assert "async_copy" not in operation
                looked_up.add(result)
    # One of the decode kernel, and of the prefill kernel with masks and without, by two formats.
    assert num_loops == 6

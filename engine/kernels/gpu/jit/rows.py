"""Norms of rows and the gate of the MLP; a program takes a row or a part of one."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    rows, weight, out, row_stride, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(rows + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + epsilon)
    normed = values * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    total,
    delta,
    weight,
    out,
    total_stride,
    delta_stride,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    place = total + row * total_stride + columns
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0).to(tl.float32)
    rounded = (values + added).to(total.dtype.element_ty)
    tl.store(place, rounded, mask=inside)
    values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + epsilon)
    normed = values * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_kernel(gate_up, out, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gates = gate_up + row * row_stride + columns
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + WIDTH, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * WIDTH + columns, result.to(out.dtype.element_ty), mask=inside)

"""Products of rows and quantized weights.

As with wide weights, a program takes some outputs and sums them over all inputs alone, in order.

Inputs come in chunks of CHUNK, each within one group of inputs that share a scale. Weights are int8
or float8_e4m3fn [num_outputs, num_inputs]. PACKED weights are uint8 of half that width: a byte has
a code plus 8 of the first half of a chunk in its low bits, and one of the second half in its high
bits. ``scales``, ``zeros`` and ``offsets`` are [num_groups, num_outputs]; GROUP_INPUTS 0 means one
group. With OFFSETS, rows are wide, and each code's value has its group's offset added.

Rows are wide, and weights are then widened, which is exact. Or rows are int8 or float8_e4m3fn with
``row_scales`` [num_groups, num_rows], of which there is one group without ROW_GROUPED.
"""

import triton
import triton.language as tl


@triton.jit
def packed_values(packed, HIGH: tl.constexpr):
    """Convert the codes of bytes to float32.

    The lowest bits of 2^23's mantissa count ones, so a subtraction converts faster than a
    conversion.
    """
    bits = packed.to(tl.int32)
    bits = bits >> 4 if HIGH else bits & 0xF
    return (bits | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0


@triton.jit
def operand(
    codes,
    zeros,
    HIGH: tl.constexpr,
    PACKED: tl.constexpr,
    ZEROED: tl.constexpr,
    row_type: tl.constexpr,
):
    """Return codes minus zeros in the rows' type, which holds them exactly."""
    if row_type == tl.int8:
        if PACKED:
            codes = (codes >> 4 if HIGH else codes & 0xF).to(tl.int8) - 8
            if ZEROED:
                codes -= zeros.to(tl.int8)
    elif PACKED or ZEROED or codes.dtype != row_type:
        values = packed_values(codes, HIGH) if PACKED else codes.to(tl.float32)
        if ZEROED:
            values -= zeros.to(tl.float32)
        codes = values.to(row_type)
    return codes


@triton.jit
def row_values(places, has_row, BLOCK_ROWS: tl.constexpr):
    """Load the values at ``places`` [CHUNK, BLOCK_ROWS]."""
    # Masked for small tiles: reading repeated rows would cost as much as reading real ones.
    if BLOCK_ROWS == 16:
        values = tl.load(places, mask=has_row[None, :], other=0.0)
    else:
        values = tl.load(places)
    return values


@triton.jit
def product_sums(
    row_places,
    has_row,
    row_scale_places,
    row_scale_stride,
    lines,
    scale_places,
    zero_places,
    offset_places,
    has_output,
    num_outputs,
    num_inputs,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP_INPUTS: tl.constexpr,
    PACKED: tl.constexpr,
    ZEROED: tl.constexpr,
    OFFSETS: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROW_GROUPED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Return the sums, float32 [BLOCK_OUTPUTS, BLOCK_ROWS].

    The places are those of each row's and output's first input. Weights come first in the product,
    because matrix units read the first operand from registers.
    """
    row_type: tl.constexpr = row_places.dtype.element_ty
    # Matrix units sum int8 exactly, but float8 with fewer bits than float32.
    APART: tl.constexpr = GROUP_INPUTS > 0 or row_type == tl.float8e4nv
    WIDTH: tl.constexpr = CHUNK // 2 if PACKED else CHUNK
    SUM: tl.constexpr = tl.int32 if row_type == tl.int8 and not APART else tl.float32
    inputs = tl.arange(0, WIDTH)
    sums = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), SUM)
    zeros = tl.zeros((BLOCK_OUTPUTS,), tl.int16)
    if ZEROED and GROUP_INPUTS == 0:
        zeros = tl.load(zero_places, mask=has_output, other=0)
    for chunk in tl.range(0, num_inputs // CHUNK, num_stages=NUM_STAGES):
        codes = tl.load(lines[:, None] + (chunk * WIDTH + inputs)[None, :])
        at = row_places[None, :] + (chunk * CHUNK + inputs)[:, None]
        values = row_values(at, has_row, BLOCK_ROWS)
        if GROUP_INPUTS:
            group = chunk * CHUNK // GROUP_INPUTS * num_outputs
            scale = tl.load(scale_places + group, mask=has_output, other=0.0).to(tl.float32)
            if ZEROED:
                zeros = tl.load(zero_places + group, mask=has_output, other=0)
        if OFFSETS:
            offset = tl.load(offset_places + group, mask=has_output, other=0.0).to(tl.float32)
            total = tl.sum(values.to(tl.float32), 0)
        weights = operand(codes, zeros[:, None], False, PACKED, ZEROED, row_type)
        if APART:
            part = tl.dot(weights, values, input_precision="ieee")
        else:
            sums = tl.dot(weights, values, sums, input_precision="ieee", out_dtype=SUM)
        if PACKED:
            values = row_values(at + WIDTH, has_row, BLOCK_ROWS)
            if OFFSETS:
                total += tl.sum(values.to(tl.float32), 0)
            weights = operand(codes, zeros[:, None], True, PACKED, ZEROED, row_type)
            if APART:
                part = tl.dot(weights, values, part, input_precision="ieee", out_dtype=part.dtype)
            else:
                sums = tl.dot(weights, values, sums, input_precision="ieee", out_dtype=SUM)
        if APART:
            scaled = part.to(tl.float32)
            if GROUP_INPUTS:
                scaled *= scale[:, None]
            if OFFSETS:
                scaled += offset[:, None] * total[None, :]
            if ROW_GROUPED:
                row_scale_place = chunk * CHUNK // GROUP_INPUTS * row_scale_stride
                row_scale = tl.load(row_scale_places + row_scale_place, mask=has_row, other=0.0)
                scaled *= row_scale[None, :]
            sums += scaled
    result = sums.to(tl.float32)
    if not GROUP_INPUTS:
        scale = tl.load(scale_places, mask=has_output, other=0.0).to(tl.float32)
        result *= scale[:, None]
    if ROUNDED and not ROW_GROUPED:
        result *= tl.load(row_scale_places, mask=has_row, other=0.0)[None, :]
    return result


@triton.jit(do_not_specialize=["num_rows"])
def quantized_product_kernel(
    rows,
    row_scales,
    weight,
    scales,
    zeros,
    offsets,
    bias,
    residual,
    out,
    num_rows,
    num_outputs,
    num_inputs,
    row_stride,
    residual_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP_INPUTS: tl.constexpr,
    PACKED: tl.constexpr,
    ZEROED: tl.constexpr,
    OFFSETS: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROW_GROUPED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Multiply tiles of outputs and rows.

    Neighbouring programs take GROUP tiles of rows with the same weights, which then come from the
    cache.
    """
    row_tiles = tl.cdiv(num_rows, BLOCK_ROWS)
    output_tiles = tl.cdiv(num_outputs, BLOCK_OUTPUTS)
    group = tl.program_id(0) // (GROUP * output_tiles)
    group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
    in_group = tl.program_id(0) % (GROUP * output_tiles)
    row = (group * GROUP + in_group % group_rows) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = in_group // group_rows * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    has_row = row < num_rows
    has_output = output < num_outputs
    # Rows and outputs outside repeat the first and are not stored.
    known_row = tl.where(has_row, row, 0).to(tl.int64)
    known_output = tl.where(has_output, output, 0).to(tl.int64)
    sums = product_sums(
        rows + known_row * row_stride,
        has_row,
        row_scales + known_row,
        num_rows,
        weight + known_output * (num_inputs // 2 if PACKED else num_inputs),
        scales + known_output,
        zeros + known_output,
        offsets + known_output,
        has_output,
        num_outputs,
        num_inputs,
        BLOCK_ROWS,
        BLOCK_OUTPUTS,
        CHUNK,
        GROUP_INPUTS,
        PACKED,
        ZEROED,
        OFFSETS,
        ROUNDED,
        ROW_GROUPED,
        NUM_STAGES,
    )
    if BIASED:
        biases = tl.load(bias + output, mask=has_output, other=0.0)
        sums += biases.to(tl.float32)[:, None]
    inside = has_output[:, None] & has_row[None, :]
    if ADDED:
        added = residual + row.to(tl.int64)[None, :] * residual_stride + output[:, None]
        sums += tl.load(added, mask=inside, other=0.0).to(tl.float32)
    to = out + row.to(tl.int64)[None, :] * num_outputs + output[:, None]
    tl.store(to, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def quantized_row_kernel(
    row,
    row_scales,
    weight,
    scales,
    zeros,
    offsets,
    bias,
    residual,
    out,
    num_outputs,
    num_inputs,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP_INPUTS: tl.constexpr,
    PACKED: tl.constexpr,
    ZEROED: tl.constexpr,
    OFFSETS: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROW_GROUPED: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    EVEN: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Multiply one row, element by element.

    Products are summed by input modulo the inputs of BLOCK_CHUNKS chunks, then over these sums.
    EVEN means that BLOCK_CHUNKS divides the number of chunks.
    """
    WIDTH: tl.constexpr = CHUNK // 2 if PACKED else CHUNK
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inside = output < num_outputs
    known_output = tl.where(inside, output, 0).to(tl.int64)
    chunks = tl.arange(0, BLOCK_CHUNKS)
    inputs = tl.arange(0, WIDTH)
    num_chunks = num_inputs // CHUNK
    lines = weight + known_output * (num_inputs // 2 if PACKED else num_inputs)
    columns = chunks[:, None] * WIDTH + inputs[None, :]
    row_columns = chunks[:, None] * CHUNK + inputs[None, :]
    sums = tl.zeros((BLOCK_OUTPUTS, BLOCK_CHUNKS, WIDTH), tl.float32)
    zero = tl.zeros((BLOCK_OUTPUTS, BLOCK_CHUNKS), tl.int16)
    if ZEROED and GROUP_INPUTS == 0:
        zero += tl.load(zeros + known_output)[:, None]
    for first in tl.range(0, num_chunks, BLOCK_CHUNKS, num_stages=NUM_STAGES):
        places = lines[:, None, None] + (first * WIDTH + columns)[None, :, :]
        there = first + chunks < num_chunks
        row_places = row + first * CHUNK + row_columns
        if EVEN:
            codes = tl.load(places, eviction_policy="evict_first")
            values = tl.load(row_places).to(tl.float32)
        else:
            codes = tl.load(places, mask=there[None, :, None], other=0.0)
            values = tl.load(row_places, mask=there[:, None], other=0.0).to(tl.float32)
        if GROUP_INPUTS:
            known_chunk = tl.where(there, first + chunks, 0)
            group = known_chunk * CHUNK // GROUP_INPUTS
            group_places = group[None, :] * num_outputs + known_output[:, None]
            scale = tl.load(scales + group_places).to(tl.float32)
            if ROW_GROUPED:
                scale *= tl.load(row_scales + group)[None, :]
            if ZEROED:
                zero = tl.load(zeros + group_places)
            if OFFSETS:
                offset = tl.load(offsets + group_places).to(tl.float32)
        weights = operand(codes, zero[:, :, None], False, PACKED, ZEROED, tl.float32)
        products = weights * values[None, :, :]
        total = values
        if PACKED:
            if EVEN:
                values = tl.load(row_places + WIDTH).to(tl.float32)
            else:
                values = tl.load(row_places + WIDTH, mask=there[:, None], other=0.0)
            weights = operand(codes, zero[:, :, None], True, PACKED, ZEROED, tl.float32)
            products += weights * values.to(tl.float32)[None, :, :]
            total += values.to(tl.float32)
        sums += products * scale[:, :, None] if GROUP_INPUTS else products
        if OFFSETS:
            sums += offset[:, :, None] * total[None, :, :]
    result = tl.sum(tl.sum(sums, 2), 1)
    if not GROUP_INPUTS:
        result *= tl.load(scales + known_output).to(tl.float32)
    if ROUNDED and not ROW_GROUPED:
        result *= tl.load(row_scales)
    if BIASED:
        result += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        result += tl.load(residual + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + output, result.to(out.dtype.element_ty), mask=inside)

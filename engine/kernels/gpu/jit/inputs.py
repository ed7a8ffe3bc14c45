"""Inputs of a step, unpacked on the device."""

import triton
import triton.language as tl

_COUNTS = ["num_tokens", "num_sequences", "num_sampled", "table_stride"]


@triton.jit(do_not_specialize=_COUNTS)
def prepare_inputs_kernel(
    packed,
    last_tokens,
    block_tables,
    token_ids,
    positions,
    slots,
    query_starts,
    lengths,
    table_rows,
    state_rows,
    num_tokens,
    num_sequences,
    num_sampled,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    index = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)

    # Tokens: look up those chosen on the device, and find each token's slot in the cache.
    is_token = index < num_tokens
    given = tl.load(packed + index, mask=is_token, other=0)
    position = tl.load(packed + num_tokens + index, mask=is_token, other=-1)
    row = tl.load(packed + 2 * num_tokens + index, mask=is_token, other=0)
    chosen = tl.load(last_tokens + row, mask=is_token & (given < 0), other=0)
    # A chosen token is -1 if the logits were not finite. The sequence will end; until then its row
    # computes with token 0.
    token = tl.maximum(tl.where(given < 0, chosen, given), 0)
    is_real = is_token & (position >= 0)
    block = tl.load(
        block_tables + row * table_stride + position // BLOCK_SIZE, mask=is_real, other=0
    )
    slot = tl.where(is_real, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(token_ids + index, token, mask=is_token)
    tl.store(positions + index, tl.maximum(position, 0), mask=is_token)
    tl.store(slots + index, slot, mask=is_token)

    # Sequences and sampled rows: narrow to 32 bits.
    starts = packed + 3 * num_tokens
    is_start = index <= num_sequences
    is_sequence = index < num_sequences
    tl.store(
        query_starts + index, tl.load(starts + index, mask=is_start).to(tl.int32), mask=is_start
    )
    length = tl.load(starts + num_sequences + 1 + index, mask=is_sequence)
    tl.store(lengths + index, length.to(tl.int32), mask=is_sequence)
    table_row = tl.load(starts + 2 * num_sequences + 1 + index, mask=is_sequence)
    tl.store(table_rows + index, table_row.to(tl.int32), mask=is_sequence)
    is_sampled = index < num_sampled
    state_row = tl.load(starts + 3 * num_sequences + 1 + num_sampled + index, mask=is_sampled)
    tl.store(state_rows + index, state_row.to(tl.int32), mask=is_sampled)

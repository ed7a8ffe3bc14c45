"""Logits of a row for the choice of tokens: in groups of 64, and penalised.

A row's logits are cut into groups of 64 consecutive tokens. Scaled logits are represented as gaps,
(largest - logit) / temperature, by the bits of the float32. As integers these have the same order,
because no gap is negative.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(64)
# Entries of the record in ``sampler_state``, in words of 8 and of 4 bytes.
RECORD_WORDS = tl.constexpr(6)
KEY = tl.constexpr(0)
TOP_P = tl.constexpr(1)
PRESENCE = tl.constexpr(2)
FREQUENCY = tl.constexpr(3)
TEMPERATURE = tl.constexpr(8)
LOG_MIN_P = tl.constexpr(9)
REPETITION = tl.constexpr(10)
TOP_K = tl.constexpr(11)

INF_BITS = tl.constexpr(0x7F800000)
# Greater than the bits of any gap.
NO_GAP = tl.constexpr(0x7FFFFFFF)
MOST_COUNTED = tl.constexpr(0x7FFF)


@triton.jit
def word(record, entry):
    """Load an entry of 8 bytes, as int64."""
    return tl.load(record + entry)


@triton.jit
def half_word(record, entry):
    """Load an entry of 4 bytes, as int32."""
    return tl.load(record.to(tl.pointer_type(tl.int32)) + entry)


@triton.jit
def penalties(record):
    """Return (whether there are penalties, repetition, presence, frequency)."""
    repetition = half_word(record, REPETITION).to(tl.float32, bitcast=True)
    presence = word(record, PRESENCE).to(tl.float64, bitcast=True)
    frequency = word(record, FREQUENCY).to(tl.float64, bitcast=True)
    penalised = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    return penalised, repetition, presence, frequency


@triton.jit
def _penalised(values, entries, repetition, presence, frequency):
    """Return ``values`` after the penalties of their ``entries`` of the counts."""
    said = entries & MOST_COUNTED
    repeated = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    values = tl.where(entries != 0, repeated, values)
    amounts = (presence + frequency * said.to(tl.float64)).to(tl.float32)
    return tl.where(said != 0, values - amounts, values)


@triton.jit
def group_logits(logits, counts, record, groups, listed, vocab_size, PENALISED: tl.constexpr):
    """Load logits of some ``groups`` [N] of one row: float32 [N, 64].

    They are -inf past the vocabulary and in groups that are not ``listed``, and +inf for NaN.
    Without PENALISED the row must have no penalties.
    """
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = listed[:, None] & (tokens < vocab_size)
    values = tl.load(logits + tokens, mask=inside, other=-float("inf")).to(tl.float32)
    values = tl.where(values != values, float("inf"), values)
    if PENALISED:
        penalised, repetition, presence, frequency = penalties(record)
        if penalised:
            entries = tl.load(counts + tokens, mask=inside, other=0).to(tl.int32)
            values = _penalised(values, entries, repetition, presence, frequency)
    return values


@triton.jit
def gap_bits(values, best, temperature):
    """Return the bits of gaps, rounded as in IEEE 754, so that ties are the same everywhere."""
    return tl.div_rn(best - values, temperature).to(tl.int32, bitcast=True)


@triton.jit
def weights_of(bits):
    """Return exp of the scaled logits, float32, at most 1."""
    return tl.exp(-bits.to(tl.float32, bitcast=True))

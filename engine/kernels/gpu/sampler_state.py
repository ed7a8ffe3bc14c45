"""State of the sampler on the device: sampling parameters by sequence, and token counts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

GROUP_TOKENS = 64

# Row of parameters, as numpy writes it and the kernels read it. ``key`` is the random stream's key.
# ``temperature`` 0 is greedy. ``top_k`` equal to the vocabulary size, ``top_p`` 1 and ``log_min_p``
# -inf disable these limits.
RECORD = np.dtype(
    [
        ("key", "<i8"),
        ("top_p", "<f8"),
        ("presence", "<f8"),
        ("frequency", "<f8"),
        ("temperature", "<f4"),
        ("log_min_p", "<f4"),
        ("repetition", "<f4"),
        ("top_k", "<i4"),
    ]
)
RECORD_WORDS = RECORD.itemsize // 8

# Bits of an entry of ``SamplerState.counts``: the sign bit is set if the token is in the prompt,
# the others count it in the completion, up to a maximum.
IN_PROMPT = -(1 << 15)
MOST_COUNTED = (1 << 15) - 1


class SamplerState(NamedTuple):
    """State of the sampler.

    ``params`` is int64 [num_rows, RECORD_WORDS], each row a ``RECORD``. ``counts`` is int16
    [num_rows, vocab_size], valid in penalised rows: two bytes for each row and token of the
    vocabulary. Prompts are noted for rows with a repetition penalty only.
    """

    params: torch.Tensor
    counts: torch.Tensor


def new_state(num_rows: int, vocab_size: int, device: torch.device) -> SamplerState:
    """Return a state of greedy rows without penalties."""
    record = np.zeros((), dtype=RECORD)
    record["top_p"] = record["repetition"] = 1.0
    record["log_min_p"] = -np.inf
    record["top_k"] = vocab_size
    words = torch.from_numpy(record.reshape(1).view(np.int64).copy())
    return SamplerState(
        params=words.repeat(num_rows, 1).to(device),
        counts=torch.zeros(num_rows, vocab_size, dtype=torch.int16, device=device),
    )


def num_groups(vocab_size: int) -> int:
    return -(-vocab_size // GROUP_TOKENS)

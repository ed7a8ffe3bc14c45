"""The sampler's state on the device: a row of sampling parameters for each sequence, and token
counts of the penalised ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

GROUP_TOKENS = 64

# A row of parameters, as numpy writes it and the kernels read it. ``key``: of the random stream.
# ``temperature`` 0 is greedy. ``top_k`` is the vocabulary's size, ``top_p`` 1 and ``log_min_p``
# -inf where they are off.
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

# Of an entry of ``SamplerState.counts``: the sign bit says that the token is in the prompt, the
# others how often it came in the completion, at most so often.
IN_PROMPT = -(1 << 15)
MOST_COUNTED = (1 << 15) - 1


class SamplerState(NamedTuple):
    """``params``: int64 [num_rows, RECORD_WORDS], each row a ``RECORD``. ``counts``: int16
    [num_rows, vocab_size], valid in rows that are penalised; two bytes for each token of the
    vocabulary and row. Prompts are noted for rows with a repetition penalty only."""

    params: torch.Tensor
    counts: torch.Tensor


def new_state(num_rows: int, vocab_size: int, device: torch.device) -> SamplerState:
    """Rows that are greedy and not penalised."""
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

"""What the times of a request give."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from millrace.bench.clients.exchange import ClientSample

_Floats = npt.NDArray[np.float64]


def ttft_ms(sample: ClientSample) -> float | None:
    """From when it was due to the first part of its answer; None if none came."""
    return None if sample.first_s is None else (sample.first_s - sample.due_s) * 1e3


def tpot_ms(sample: ClientSample) -> float | None:
    """From the first part to the last, over the tokens but one; None with a single token."""
    if sample.num_output_tokens < 2 or not sample.num_parts:
        return None
    return float(gaps_ms(sample).sum()) / (sample.num_output_tokens - 1)


def e2e_ms(sample: ClientSample) -> float:
    """From when it was due to the end of its answer."""
    return (sample.end_s - sample.due_s) * 1e3


def gaps_ms(sample: ClientSample) -> _Floats:
    """Times between the parts of its answer."""
    return np.frombuffer(sample.gaps_ms, dtype=np.float32).astype(np.float64)


def tokens_by_part(sample: ClientSample) -> _Floats:
    """How many tokens each part brought: as the server said, else the answer's evenly."""
    if sample.part_tokens:
        return np.frombuffer(sample.part_tokens, dtype=np.int32).astype(np.float64)
    count = sample.num_parts
    return np.full(count, sample.num_output_tokens / count if count else 0.0)

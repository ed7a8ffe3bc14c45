"""Milliseconds per step of the engine alone, beside the memory bandwidth that bounds it.

    OMP_NUM_THREADS=1 python -m benchmarks.engine --only step [--model PATH] [--dtype auto] ...

The default model has random weights in the shape of the demo model.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import timeit
from pathlib import Path

import torch

from benchmarks.checkpoints import LlamaShape, write_llama
from benchmarks.support.closed_loop import greedy_request
from millrace.engine.models.loader import choose_dtype, num_parameters
from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineRequest
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.schemas.config import EngineConfig
from millrace.schemas.sampling import SamplingParams

_COPY_BYTES = 1 << 26
_SHAPE = LlamaShape(
    hidden_size=256,
    num_layers=6,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=256 * 11 // 4,
    vocab_size=4096,
    context_window_tokens=2048,
    tied=True,
)


_PROMPT_TOKENS, _STEPS = 64, 64


def run(model: Path | None = None, dtype: str = "auto") -> None:
    """Measure ``model``, or random weights in the shape of the demo model."""
    with tempfile.TemporaryDirectory() as folder:
        _measure(model or write_llama(Path(folder), _SHAPE), dtype)


def _measure(path: Path, dtype_name: str) -> None:
    config = read_model_config(path)
    dtype = choose_dtype(config, dtype_name, torch.device("cpu"))
    weight_bytes = num_parameters(config) * dtype.itemsize
    copy_bytes_per_s = _copy_bandwidth()
    floor_ms = weight_bytes / copy_bytes_per_s * 1e3
    print(
        f"{num_parameters(config) / 1e6:.1f}M parameters in {str(dtype).removeprefix('torch.')}, "
        f"{torch.get_num_threads()} threads; reading the weights once at the "
        f"{copy_bytes_per_s / 1e9:.1f} GB/s of a copy takes {floor_ms:.2f} ms"
    )
    engine = EngineConfig(dtype=dtype_name, device="cpu", speculation="off")
    for batch in (1, 8, 32):
        steps_ms = _decode_ms(Engine.load(path, engine), batch)
        median_ms = statistics.median(steps_ms)
        print(
            f"decode batch {batch:2}: median {median_ms:6.2f} ms, min {min(steps_ms):6.2f} ms, "
            f"{batch * 1e3 / median_ms:6.0f} tokens/s"
        )
    for num_tokens in (32, 256, 1024):
        prefill_ms = _prefill_ms(Engine.load(path, engine), num_tokens, config.vocab_size)
        print(
            f"prefill {num_tokens:4} tokens: median {prefill_ms:6.2f} ms, "
            f"{num_tokens * 1e3 / prefill_ms:6.0f} tokens/s"
        )


def _decode_ms(engine: Engine, batch: int) -> list[float]:
    sampling = SamplingParams(max_tokens=_STEPS + 64, temperature=0.0, ignore_eos=True)
    for i in range(batch):
        engine.add(
            EngineRequest(
                request_id=str(i),
                prompt_token_ids=tuple(range(10, 10 + _PROMPT_TOKENS)),
                sampling=sampling,
            )
        )
    while engine.stats().decode_tokens < 8 * batch:  # all sequences decode, and caches are warm
        engine.step()
    return [_timed_step_ms(engine) for _ in range(_STEPS)]


def _prefill_ms(engine: Engine, num_tokens: int, vocab_size: int) -> float:
    times_ms: list[float] = []
    for i in range(6):
        token_ids = tuple((i + j) % vocab_size for j in range(num_tokens))
        engine.add(greedy_request(str(i), token_ids, 1))
        elapsed_ms = 0.0
        while engine.has_work:
            elapsed_ms += _timed_step_ms(engine)
        times_ms.append(elapsed_ms)
    return statistics.median(times_ms)


def _timed_step_ms(engine: Engine) -> float:
    begin_s = time.perf_counter()
    engine.step()
    return (time.perf_counter() - begin_s) * 1e3


def _copy_bandwidth() -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / min(timeit.repeat(lambda: target.copy_(source), number=1, repeat=8))

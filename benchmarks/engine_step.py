"""Milliseconds per step of the engine alone, beside the memory bandwidth that bounds it.

    OMP_NUM_THREADS=1 python -m benchmarks.engine_step [--model PATH] [--dtype auto] ...

Without a model, random weights in the shape of the demo model are used.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import timeit
from pathlib import Path

import torch

from benchmarks.checkpoints import LlamaShape, write_llama
from benchmarks.support.command import command_parser
from millrace.engine.models.loader import choose_dtype, num_parameters
from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineRequest
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.schemas.config import EngineConfig
from millrace.schemas.sampling import SamplingParams

_COPY_BYTES = 1 << 26


def main() -> None:
    """Print one line per batch size, and prefill."""
    parser = command_parser("engine_step", __doc__)
    parser.add_argument("--model", type=Path, help="checkpoint folder")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or _random_checkpoint(Path(folder), arguments)
        _measure(path, arguments)


def _measure(path: Path, arguments: argparse.Namespace) -> None:
    config = read_model_config(path)
    dtype = choose_dtype(config, arguments.dtype, torch.device("cpu"))
    weight_bytes = num_parameters(config) * dtype.itemsize
    copy_bytes_per_s = _copy_bandwidth()
    floor_ms = weight_bytes / copy_bytes_per_s * 1e3
    print(
        f"{num_parameters(config) / 1e6:.1f}M parameters in {str(dtype).removeprefix('torch.')}, "
        f"{torch.get_num_threads()} threads; reading the weights once at the "
        f"{copy_bytes_per_s / 1e9:.1f} GB/s of a copy takes {floor_ms:.2f} ms"
    )
    engine = EngineConfig(dtype=arguments.dtype, device="cpu")
    for batch in (1, 8, 32):
        steps_ms = _decode_ms(Engine.load(path, engine), batch, arguments)
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


def _decode_ms(engine: Engine, batch: int, arguments: argparse.Namespace) -> list[float]:
    sampling = {"temperature": arguments.temperature, "ignore_eos": True, "seed": 1}
    for i in range(batch):
        engine.add(
            EngineRequest(
                request_id=str(i),
                prompt_token_ids=tuple(range(10, 10 + arguments.prompt_tokens)),
                sampling=SamplingParams(max_tokens=arguments.steps + 64, **sampling),
            )
        )
    while engine.stats().decode_tokens < 8 * batch:  # everybody decodes, and caches are warm
        engine.step()
    return [_timed_step_ms(engine) for _ in range(arguments.steps)]


def _prefill_ms(engine: Engine, num_tokens: int, vocab_size: int) -> float:
    times_ms: list[float] = []
    for i in range(6):
        token_ids = tuple((i + j) % vocab_size for j in range(num_tokens))
        engine.add(
            EngineRequest(
                request_id=str(i),
                prompt_token_ids=token_ids,
                sampling=SamplingParams(max_tokens=1, temperature=0.0),
            )
        )
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
    """Bytes per second that a copy reads and writes."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / min(timeit.repeat(lambda: target.copy_(source), number=1, repeat=8))


def _random_checkpoint(path: Path, arguments: argparse.Namespace) -> Path:
    hidden, num_heads = arguments.hidden, arguments.heads
    shape = LlamaShape(
        hidden_size=hidden,
        num_layers=arguments.layers,
        num_heads=num_heads,
        num_kv_heads=num_heads // 2,
        intermediate_size=hidden * 11 // 4,
        vocab_size=arguments.vocab,
        context_window_tokens=2048,
        tied=True,
    )
    return write_llama(path, shape)


if __name__ == "__main__":
    main()

"""Gain of a second rank: tokens a second of a 100M Llama on one rank and several, one thread each.

    python -m benchmarks.parallel --only ranks [--ranks 2] [--rounds 3] [--beside 0] [--save]

One rank, a group of ranks and a pipeline of as many stages are measured in turns, each start in a
separate process, with one, 8 and 32 streams and with prompts of 512 tokens. Prints the median of
the rounds, and beside it:

  - the ranks' exchanges in a step, and rank 0's wait for the others (including the difference
    between their speeds);
  - the same group over Gloo instead of shared memory;
  - the same stages, all but the first joined by TCP over loopback;
  - a rank's memory while it loads its share and afterwards, against that share.

Two ranks take at least half of one rank's time, if each core's memory bandwidth stays the same when
both read.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.checkpoints import LlamaShape, write_llama
from benchmarks.support.command import PartResult
from benchmarks.support.machine_rates import cpu_name
from benchmarks.support.processes import busy_processes, in_new_process, remote_stages
from millrace.engine.threads.choice import configure_threads
from millrace.schemas.config import EngineConfig

if TYPE_CHECKING:
    from millrace.engine.step.engine import Engine

_STREAMS = (1, 8, 32)
_STEPS = 48
_PROMPT_TOKENS, _LONG_PROMPT_TOKENS = 64, 512
_SAMPLE_S = 0.002
_SMALL = LlamaShape(hidden_size=256, num_layers=1, intermediate_size=512, num_heads=8)


class Decoding(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of ``streams`` streams, and rank 0's exchanges in one, 0 for a single rank."""

    streams: int
    step_ms: float
    tokens_per_s: float
    exchanges: float = 0.0
    exchanged_bytes: float = 0.0
    waited_ms: float = 0.0


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one process."""

    decoding: list[Decoding]
    prefill_tokens_per_s: float


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a rank's share of the model.

    It has the bytes of the share as multiplied, and the additional bytes of the process since
    before the load, at the peak and at the end.
    """

    share_bytes: int
    most_bytes: int
    kept_bytes: int


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of ranks, and its figures in each round."""

    name: str
    starts: list[Start] = []

    def tokens_per_s(self, streams: int) -> float:
        """Return the median of the rounds."""
        return self._median(streams, lambda one: one.tokens_per_s)

    def of_step(self, streams: int) -> Decoding:
        """Return the median of each figure."""
        names = Decoding.__struct_fields__[1:]
        medians = {name: self._median(streams, attrgetter(name)) for name in names}
        return msgspec.convert({"streams": streams, **medians}, Decoding)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Median of the rounds."""
        return statistics.median(start.prefill_tokens_per_s for start in self.starts)

    def _median(self, streams: int, figure: Callable[[Decoding], float]) -> float:
        return statistics.median(
            figure(one) for start in self.starts for one in start.decoding if one.streams == streams
        )


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """All printed figures."""

    cpu: str
    ranks: int
    one: Side
    group: Side
    gloo: Side
    pipeline: Side
    remote: Side = Side(name="pipeline over TCP")
    memory: list[Memory]


def run(ranks: int = 2, rounds: int = 3, beside: int = 0) -> PartResult:
    """Measure in turns, beside ``beside`` processes that use a core each."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_llama(Path(folder) / "llama-100m")
        with busy_processes(beside, niceness=0):
            figures = _measure(checkpoint, ranks, rounds)
    print(_report(figures))
    return PartResult(figures, file="parallel.json")


def _measure(checkpoint: Path, ranks: int, rounds: int) -> Figures:
    sides = {
        "one": (Side(name="1 rank"), 1, ""),
        "group": (Side(name="shared memory"), ranks, "shared_memory"),
        "gloo": (Side(name="gloo"), ranks, "gloo"),
        "pipeline": (Side(name="pipeline"), ranks, "pipeline"),
        "remote": (Side(name="pipeline over TCP"), ranks, "remote"),
    }
    for _ in range(rounds):
        for side, num_ranks, part in sides.values():
            side.starts.append(in_new_process(_start, checkpoint, num_ranks, part))
    memory = [in_new_process(_memory, checkpoint, ranks) for _ in range(min(rounds, 3))]
    made = {name: side for name, (side, _, _) in sides.items()}
    return Figures(cpu=cpu_name(), ranks=ranks, memory=memory, **made)


def _config(ranks: int, part: str) -> EngineConfig:
    is_pipeline = part in ("pipeline", "remote")
    return EngineConfig(
        device="cpu",
        num_threads=1,
        tensor_parallel=1 if is_pipeline else ranks,
        pipeline_parallel=ranks if is_pipeline else 1,
        collectives="gloo" if part == "gloo" else "auto",
        kernels="native",
        speculation="off",
        max_num_sequences=max(_STREAMS),
    )


def _start(checkpoint: Path, ranks: int, part: str) -> Start:
    config = _config(ranks, part)
    if part == "remote":
        with remote_stages(ranks - 1) as address:
            config = msgspec.structs.replace(
                config, remote_stages=ranks - 1, stages_address=address
            )
            return _started(checkpoint, config)
    return _started(checkpoint, config)


def _started(checkpoint: Path, config: EngineConfig) -> Start:
    configure_threads(config, shared=False)
    # Imported here, because torch reads the thread settings at import.
    from millrace.engine.step.engine import Engine

    engine = Engine.load(checkpoint, config)
    decoding = [_decode(engine, streams) for streams in _STREAMS]
    return Start(decoding=decoding, prefill_tokens_per_s=_prefill(engine))


def _decode(engine: Engine, streams: int) -> Decoding:
    before = engine.stats().decode_tokens
    for number in range(streams):
        _add(engine, f"{streams}-{number}", _PROMPT_TOKENS, _STEPS + 64)
    while engine.stats().decode_tokens - before < 8 * streams:  # caches are warm, all decode
        engine.step()
    before_steps = _traffic(engine)
    steps_ms: list[float] = []
    while len(steps_ms) < _STEPS:  # as many tokens of each stream
        begin_s = time.perf_counter()
        num_tokens = 0
        while num_tokens < streams:
            num_tokens += sum(len(output.token_ids) for output in engine.step())
        steps_ms.append((time.perf_counter() - begin_s) * 1e3)
    step_ms = statistics.median(steps_ms)
    exchanges, num_bytes, waited_s = (
        (now - then) / _STEPS for now, then in zip(_traffic(engine), before_steps, strict=True)
    )
    for number in range(streams):
        engine.cancel(f"{streams}-{number}")
    while engine.has_work:
        engine.step()
    return Decoding(
        streams=streams,
        step_ms=step_ms,
        tokens_per_s=streams * 1e3 / step_ms,
        exchanges=exchanges,
        exchanged_bytes=num_bytes,
        waited_ms=waited_s * 1e3,
    )


def _traffic(engine: Engine) -> tuple[float, float, float]:
    stats = engine.stats()
    return stats.num_exchanges, stats.num_exchanged_bytes, stats.exchange_wait_s


def _prefill(engine: Engine) -> float:
    rates: list[float] = []
    for number in range(3):
        _add(engine, f"prefill-{number}", _LONG_PROMPT_TOKENS, 1)
        begin_s = time.perf_counter()
        while engine.has_work:
            engine.step()
        rates.append(_LONG_PROMPT_TOKENS / (time.perf_counter() - begin_s))
    return statistics.median(rates)


def _add(engine: Engine, name: str, num_tokens: int, max_tokens: int) -> None:
    from benchmarks.support.closed_loop import greedy_request

    tokens = random.Random(name).choices(range(100, 8000), k=num_tokens)
    engine.add(greedy_request(name, tuple(tokens), max_tokens))


def _memory(checkpoint: Path, ranks: int) -> Memory:
    """Measure the last rank, loaded alone in this process."""
    configure_threads(_config(ranks, "memory"), shared=False)
    import torch

    from millrace.engine.devices.cpu.loading import Arithmetic
    from millrace.engine.kernels.build import cpu_library
    from millrace.engine.kernels.cpu import CpuKernels
    from millrace.engine.models.decoder import DecoderWeights
    from millrace.engine.models.loader import load_weights
    from millrace.registry.checkpoints.checkpoint import read_model_config
    from millrace.registry.checkpoints.shard import Shard

    class Alone:
        """Collectives of a rank that only loads."""

        rank, size = ranks - 1, ranks

        def all_reduce(self, rows: torch.Tensor) -> None:
            raise AssertionError(f"{len(rows)} rows are computed")

    kernels = CpuKernels(cpu_library(), torch.bfloat16)
    makers = Arithmetic(torch.bfloat16, kernels, has_own_products=True).makers

    def load(path: Path) -> DecoderWeights:
        return load_weights(
            path,
            read_model_config(path),
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            product=makers.product,
            head_product=makers.head,
            quantized=makers.quantized,
            shard=Shard(Alone.rank, Alone.size),
            collectives=Alone(),
        )

    with tempfile.TemporaryDirectory() as folder:  # torch allocates its own memory now
        load(write_llama(Path(folder) / "small", _SMALL))
    before = _anonymous_bytes()
    most, ended = before, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(_SAMPLE_S):
            most = max(most, _anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    weights = load(checkpoint)
    ended.set()
    watcher.join()
    kept = _anonymous_bytes()
    share = weights.size.num_bytes + weights.embedding.numel() * weights.embedding.element_size()
    return Memory(share_bytes=share, most_bytes=max(most, kept) - before, kept_bytes=kept - before)


def _anonymous_bytes() -> int:
    """Return the memory of this process without pages of files."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def _report(figures: Figures) -> str:
    one, others = figures.one, (figures.group, figures.gloo, figures.pipeline, figures.remote)
    names = (f"{figures.ranks} ranks", "gloo", f"{figures.ranks} stages", "stages by TCP")
    head = "Llama of 100M parameters in bfloat16, one thread a rank; median of rounds in turns"
    lines = [f"{figures.cpu}; {head} ({len(one.starts)} rounds)"]

    def line(what: str, rates: list[float]) -> str:
        pairs = zip(names, rates[1:], strict=True)
        gains = ", ".join(f"{name} {rate:.0f} = {rate / rates[0]:.2f}x" for name, rate in pairs)
        return f"{what}: 1 rank {rates[0]:.0f} tokens/s, {gains}"

    for streams in _STREAMS:
        lines.append(
            line(f"{streams:3} streams", [side.tokens_per_s(streams) for side in (one, *others)])
        )
        step = figures.group.of_step(streams)
        lines.append(
            f"  a step of the ranks of {step.step_ms:.2f} ms has {step.exchanges:.0f} exchanges of "
            f"{step.exchanged_bytes / 1e3:.0f} kB in all and waits {step.waited_ms:.2f} ms in them"
        )
    lines.append(line("prompts", [side.prefill_tokens_per_s for side in (one, *others)]))
    shares = [memory.most_bytes / memory.share_bytes for memory in figures.memory]
    kept = [memory.kept_bytes / memory.share_bytes for memory in figures.memory]
    lines.append(
        f"memory of a rank's share of {figures.memory[0].share_bytes / 1e6:.0f} MB: at most "
        f"{max(shares):.2f}x of it while it loads, {max(kept):.2f}x afterwards"
    )
    return "\n".join(lines)

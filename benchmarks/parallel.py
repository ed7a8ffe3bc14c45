"""What a second rank is worth: tokens a second of a 100M Llama on one rank and on several, each
with one thread.

    python -m benchmarks.parallel [--ranks 2] [--rounds 3] [--beside 0] [--save | --json FILE]

One rank, a group of ranks and a pipeline of as many stages are measured in turns, each start in a
process of its own, with one, 8 and 32 streams and with prompts of 512 tokens; printed is the median
of the rounds. Beside them stand what the ranks exchange in a step and how long rank 0 waits for the
others in it (the difference between their speeds included), the same group over Gloo in place of
shared memory, the same stages of which all but the first are joined by TCP over loopback, and the
memory that a rank takes while it loads its share and afterwards, against that share. The limit of
two ranks is half of the time of one, for as long as the cores' common way to memory gives each what
one alone has of it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from benchmarks.checkpoints import LlamaShape, write_llama
from benchmarks.support.command import command_parser, write_json
from benchmarks.support.machine_rates import cpu_name
from benchmarks.support.processes import busy_processes
from benchmarks.support.remote_stages import remote_stages
from millrace.engine.threads.choice import configure_threads
from millrace.schemas.config import EngineConfig

if TYPE_CHECKING:
    from millrace.engine.step.engine import Engine

_RESULTS = Path(__file__).parent / "results" / "parallel.json"
_STREAMS = (1, 8, 32)
_STEPS = 48
_PROMPT_TOKENS, _LONG_PROMPT_TOKENS = 64, 512
_SAMPLE_S = 0.002
_SMALL = LlamaShape(hidden_size=256, num_layers=1, intermediate_size=512, num_heads=8)

PartT = TypeVar("PartT")


class Decoding(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of so many streams; what rank 0 exchanges in one, 0 for one rank."""

    streams: int
    step_ms: float
    tokens_per_s: float
    exchanges: float = 0.0
    exchanged_bytes: float = 0.0
    waited_ms: float = 0.0


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """What one process measured."""

    decoding: list[Decoding]
    prefill_tokens_per_s: float


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Of a rank's share of the model: its bytes as they are multiplied with, and what the process
    took more than before it loaded them, at most and in the end."""

    share_bytes: int
    most_bytes: int
    kept_bytes: int


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """A way to compute, and what each round measured of it."""

    name: str
    starts: list[Start] = []

    def tokens_per_s(self, streams: int) -> float:
        """The median of the rounds."""
        return self._median(streams, lambda one: one.tokens_per_s)

    def of_step(self, streams: int) -> Decoding:
        """The median of each figure."""
        names = Decoding.__struct_fields__[1:]
        medians = {name: self._median(streams, attrgetter(name)) for name in names}
        return msgspec.convert({"streams": streams, **medians}, Decoding)

    @property
    def prefill_tokens_per_s(self) -> float:
        """The median of the rounds."""
        return statistics.median(start.prefill_tokens_per_s for start in self.starts)

    def _median(self, streams: int, figure: Callable[[Decoding], float]) -> float:
        return statistics.median(
            figure(one) for start in self.starts for one in start.decoding if one.streams == streams
        )


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """All that is printed."""

    cpu: str
    ranks: int
    one: Side
    group: Side
    gloo: Side
    pipeline: Side
    remote: Side = Side(name="pipeline over TCP")
    memory: list[Memory]


def main() -> None:
    """Measure in processes of their own, in turns; or be one of them."""
    arguments = _arguments()
    if arguments.start is not None:
        made = _start if arguments.part != "memory" else _memory
        sys.stdout.buffer.write(msgspec.json.encode(made(arguments.start, arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_llama(Path(folder) / "llama-100m")
        with busy_processes(arguments.beside, niceness=0):
            figures = _measure(checkpoint, arguments)
    print(_report(figures))
    write_json(_RESULTS if arguments.save else arguments.json, figures)


def _arguments() -> argparse.Namespace:
    parser = command_parser("parallel", __doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--beside", type=int, default=0, help="processes that want a core meanwhile (default: 0)"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true", help="into benchmarks/results")
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(checkpoint: Path, arguments: argparse.Namespace) -> Figures:
    one, group, gloo = Side(name="1 rank"), Side(name="shared memory"), Side(name="gloo")
    pipeline, remote = Side(name="pipeline"), Side(name="pipeline over TCP")
    for _ in range(arguments.rounds):
        one.starts.append(_run(checkpoint, 1, "", Start))
        group.starts.append(_run(checkpoint, arguments.ranks, "shared_memory", Start))
        gloo.starts.append(_run(checkpoint, arguments.ranks, "gloo", Start))
        pipeline.starts.append(_run(checkpoint, arguments.ranks, "pipeline", Start))
        remote.starts.append(_run(checkpoint, arguments.ranks, "remote", Start))
    memory = [
        _run(checkpoint, arguments.ranks, "memory", Memory) for _ in range(min(arguments.rounds, 3))
    ]
    return Figures(
        cpu=cpu_name(),
        ranks=arguments.ranks,
        one=one,
        group=group,
        gloo=gloo,
        pipeline=pipeline,
        remote=remote,
        memory=memory,
    )


def _run(checkpoint: Path, ranks: int, part: str, kind: type[PartT]) -> PartT:
    command = (sys.executable, "-m", "benchmarks.parallel", "--start", str(checkpoint))
    done = subprocess.run(
        (*command, "--ranks", str(ranks), "--part", part), capture_output=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr.decode()[-2000:])
    return msgspec.json.decode(done.stdout, type=kind)


def _config(arguments: argparse.Namespace) -> EngineConfig:
    is_pipeline = arguments.part in ("pipeline", "remote")
    return EngineConfig(
        device="cpu",
        num_threads=1,
        tensor_parallel=1 if is_pipeline else arguments.ranks,
        pipeline_parallel=arguments.ranks if is_pipeline else 1,
        collectives="gloo" if arguments.part == "gloo" else "auto",
        kernels="native",
        speculation="off",
        max_num_sequences=max(_STREAMS),
    )


def _start(checkpoint: Path, arguments: argparse.Namespace) -> Start:
    config = _config(arguments)
    if arguments.part == "remote":
        with remote_stages(arguments.ranks - 1) as address:
            num_remote = arguments.ranks - 1
            return _started(
                checkpoint,
                msgspec.structs.replace(config, remote_stages=num_remote, stages_address=address),
            )
    return _started(checkpoint, config)


def _started(checkpoint: Path, config: EngineConfig) -> Start:
    configure_threads(config, shared=False)
    # Not before: torch reads the thread settings when it is imported.
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
    from millrace.engine.types import EngineRequest
    from millrace.schemas.sampling import SamplingParams

    tokens = random.Random(name).choices(range(100, 8000), k=num_tokens)
    engine.add(
        EngineRequest(
            request_id=name,
            prompt_token_ids=tuple(tokens),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
    )


def _memory(checkpoint: Path, arguments: argparse.Namespace) -> Memory:
    """Of the last rank, loaded in this process alone."""
    configure_threads(_config(arguments), shared=False)
    import torch

    from millrace.engine.devices.cpu.loading import Arithmetic
    from millrace.engine.kernels.build import cpu_library
    from millrace.engine.kernels.cpu import CpuKernels
    from millrace.engine.models.decoder import DecoderWeights
    from millrace.engine.models.loader import load_weights
    from millrace.engine.models.shard import Shard
    from millrace.registry.checkpoints.checkpoint import read_model_config

    class Alone:
        """The collectives of a rank that only loads."""

        rank, size = arguments.ranks - 1, arguments.ranks

        def all_reduce(self, rows: torch.Tensor) -> None:
            raise AssertionError(f"{len(rows)} rows are computed")

    kernels = CpuKernels(cpu_library(), torch.bfloat16)
    product, quantized = Arithmetic(torch.bfloat16, kernels, has_own_products=True).makers

    def load(path: Path) -> DecoderWeights:
        return load_weights(
            path,
            read_model_config(path),
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            product=product,
            quantized=quantized,
            shard=Shard(Alone.rank, Alone.size),
            collectives=Alone(),
        )

    with tempfile.TemporaryDirectory() as folder:  # what torch takes for itself, it takes now
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
    """Of this process, without the pages of files."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def _report(figures: Figures) -> str:
    one, group, gloo, pipeline = figures.one, figures.group, figures.gloo, figures.pipeline
    remote = figures.remote
    head = "Llama of 100M parameters in bfloat16, one thread a rank; median of rounds in turns"
    lines = [f"{figures.cpu}; {head} ({len(one.starts)} rounds)"]
    for streams in _STREAMS:
        sides = (one, group, gloo, pipeline, remote)
        alone, together, over, piped, joined = (side.of_step(streams) for side in sides)
        gain = together.tokens_per_s / alone.tokens_per_s
        lines.append(
            f"{streams:3} streams: 1 rank {alone.tokens_per_s:7.0f} tokens/s, {figures.ranks} "
            f"ranks {together.tokens_per_s:7.0f} = {gain:.2f}x "
            f"(gloo {over.tokens_per_s / alone.tokens_per_s:.2f}x), {figures.ranks} stages "
            f"{piped.tokens_per_s:7.0f} = {piped.tokens_per_s / alone.tokens_per_s:.2f}x "
            f"(by TCP {joined.tokens_per_s / alone.tokens_per_s:.2f}x); a step "
            "of the ranks of "
            f"{together.step_ms:.2f} ms has {together.exchanges:.0f} exchanges of "
            f"{together.exchanged_bytes / 1e3:.0f} kB in all and waits {together.waited_ms:.2f} ms "
            "in them"
        )
    lines.append(
        f"prompts: 1 rank {one.prefill_tokens_per_s:.0f} tokens/s, {figures.ranks} ranks "
        f"{group.prefill_tokens_per_s:.0f} = "
        f"{group.prefill_tokens_per_s / one.prefill_tokens_per_s:.2f}x "
        f"(gloo {gloo.prefill_tokens_per_s / one.prefill_tokens_per_s:.2f}x), stages "
        f"{pipeline.prefill_tokens_per_s / one.prefill_tokens_per_s:.2f}x"
    )
    shares = [memory.most_bytes / memory.share_bytes for memory in figures.memory]
    kept = [memory.kept_bytes / memory.share_bytes for memory in figures.memory]
    lines.append(
        f"memory of a rank's share of {figures.memory[0].share_bytes / 1e6:.0f} MB: at most "
        f"{max(shares):.2f}x of it while it loads, {max(kept):.2f}x afterwards"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Options, model loading and file handling of the commands that run an engine in their process."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from millrace.cli.arguments import as_path, whole_number
from millrace.cli.engine_arguments import add_ranks, told_ranks
from millrace.runtime.json.lines import on_one_line
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import QUANTIZATIONS
from millrace.schemas.errors import ConfigError, MillraceError

DEFAULTS = EngineConfig()
_MAX_SHOWN = 20
_PARALLEL = ("tensor_parallel", "pipeline_parallel")


class BadLinesError(MillraceError, code="invalid_input", http_status=400):
    """Error for invalid lines of the input; the message names each by its number."""

    @classmethod
    def of(cls, file: Path, bad: Sequence[tuple[int, str]]) -> BadLinesError:
        """Make the error for these lines, each with its problem."""
        shown = [f"{file}, line {number}: {why}" for number, why in bad[:_MAX_SHOWN]]
        more = [f"and {len(bad) - _MAX_SHOWN} more"] if len(bad) > _MAX_SHOWN else []
        return cls("\n".join([*shown, *more]))


class BadLine(msgspec.Struct, frozen=True, kw_only=True):
    """Invalid line with its problem; ``id`` is the line's own, else its number."""

    id: str | int
    number: int
    code: str
    message: str


class _Printer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


_PRINTER = _Printer()


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--input`` and ``--catalogue``."""
    parser.add_argument("--input", type=as_path, required=True, metavar="IN.jsonl")
    parser.add_argument("--catalogue", default="", help="a models.yaml instead of the built-in one")


def add_bad_lines_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--answer-bad-lines``."""
    parser.add_argument(
        "--answer-bad-lines",
        action="store_true",
        help="answer invalid lines with an error and run the others (default: run nothing if a "
        "line is invalid)",
    )


def numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, each with its number. Raises ConfigError if the file
    cannot be read."""
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def error_line(line_id: str | int, code: str, message: str) -> str:
    """Render the answer to a line that could not be run."""
    answer = {"id": line_id, "error": {"code": code, "message": message}}
    return on_one_line(msgspec.json.encode(answer)).decode() + "\n"


def open_output(path: Path) -> TextIO:
    """Open the output file. Raises ConfigError."""
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def add_engine_options(parser: argparse.ArgumentParser, what: str) -> argparse._ArgumentGroup:
    """Declare the options for the engine's size and device; return their group.

    ``what`` names the inputs in help texts: requests, texts.
    """
    group = parser.add_argument_group("the engine")
    group.add_argument(
        "--max-batch",
        type=whole_number,
        help=f"{what} that run at a time (default: 64 on a CPU, 256 on a GPU)",
    )
    group.add_argument(
        "--max-batch-tokens",
        type=whole_number,
        help="most tokens of a step (default: 384 on a CPU, 4096 on a GPU)",
    )
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    group.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        help="quantize wide weights at load (default: from the catalogue, else none)",
    )
    group.add_argument("--device", default="auto", help="auto, cpu or cuda")
    group.add_argument(
        "--threads", type=whole_number, default=0, help="0 (the default) uses all cores"
    )
    add_ranks(group)
    group.add_argument(
        "--kernels",
        default=DEFAULTS.kernels,
        help="auto, native (compiled, on a CPU), triton (on a GPU), torch, or reference (plain "
        "torch in place of triton)",
    )
    group.add_argument(
        "--load-format",
        default=DEFAULTS.load_format,
        help="auto, or dummy: random weights for the checkpoint's config.json",
    )
    group.add_argument(
        "--gpu-memory-fraction",
        type=float,
        default=DEFAULTS.gpu_memory_fraction,
        help="share of a GPU's memory for weights, work space and KV cache (default: %(default)s)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        default=DEFAULTS.kv_cache_dtype,
        help="auto (the type of the weights), or 8 bits: fp8 on a GPU and int8 on a CPU, with "
        "half the bytes and slightly less exact",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="on a GPU, make a request's tokens independent of the rest of the batch "
        "(batch-invariant); slower",
    )
    group.add_argument(
        "--no-cuda-graphs",
        action="store_true",
        help="launch each kernel of a step separately instead of replaying CUDA graphs",
    )
    group.add_argument(
        "--no-overlap",
        action="store_true",
        help="read the results of each step before the next is launched",
    )
    return group


def engine_config(arguments: argparse.Namespace, **others: Any) -> EngineConfig:
    """Return the settings of ``add_engine_options`` and ``others``. Raises MillraceError for an
    option out of range."""
    for name in ("max_batch", "max_batch_tokens", "kv_cache_bytes", *_PARALLEL):
        value = getattr(arguments, name, None)
        if value is not None and value < 1:
            raise MillraceError(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("num_blocks", "host_cache_bytes", "threads"):
        if getattr(arguments, name, 0) < 0:
            raise MillraceError(f"--{name.replace('_', '-')} must not be negative")
    return EngineConfig(
        max_num_sequences=arguments.max_batch or 0,
        max_batch_tokens=arguments.max_batch_tokens or 0,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        device=arguments.device,
        num_threads=arguments.threads,
        kernels=arguments.kernels,
        load_format=arguments.load_format,
        gpu_memory_fraction=arguments.gpu_memory_fraction,
        kv_cache_dtype=arguments.kv_cache_dtype,
        deterministic=arguments.deterministic,
        cuda_graphs=not arguments.no_cuda_graphs,
        overlap=not arguments.no_overlap,
        **told_ranks(arguments),
        **others,
    )


def print_start_of_engine() -> None:
    """Print the engine's messages about its start (weights, memory, recorded steps, times)."""
    said = logging.getLogger("millrace.engine")
    said.addHandler(_PRINTER)
    said.setLevel(logging.INFO)

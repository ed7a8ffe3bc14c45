"""Arguments of ``millrace simulate`` that say of how many devices a worker is."""

from __future__ import annotations

import argparse
import math

import msgspec

from millrace.cli.arguments import whole_number
from millrace.schemas.errors import ConfigError
from millrace.simulation.collectives import GroupLink, ModelShape, collective_times

_MAX_DEVICES = 1_024


def add_group(group: argparse._ArgumentGroup) -> None:
    """Declare them."""
    group.add_argument(
        "--tensor-parallel",
        type=whole_number,
        metavar="N",
        help="devices that compute each layer together; the times of steps and prompts, which are "
        "of one device, are divided by it, and what is exchanged is added (docs/parallelism.md)",
    )
    group.add_argument(
        "--model-shape",
        metavar="LAYERS,HIDDEN,VOCABULARY",
        help="what is exchanged follows from it (default: 32,4096,128256, a Llama 8B)",
    )
    group.add_argument(
        "--group-gbytes-per-s",
        type=float,
        metavar="R",
        help="what a device sends to the others of its group (default: 450, NVLink 4 each way)",
    )
    group.add_argument(
        "--collective-us",
        type=float,
        metavar="US",
        help="what an exchange takes beside its bytes (default: as NCCL's model of a ring has it)",
    )


def group_of(arguments: argparse.Namespace) -> tuple[int, dict[str, float]] | None:
    """How many devices a worker has, and the settings of ``worker.engine.simulation`` that follow;
    None: the arguments leave that to the configuration. Raises ConfigError."""
    num_devices = arguments.tensor_parallel
    if num_devices is None:
        for name in ("model_shape", "group_gbytes_per_s", "collective_us"):
            if getattr(arguments, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} goes with --tensor-parallel")
        return None
    if not 1 <= num_devices <= _MAX_DEVICES:
        raise ConfigError(
            f"--tensor-parallel must be between 1 and {_MAX_DEVICES}, got {num_devices}"
        )
    times = collective_times(_shape_of(arguments), _link_of(arguments), num_devices)
    return num_devices, msgspec.structs.asdict(times)


def _link_of(arguments: argparse.Namespace) -> GroupLink:
    link = GroupLink()
    if arguments.group_gbytes_per_s is not None:
        if not 0 < arguments.group_gbytes_per_s < math.inf:
            raise ConfigError(
                f"--group-gbytes-per-s must be above 0, got {arguments.group_gbytes_per_s:g}"
            )
        link = msgspec.structs.replace(link, bytes_per_s=arguments.group_gbytes_per_s * 1e9)
    if arguments.collective_us is not None:
        if not 0 <= arguments.collective_us < math.inf:
            raise ConfigError(f"--collective-us must be 0 or more, got {arguments.collective_us:g}")
        link = msgspec.structs.replace(link, latency_s=arguments.collective_us / 1e6)
    return link


def _shape_of(arguments: argparse.Namespace) -> ModelShape:
    if arguments.model_shape is None:
        return ModelShape()
    parts = arguments.model_shape.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) for part in parts):
        raise ConfigError(
            f"--model-shape: {arguments.model_shape!r} does not look like 80,8192,128256"
        )
    layers, hidden, vocabulary = map(int, parts)
    return ModelShape(num_layers=layers, hidden_size=hidden, vocab_size=vocabulary)

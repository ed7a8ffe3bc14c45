"""Conversion of command-line arguments to settings and recipes; each error names its argument."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from millrace.bench.arrivals import check_number_of_arrivals
from millrace.bench.settings import Slo
from millrace.bench.spread import parse_spread
from millrace.cli.arguments import parse_slo, seconds
from millrace.cli.engine_arguments import FirstWorkers, parse_bounds, workers_option
from millrace.runtime.settings import load_config
from millrace.schemas.config import AutoscaleConfig, Config, EngineConfig
from millrace.schemas.engines import WorkerRole
from millrace.schemas.errors import ConfigError
from millrace.schemas.tenants import budgets_of, check_currency, parse_budget
from millrace.simulation.collectives import GroupLink, ModelShape, collective_times
from millrace.simulation.settings import Failure, KvLink, SimulationSettings
from millrace.simulation.traces.synthesise import TraceKind, TraceRecipe, parse_tenants
from millrace.workers.simulated.latency_model import LatencyModel

# Engine settings of a GPU, for values that a configuration leaves to the device.
_ENGINE_DEFAULTS = {"max_num_sequences": 256, "max_batch_tokens": 4_096, "num_blocks": 16_384}
_SIMULATION = (
    "prefill_tokens_per_s",
    "step_ms",
    "step_ms_per_sequence",
    "step_ms_per_kv_token",
)
# A simulation learns of every loss at once, so leases may be long, and fewer extensions make the
# simulation faster.
_ACK_WAIT_S, _LEASE_EXTEND_S = 120.0, 40.0
_FAILURE = re.compile(r"worker=(\d+)@(.+)")
_MAX_WORKERS = 100_000
_MAX_DEVICES = 1_024


def settings_of(arguments: argparse.Namespace) -> SimulationSettings:
    """Return the simulation's settings. Raises ConfigError."""
    if not 0 <= arguments.seed < 1 << 63:
        raise ConfigError("--seed must be between 0 and 2^63 - 1")
    num_workers, roles = _workers(arguments.workers)
    if arguments.switch_roles and not roles:
        raise ConfigError("--switch-roles takes --workers with roles, such as prefill:1,decode:2")
    gpus = arguments.gpus_per_worker
    currency, gpu_hour_price = _price("--gpu-hour-price", arguments.gpu_hour_price)
    return SimulationSettings(
        config=_config_of(arguments),
        num_workers=num_workers,
        roles=roles,
        link=_link(arguments),
        seed=arguments.seed,
        failures=tuple(map(_failure, arguments.fail)),
        mtbf_s=0.0 if arguments.mtbf is None else _above_0("--mtbf", arguments.mtbf),
        restart_s=seconds("--restart-time", arguments.restart_time),
        drain_s=seconds("--drain", arguments.drain),
        slo=_slo(arguments),
        gpu_hour_price=gpu_hour_price,
        currency=currency,
        gpus_per_worker=None if gpus is None else _at_least_0("--gpus-per-worker", gpus),
    )


def _price(name: str, text: str) -> tuple[str, float]:
    """Parse one price into its currency and amount."""
    try:
        [(currency, amount)] = budgets_of(parse_budget(text)).items()
        check_currency(currency)
    except ValueError as error:
        raise ConfigError(f"{name} takes one amount, such as 2.5 or '2.5 EUR': {error}") from error
    return currency, _at_least_0(name, float(amount))


def _config_of(arguments: argparse.Namespace) -> Config:
    config = load_config(arguments.config, os.environ)
    heartbeat_s = _above_0("--heartbeat", arguments.heartbeat)
    worker = msgspec.structs.replace(
        config.worker,
        engine=_engine(config.worker.engine, arguments),
        heartbeat_s=heartbeat_s,
        lease_extend_s=_LEASE_EXTEND_S,
        prefix_report_s=max(config.worker.prefix_report_s, heartbeat_s),
    )
    LatencyModel(worker.engine.simulation, worker.engine.tensor_parallel)
    scheduler: dict[str, Any] = {
        "lease_extend_s": _LEASE_EXTEND_S,
        "heartbeat_timeout_s": max(config.scheduler.heartbeat_timeout_s, 2 * heartbeat_s),
    }
    if arguments.max_queued_jobs is not None:
        scheduler["max_queued_jobs"] = _count("--max-queued-jobs", arguments.max_queued_jobs)
    if arguments.switch_roles:
        scheduler["switch_roles"] = True
    if arguments.autoscale is not None:
        start_s = worker.engine.simulation.start_s
        scheduler["autoscale"] = _autoscale(
            arguments.autoscale, config.scheduler.autoscale, start_s
        )
    return msgspec.structs.replace(
        config,
        worker=worker,
        scheduler=msgspec.structs.replace(config.scheduler, **scheduler),
        nats=msgspec.structs.replace(config.nats, ack_wait_s=_ACK_WAIT_S),
    )


def _engine(engine: EngineConfig, arguments: argparse.Namespace) -> EngineConfig:
    changes: dict[str, Any] = {"kind": "simulated"}
    for name, default in _ENGINE_DEFAULTS.items():
        given = getattr(arguments, name)
        if given is not None:
            changes[name] = _count(f"--{name.replace('_', '-')}", given)
        elif not getattr(engine, name):
            changes[name] = default
    simulation = {
        name: value for name in _SIMULATION if (value := getattr(arguments, name)) is not None
    }
    if arguments.start_time is not None:
        simulation["start_s"] = seconds("--start-time", arguments.start_time)
    group = _group_of(arguments)
    if group is not None:
        changes["tensor_parallel"], collectives = group
        simulation |= collectives
    changes["simulation"] = msgspec.structs.replace(engine.simulation, **simulation)
    return msgspec.structs.replace(engine, **changes)


def _autoscale(text: str, config: AutoscaleConfig, start_s: float) -> AutoscaleConfig:
    fewest, most = parse_bounds(text, _MAX_WORKERS)
    return msgspec.structs.replace(
        config,
        min_workers=fewest,
        max_workers=most,
        cold_start_s=start_s or config.cold_start_s,
    )


def _workers(text: str) -> tuple[dict[str, int], tuple[WorkerRole, ...]]:
    """Parse the number of workers of each model by name ("" for all other models), and the roles of
    a model's workers."""
    if "=" not in text:
        first = _first_workers(text.strip())
        return {"": first.number}, first.roles
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, _, count = part.strip().rpartition("=")
        if not count.isdecimal() or not 0 < int(count) <= _MAX_WORKERS or name in counts:
            raise ConfigError(
                f"--workers: {text!r} is neither a number nor NAME=N,NAME=N; where models are "
                "named, workers have no roles"
            )
        counts[name] = int(count)
    return counts, ()


def _first_workers(text: str) -> FirstWorkers:
    try:
        first = workers_option(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--workers: {error}; NAME=N,NAME=N of several models") from error
    if not 0 < first.number <= _MAX_WORKERS:
        raise ConfigError(f"--workers: {text!r} is not between 1 and {_MAX_WORKERS} workers")
    return first


def _group_of(arguments: argparse.Namespace) -> tuple[int, dict[str, float]] | None:
    """Return the devices per worker and the resulting settings of ``worker.engine.simulation``;
    None: the configuration decides.

    Raises ConfigError.
    """
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
    given = _above_0_in(arguments, {"bytes_per_s": ("group_gbytes_per_s", 1e9)})
    if arguments.collective_us is not None:
        given["latency_s"] = _at_least_0("--collective-us", arguments.collective_us) / 1e6
    link = GroupLink(**given)
    times = collective_times(_shape_of(arguments), link, num_devices)
    return num_devices, msgspec.structs.asdict(times)


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


def _link(arguments: argparse.Namespace) -> KvLink:
    units = {
        "bytes_per_token": ("kv_bytes_per_token", 1.0),
        "bytes_per_s": ("link_gbytes_per_s", 1e9),
    }
    given = _above_0_in(arguments, units)
    if arguments.pull_overhead is not None:
        given["overhead_s"] = seconds("--pull-overhead", arguments.pull_overhead)
    return KvLink(**given)


def _above_0_in(
    arguments: argparse.Namespace, units: Mapping[str, tuple[str, float]]
) -> dict[str, float]:
    """Return the given values by field. ``units`` has each field's argument name and factor.

    Raises ConfigError for a value that is not above 0.
    """
    given = {}
    for field, (name, unit) in units.items():
        value = getattr(arguments, name)
        if value is not None:
            if not 0 < value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
            given[field] = value * unit
    return given


def _failure(text: str) -> Failure:
    matched = _FAILURE.fullmatch(text)
    if matched is None or int(matched[1]) < 1:
        raise ConfigError(f"--fail: {text!r} does not look like worker=3@120s")
    return Failure(worker=int(matched[1]), at_s=seconds("--fail", matched[2]))


def _slo(arguments: argparse.Namespace) -> Slo | None:
    slo = Slo() if arguments.slo is None else parse_slo(arguments.slo)
    changes = {
        name: bound
        for name, bound in (("ttft_ms", arguments.slo_ttft_ms), ("tpot_ms", arguments.slo_tpot_ms))
        if bound is not None
    }
    slo = msgspec.structs.replace(slo, **changes)
    return None if slo == Slo() else slo


def recipe_of(arguments: argparse.Namespace) -> TraceRecipe:
    """Return the recipe of a synthetic trace. Raises ConfigError."""
    swing = arguments.swing
    if not 0 <= swing <= 1:
        raise ConfigError(f"--swing must be between 0 and 1, got {swing:g}")
    for name in ("rate", "burstiness"):
        if not 0 < getattr(arguments, name) < 1e6:
            raise ConfigError(f"--{name} must be above 0, got {getattr(arguments, name):g}")
    if not 1 <= arguments.turns < 1e4:
        raise ConfigError(f"--turns must be at least 1, got {arguments.turns:g}")
    if min(arguments.max_tokens, arguments.system_prompts, arguments.system_tokens) < 0:
        raise ConfigError("--max-tokens, --system-prompts and --system-tokens cannot be negative")
    if not 0 <= arguments.seed < 1 << 32:
        raise ConfigError("--seed must be between 0 and 2^32 - 1")
    deadline = arguments.deadline
    duration_s = _above_0("--duration", arguments.duration)
    check_number_of_arrivals(arguments.rate, duration_s)
    return TraceRecipe(
        kind=TraceKind(arguments.kind),
        rate_per_s=arguments.rate,
        duration_s=duration_s,
        tenants=parse_tenants(arguments.tenants),
        input_tokens=parse_spread(arguments.input_tokens),
        output_tokens=parse_spread(arguments.output_tokens),
        model=arguments.model,
        burstiness=arguments.burstiness,
        swing=swing,
        period_s=_above_0("--period", arguments.period),
        turns=arguments.turns,
        think_s=_above_0("--think-time", arguments.think_time),
        num_system_prompts=arguments.system_prompts,
        system_tokens=arguments.system_tokens,
        max_tokens=arguments.max_tokens,
        deadline_s=None if deadline is None else _above_0("--deadline", deadline),
        seed=arguments.seed,
    )


def _above_0(name: str, text: str) -> float:
    value = seconds(name, text)
    if value <= 0:
        raise ConfigError(f"{name} must be more than nothing")
    return value


def _at_least_0(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be 0 or more, got {value:g}")
    return value


def _count(name: str, value: int) -> int:
    if not 1 <= value <= 1 << 40:
        raise ConfigError(f"{name} must be at least 1, got {value}")
    return value

"""Gain of separate prefill and decode workers: fleets of 128 H200 in virtual time, by their split.

    python -m benchmarks.simulated_roles [--only chat|long] [--rates 600,1200] [--jobs 2] [--save]
    python -m benchmarks.simulated_roles --only long --rates 45 --fleets "32 + 96, switching"

The real scheduler runs with simulated workers, as in ``millrace simulate``: the figures do not
depend on the machine, and are no measurement of a GPU. Each worker is one H200 with a Llama 70B in
fp8. Step times are derived from the data sheet, the model's shape and two assumed shares of the
device's rates (``device``). Each load arrives at random at several rates. Only requests that arrive
in a window count, with as much load before and after it. Goodput is the number of these per second
answered within the load's limits. With switched roles (``scheduler.switch_roles``), the window
begins after 30 s of load.

  chat   short prompts and answers of log-normal lengths, in the manner of ShareGPT
  long   prompts of 8,192 tokens
"""

from __future__ import annotations

import gc
import json
import logging
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Literal, NamedTuple

import msgspec

from benchmarks.support.command import PartResult, run_command
from millrace.bench.settings import Slo
from millrace.bench.spread import parse_spread
from millrace.schemas.config import (
    Config,
    EngineConfig,
    NatsConfig,
    SchedulerConfig,
    SimulationConfig,
    WorkerConfig,
)
from millrace.schemas.engines import EngineKind, WorkerRole
from millrace.simulation.report.measure import policy_report
from millrace.simulation.report.report import Percentiles
from millrace.simulation.settings import KvLink, SimulationSettings, parse_policies
from millrace.simulation.traces.synthesise import TenantShare, TraceKind, TraceRecipe, synthesise
from millrace.simulation.traces.trace import TraceRequest
from millrace.simulation.world import simulate

_NUM_WORKERS = 128
_SEED = 1

_CHUNK_TOKENS = 4_096
# Links of 400 Gbit/s, and of Millrace's TCP rate for such blocks (results/kv_transfer.json).
_FAST_LINK, _TCP_LINK = 50e9, 1.6e9
# Minimum seconds of load before the window, if roles are switched.
_WARM_UP_S = 30.0
# Data sheet of an H200 SXM, dense, and the assumed shares of its rates.
_BYTES_PER_S, _FP8_FLOP_PER_S, _MEMORY_BYTES = 4.8e12, 1_979e12, 141e9
_BANDWIDTH_SHARE, _FLOP_SHARE, _MEMORY_SHARE = 0.8, 0.5, 0.9
# Shape of a Llama 3 70B; a step reads all but the embedding.
_PARAMETERS, _EMBEDDING = 70.55e9, 128_256 * 8_192
_LAYERS, _WIDTH, _KV_WIDTH = 80, 8_192, 8 * 128
_NUM_SLOTS, _BLOCK_TOKENS = 256, 16


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Load; ``mean_context`` is the mean number of tokens that a prompt's token attends to."""

    name: str
    input_tokens: str
    output_tokens: str
    mean_context: int
    rates_per_s: tuple[float, ...]
    window_s: float
    slo: Slo


class Fleet(NamedTuple):
    """Fleet in which ``num_prefill`` workers compute prompts, or all do both if 0.

    ``switches`` means that this is the split at first, and schedulers change it.
    """

    num_prefill: int
    chunk_tokens: int = _CHUNK_TOKENS
    link_bytes_per_s: float = _FAST_LINK
    switches: bool = False

    def num_prefill_of(self, num_workers: int) -> int:
        """Return the number of prefill workers in the fleet's proportion."""
        return self.num_prefill * num_workers // _NUM_WORKERS

    def name(self, num_workers: int) -> str:
        """Return the name in the table."""
        num_prefill = self.num_prefill_of(num_workers)
        parts = [
            f"{num_prefill} + {num_workers - num_prefill}"
            if num_prefill
            else f"{num_workers} mixed"
        ]
        if self.chunk_tokens != _CHUNK_TOKENS:
            parts.append(f"chunks of {self.chunk_tokens}")
        if self.link_bytes_per_s != _FAST_LINK:
            parts.append(f"{self.link_bytes_per_s / 1e9:g} GB/s")
        if self.switches:
            parts.append("switching")
        return ", ".join(parts)


class Case(NamedTuple):
    """Fleet of ``num_workers`` under one rate.

    Fleets that switch roles have the load for at least ``warm_up_s`` before the window.
    """

    load: Load
    fleet: Fleet
    rate_per_s: float
    window_s: float
    num_workers: int
    warm_up_s: float = _WARM_UP_S


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one fleet under one rate.

    They cover the requests of the window, except ``itl_ms_p99``, the moves, the switches and the
    utilisation by initial role, which cover the whole run. ``goodput`` is the share within the
    limits, ``goodput_per_s`` that share of the offered rate.
    """

    load: str
    fleet: str
    rate_per_s: float
    num_requests: int
    ttft_ms_p50: float
    ttft_ms_p99: float
    tpot_ms_p50: float
    tpot_ms_p99: float
    itl_ms_p99: float
    goodput: float
    goodput_per_s: float
    roles_switched: int
    streams_moved: int
    tokens_pulled: int
    utilisation: dict[WorkerRole, float]
    took_s: float


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All results."""

    device: dict[str, object]
    loads: tuple[Load, ...]
    rows: tuple[Row, ...]


LOADS = (
    Load(
        name="chat",
        input_tokens="lognormal:220:1.1:4000",
        output_tokens="lognormal:200:0.8:1000",
        mean_context=300,
        rates_per_s=(600.0, 1_200.0, 1_800.0),
        window_s=6.0,
        slo=Slo(ttft_ms=1_000.0, tpot_ms=40.0),
    ),
    Load(
        name="long",
        input_tokens="8192",
        output_tokens="lognormal:200:0.8:1000",
        mean_context=4_096,
        rates_per_s=(15.0, 30.0, 45.0, 60.0, 75.0),
        window_s=12.0,
        slo=Slo(ttft_ms=4_000.0, tpot_ms=40.0),
    ),
)
FLEETS = (
    Fleet(0),
    Fleet(0, 512),
    Fleet(32),
    Fleet(64),
    Fleet(96),
    Fleet(64, _CHUNK_TOKENS, _TCP_LINK),
    Fleet(32, switches=True),
    Fleet(64, switches=True),
    Fleet(96, switches=True),
)


def _kv_bytes_per_token() -> int:
    """Return the bytes of keys and values of all layers, in fp8."""
    return 2 * _LAYERS * _KV_WIDTH


def _simulation_of(mean_context: int) -> SimulationConfig:
    """Return the step times of one H200 for a mean context of a prompt's tokens.

    A step reads the weights and the KV cache. Prompts are bound by products: 2 FLOP per parameter
    and token, and 4 per layer, number and attended token. The time that a sequence adds is
    interpolated from a step of one sequence, bound by reads, to a step of all slots, bound by
    products if these take longer.
    """
    bytes_per_s, flop_per_s = _BYTES_PER_S * _BANDWIDTH_SHARE, _FP8_FLOP_PER_S * _FLOP_SHARE
    num_read = _PARAMETERS - _EMBEDDING
    read_ms = num_read / bytes_per_s * 1e3
    full_ms = _NUM_SLOTS * 2 * num_read / flop_per_s * 1e3
    token_flop = 2 * num_read + 4 * _LAYERS * _WIDTH * mean_context
    return SimulationConfig(
        prefill_tokens_per_s=flop_per_s / token_flop,
        step_ms=read_ms,
        step_ms_per_sequence=max(full_ms - read_ms, 0.0) / _NUM_SLOTS,
        step_ms_per_kv_token=_kv_bytes_per_token() / bytes_per_s * 1e3,
    )


def _num_blocks() -> int:
    """Return the number of KV cache blocks in the memory left by the weights."""
    free_bytes = _MEMORY_BYTES * _MEMORY_SHARE - _PARAMETERS
    return int(free_bytes / (_kv_bytes_per_token() * _BLOCK_TOKENS))


def settings_for(load: Load, fleet: Fleet, num_workers: int) -> SimulationSettings:
    """Return settings for ``num_workers`` in the fleet's proportion."""
    num_prefill = fleet.num_prefill_of(num_workers)
    engine = EngineConfig(
        kind=EngineKind.SIMULATED,
        simulation=_simulation_of(load.mean_context),
        max_num_sequences=_NUM_SLOTS,
        max_batch_tokens=fleet.chunk_tokens,
        num_blocks=_num_blocks(),
        block_size_tokens=_BLOCK_TOKENS,
    )
    roles: tuple[WorkerRole, ...] = ()
    if num_prefill:
        num_decode = num_workers - num_prefill
        roles = (WorkerRole.PREFILL,) * num_prefill + (WorkerRole.DECODE,) * num_decode
    return SimulationSettings(
        config=Config(
            nats=NatsConfig(ack_wait_s=120.0),
            scheduler=SchedulerConfig(lease_extend_s=40.0, switch_roles=fleet.switches),
            worker=WorkerConfig(
                heartbeat_s=0.5, lease_extend_s=40.0, prefix_report_s=0.5, engine=engine
            ),
        ),
        num_workers={"": num_workers},
        roles=roles,
        link=KvLink(bytes_per_token=_kv_bytes_per_token(), bytes_per_s=fleet.link_bytes_per_s),
        drain_s=600.0,
        slo=load.slo,
    )


def trace_of(
    load: Load, rate_per_s: float, window_s: float, warm_up_s: float
) -> list[TraceRequest]:
    """Return the requests of the window, with as much load after it and ``warm_up_s`` before it."""
    return synthesise(
        TraceRecipe(
            kind=TraceKind.POISSON,
            rate_per_s=rate_per_s,
            duration_s=warm_up_s + 2 * window_s,
            tenants=(TenantShare(name="t1"),),
            input_tokens=parse_spread(load.input_tokens),
            output_tokens=parse_spread(load.output_tokens),
            max_tokens=1_000,
            seed=_SEED,
        )
    )


def run_case(case: Case) -> Row:
    """Run a case in a process of its own."""
    logging.disable(logging.CRITICAL)  # refusals are counted in the figures
    gc.set_threshold(50_000, 50, 100)
    load, fleet, rate_per_s, window_s, num_workers, warm_up_s = case
    settings = settings_for(load, fleet, num_workers)
    begins_s = max(warm_up_s, window_s) if fleet.switches else window_s
    trace = trace_of(load, rate_per_s, window_s, begins_s)
    begun_s = time.perf_counter()
    result = simulate(trace, settings, parse_policies("fair")[0])
    took_s = time.perf_counter() - begun_s
    within = [
        outcome
        for outcome in result.outcomes
        if begins_s <= outcome.request.at_s < begins_s + window_s
    ]
    report = policy_report("fair", replace(result, outcomes=within), settings)
    goodput = report.overall.goodput or 0.0
    return Row(
        load=load.name,
        fleet=fleet.name(num_workers),
        rate_per_s=rate_per_s,
        num_requests=report.overall.num_requests,
        ttft_ms_p50=_at(report.overall.ttft_ms, "p50"),
        ttft_ms_p99=_at(report.overall.ttft_ms, "p99"),
        tpot_ms_p50=_at(report.overall.tpot_ms, "p50"),
        tpot_ms_p99=_at(report.overall.tpot_ms, "p99"),
        itl_ms_p99=_at(report.itl_ms, "p99"),
        goodput=round(goodput, 4),
        goodput_per_s=round(goodput * report.overall.num_requests / window_s, 2),
        roles_switched=report.num_role_changes,
        streams_moved=sum(report.streams_moved.values()),
        tokens_pulled=report.num_pulled_tokens,
        utilisation={role: round(share, 3) for role, share in report.utilisation_by_role.items()},
        took_s=round(took_s, 1),
    )


def _at(of: Percentiles | None, share: str) -> float:
    return 0.0 if of is None else round(float(getattr(of, share)), 1)


def _device() -> dict[str, object]:
    """Return the derived parameters of a worker, and of prompts by load."""
    simulations = {load.name: _simulation_of(load.mean_context) for load in LOADS}
    first = next(iter(simulations.values()))
    return {
        "name": "H200 SXM, Llama 70B in fp8, KV cache in fp8; derived, not measured",
        "step_ms": first.step_ms,
        "step_ms_per_sequence": first.step_ms_per_sequence,
        "step_ms_per_kv_token": first.step_ms_per_kv_token,
        "prefill_tokens_per_s": {
            name: simulation.prefill_tokens_per_s for name, simulation in simulations.items()
        },
        "num_blocks": _num_blocks(),
        "kv_bytes_per_token": _kv_bytes_per_token(),
        "link_bytes_per_s": _FAST_LINK,
        "bandwidth_share": _BANDWIDTH_SHARE,
        "flop_share": _FLOP_SHARE,
    }


def _line(row: Row) -> str:
    used = " ".join(f"{role} {share:.0%}" for role, share in row.utilisation.items())
    return (
        f"{row.load:<5} {row.rate_per_s:>6g}/s  {row.fleet:<22} good {row.goodput_per_s:>8,.1f}/s "
        f"({row.goodput:>6.1%})  TTFT {row.ttft_ms_p50:>7,.0f} {row.ttft_ms_p99:>8,.0f}  "
        f"TPOT {row.tpot_ms_p50:>5.1f} {row.tpot_ms_p99:>6.1f}  ITL p99 {row.itl_ms_p99:>6.1f}  "
        f"moved {row.streams_moved:>6,}  switched {row.roles_switched:>3}  {used}  "
        f"({row.took_s:.0f} s)"
    )


def run(
    only: Literal["chat", "long"] | None = None,
    rates: str | None = None,
    fleets: str | None = None,
    window: float | None = None,
    jobs: int = 1,
    smoke: bool = False,
) -> PartResult:
    """Run the fleets.

    ``rates`` (comma-separated) and ``window`` replace a load's own; ``fleets`` are names separated
    by semicolons; ``jobs`` is the number of processes.
    """
    loads = [load for load in LOADS if only in (None, load.name)]
    print(json.dumps(_device()), flush=True)
    cases = [
        Case(load, fleet, rate_per_s, window or load.window_s, _NUM_WORKERS)
        for load in loads
        for rate_per_s in _rates(load, rates)
        for fleet in _fleets(fleets)
    ]
    if smoke:
        cases = [
            Case(load, fleet, load.rates_per_s[0] / 4, 1.0, 16, warm_up_s=1.0)
            for load in loads
            for fleet in _fleets(fleets)
        ]
    rows: list[Row] = []
    with ProcessPoolExecutor(jobs) as processes:
        for row in processes.map(run_case, cases):
            rows.append(row)
            print(_line(row), flush=True)
    return PartResult(Results(device=_device(), loads=tuple(loads), rows=tuple(rows)))


def _fleets(given: str | None) -> list[Fleet]:
    """Return all fleets, or the named ones. Raises SystemExit for an unknown name."""
    by_name = {fleet.name(_NUM_WORKERS): fleet for fleet in FLEETS}
    if given is None:
        return list(by_name.values())
    names = [name.strip() for name in given.split(";")]
    if unknown := set(names) - by_name.keys():
        raise SystemExit(f"--fleets: no {'; '.join(unknown)}; there are {'; '.join(by_name)}")
    return [by_name[name] for name in names]


def _rates(load: Load, given: str | None) -> tuple[float, ...]:
    return load.rates_per_s if given is None else tuple(map(float, given.split(",")))


if __name__ == "__main__":
    raise SystemExit(run_command("simulated_roles", run, __doc__))

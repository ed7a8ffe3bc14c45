"""Traces and settings of ``millrace simulate``, small enough to be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from millrace.schemas.config import (
    Config,
    EngineConfig,
    NatsConfig,
    SchedulerConfig,
    SimulationConfig,
    WorkerConfig,
)
from millrace.schemas.engines import EngineKind
from millrace.simulation.report.measure import policy_report
from millrace.simulation.report.report import PolicyReport
from millrace.simulation.settings import SimulationSettings, parse_policies
from millrace.simulation.traces.trace import TraceRequest
from millrace.simulation.world import Result, simulate

SIMULATION = SimulationConfig(
    prefill_tokens_per_s=1_000.0,
    step_ms=10.0,
    step_ms_per_sequence=0.0,
    step_ms_per_kv_token=0.0,
)


def make_settings(
    num_workers: int = 2, slots: int = 4, waiting: int = 0, **changes: Any
) -> SimulationSettings:
    engine = EngineConfig(
        kind=EngineKind.SIMULATED,
        simulation=changes.pop("simulation", SIMULATION),
        max_num_sequences=slots,
        max_batch_tokens=4_096,
        num_blocks=changes.pop("num_blocks", 2_000),
    )
    scheduler = changes.pop("scheduler", SchedulerConfig())
    config = Config(
        nats=NatsConfig(ack_wait_s=120.0),
        scheduler=msgspec.structs.replace(scheduler, lease_extend_s=40.0),
        worker=WorkerConfig(
            heartbeat_s=1.0,
            lease_extend_s=40.0,
            prefix_report_s=1.0,
            max_num_waiting=waiting,
            engine=engine,
        ),
    )
    return SimulationSettings(config=config, num_workers={"": num_workers}, **changes)


def run_trace(
    trace: Sequence[TraceRequest], settings: SimulationSettings, policy: str = "fair"
) -> Result:
    return simulate(trace, settings, parse_policies(policy)[0])


def report_trace(
    trace: Sequence[TraceRequest], settings: SimulationSettings, policy: str = "fair"
) -> PolicyReport:
    return policy_report(policy, run_trace(trace, settings, policy), settings)


def make_request(at_s: float, **changes: Any) -> TraceRequest:
    fields: dict[str, Any] = {"at_s": at_s, "prompt_tokens": 100, "output_tokens": 11} | changes
    return TraceRequest(**fields)


def make_load(count: int, gap_s: float, **changes: Any) -> list[TraceRequest]:
    return [make_request(number * gap_s, **changes) for number in range(count)]

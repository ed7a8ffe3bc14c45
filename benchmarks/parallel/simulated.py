"""The same steps by ``millrace simulate``."""

from __future__ import annotations

import msgspec

from benchmarks.parallel.formulas import (
    H200,
    NUMBER_BYTES,
    Device,
    Group,
    kv_tokens,
    step_of,
)
from millrace.schemas.config import (
    Config,
    EngineConfig,
    NatsConfig,
    SchedulerConfig,
    SimulationConfig,
    WorkerConfig,
)
from millrace.schemas.engines import EngineKind
from millrace.simulation.collectives import GroupLink, ModelShape, collective_times
from millrace.simulation.policies import parse_policies
from millrace.simulation.report.measure import policy_report
from millrace.simulation.settings import Settings
from millrace.simulation.traces.trace import TraceRequest
from millrace.simulation.world import simulate

# A request makes so many tokens, around the middle of which its context is as told.
_NUM_TOKENS = 128
_BLOCK_TOKENS = 16
MOST_SLOTS = 256


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """The same step by ``millrace simulate``, of a worker with as many slots, and with the most."""

    batch: int
    context: int
    derived_ms: float
    simulated_ms: float
    with_most_slots_ms: float


def simulated(group: Group, batch: int, context: int) -> Simulated:
    """Of a group of one stage."""
    return Simulated(
        batch=batch,
        context=context,
        derived_ms=step_of(group, batch, context).tpot_ms,
        simulated_ms=_simulated_ms(group, batch, context, num_slots=batch),
        with_most_slots_ms=_simulated_ms(group, batch, context, num_slots=MOST_SLOTS),
    )


def _simulated_ms(group: Group, batch: int, context: int, num_slots: int) -> float:
    """The TPOT of so many requests that come together, whose prompts take one step."""
    prompt_tokens = context - _NUM_TOKENS // 2
    engine = EngineConfig(
        kind=EngineKind.SIMULATED,
        tensor_parallel=group.num_ranks,
        simulation=simulation_of(group, num_slots),
        max_num_sequences=num_slots,
        max_batch_tokens=MOST_SLOTS * context,
        num_blocks=kv_tokens(group) // _BLOCK_TOKENS,
        block_size_tokens=_BLOCK_TOKENS,
    )
    settings = Settings(
        config=Config(
            nats=NatsConfig(ack_wait_s=120.0),
            scheduler=SchedulerConfig(lease_extend_s=40.0),
            worker=WorkerConfig(lease_extend_s=40.0, max_num_waiting=batch, engine=engine),
        ),
        num_workers={"": 1},
    )
    trace = [
        TraceRequest(at_s=0.0, prompt_tokens=prompt_tokens, output_tokens=_NUM_TOKENS)
        for _ in range(batch)
    ]
    report = policy_report("fair", simulate(trace, settings, parse_policies("fair")[0]), settings)
    assert report.overall.tpot_ms is not None, "every request is answered"
    return report.overall.tpot_ms.p50


def simulation_of(group: Group, num_slots: int, device: Device = H200) -> SimulationConfig:
    """As ``benchmarks.simulated_roles`` has it, of one device: a step reads weights and KV cache,
    and what a sequence adds is the line from a step of one to one of all slots, which is bound by
    products where these take longer. What is exchanged follows from the shape."""
    model = group.model
    parameters = model.num_layers * model.layer_parameters + model.head_parameters
    read_ms = parameters * NUMBER_BYTES / device.bytes_per_s * 1e3
    full_ms = num_slots * 2 * parameters / device.flop_per_s * 1e3
    shape = ModelShape(
        num_layers=model.num_layers, hidden_size=model.hidden_size, vocab_size=model.vocab_size
    )
    link = GroupLink(bytes_per_s=device.nvlink_bytes_per_s)
    return SimulationConfig(
        # Prompts are not looked at here, and take next to nothing.
        prefill_tokens_per_s=1e9,
        step_ms=read_ms,
        step_ms_per_sequence=max(full_ms - read_ms, 0.0) / num_slots,
        step_ms_per_kv_token=model.kv_bytes_per_token / device.bytes_per_s * 1e3,
        **msgspec.structs.asdict(collective_times(shape, link, group.num_ranks)),
    )

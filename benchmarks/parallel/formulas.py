"""What a step takes, in formulas: those of docs/parallel-steps.md."""

from __future__ import annotations

from typing import NamedTuple

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
from millrace.simulation.collectives import GroupLink, ModelShape, collective_times
from millrace.simulation.report.measure import policy_report
from millrace.simulation.settings import SimulationSettings, parse_policies
from millrace.simulation.traces.trace import TraceRequest
from millrace.simulation.world import simulate

# Weights, hidden states, keys and values, in bfloat16.
NUMBER_BYTES = 2
TPOT_MS = 40.0


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """What one device reaches: bytes it reads and products it computes in a second; and what others
    of its host and a device of another host get from it, and what an exchange takes besides."""

    name: str = "H200 SXM"
    bytes_per_s: float = 4.3e12
    flop_per_s: float = 788e12
    memory_bytes: float = 141e9
    memory_share: float = 0.9
    nvlink_bytes_per_s: float = 450e9
    network_bytes_per_s: float = 50e9
    # NCCL's model: baseLatencies and hwLatencies of src/graph/tuning.cc, v2.30.7. A ring in one
    # host by the protocol LL, and what passes between hosts by Simple.
    ring_base_s: float = 6.6e-6
    ring_hop_s: float = 0.6e-6
    network_s: float = 8.4e-6 + 14.0e-6


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A dense Llama."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int = 128_256

    @property
    def layer_parameters(self) -> int:
        """Of the linear maps: queries and outputs, keys and values, the MLP."""
        heads = 2 * self.hidden_size * self.num_heads * self.head_size
        kv_heads = 2 * self.hidden_size * self.num_kv_heads * self.head_size
        return heads + kv_heads + 3 * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """With the table of embeddings, of which a step reads a row a token."""
        return self.num_layers * self.layer_parameters + 2 * self.head_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * NUMBER_BYTES


class Group(NamedTuple):
    """``num_ranks`` devices compute each layer of a stage together, ``num_stages`` one behind the
    other, of as many layers each."""

    model: Model
    num_ranks: int
    num_stages: int

    @property
    def num_devices(self) -> int:
        return self.num_ranks * self.num_stages

    @property
    def name(self) -> str:
        stages = f", PP {self.num_stages}" if self.num_stages > 1 else ""
        return f"{self.model.name}, TP {self.num_ranks}{stages}"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One token of each sequence of a batch: ``tpot_ms`` in all, of which reading or multiplying
    the weights, reading the KV cache, and exchanging."""

    group: str
    batch: int
    context: int
    weights_ms: float
    kv_ms: float
    exchange_ms: float
    tpot_ms: float


class Largest(msgspec.Struct, frozen=True, kw_only=True):
    """The largest batch within the limit, and what keeps it from growing."""

    group: str
    context: int
    step: Step
    bound: str
    tokens_per_s_per_device: float


class HeadGather(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes to bring the logits of a batch together, or the candidates that could be chosen
    from in their place where requests allow no others; and the part of the step between them."""

    group: str
    batch: int
    logits_us: float
    candidates_us: float
    saved_share: float


H200 = Device()
LLAMA_70B = Model(
    name="70B",
    num_layers=80,
    hidden_size=8_192,
    num_heads=64,
    num_kv_heads=8,
    head_size=128,
    intermediate_size=28_672,
)
LLAMA_405B = Model(
    name="405B",
    num_layers=126,
    hidden_size=16_384,
    num_heads=128,
    num_kv_heads=8,
    head_size=128,
    intermediate_size=53_248,
)
# As many as the largest ``top_k`` that is usual.
NUM_CANDIDATES = 64
GROUPS = (Group(LLAMA_70B, 4, 1), Group(LLAMA_405B, 8, 2))


# --- the formulas, in seconds ---


class Parts(NamedTuple):
    """Of a stage's time: what its weights take, its KV cache, what it exchanges."""

    weights_s: float
    kv_s: float
    exchange_s: float

    @property
    def total_s(self) -> float:
        return self.weights_s + self.kv_s + self.exchange_s


def step_of(group: Group, batch: int, context: int, device: Device = H200) -> Step:
    """Of a batch whose sequences attend to ``context`` tokens each. It is cut into as many parts as
    there are stages, each of which has one of them to compute: a token takes a part through all of
    them and back, or as long as the slowest takes for all parts."""
    num_parts = min(group.num_stages, batch)
    rows = -(-batch // num_parts)
    stages = [_stage(group, stage, rows, context, device) for stage in range(group.num_stages)]
    hops_s = _hops_s(group, rows, device)
    through_s = sum(stage.total_s for stage in stages) + hops_s
    slowest_s = max(stage.total_s for stage in stages)
    return Step(
        group=group.name,
        batch=batch,
        context=context,
        weights_ms=sum(stage.weights_s for stage in stages) * 1e3,
        kv_ms=sum(stage.kv_s for stage in stages) * 1e3,
        exchange_ms=(sum(stage.exchange_s for stage in stages) + hops_s) * 1e3,
        tpot_ms=max(through_s, num_parts * slowest_s) * 1e3,
    )


def head_gather(group: Group, batch: int, context: int, device: Device = H200) -> HeadGather:
    """Of each row and rank ``NUM_CANDIDATES`` with a number and a logit each, as 2 and 4 bytes, in
    place of all logits."""
    logits_s = _all_gather_s(group, batch * group.model.vocab_size, device)
    numbers = batch * group.num_ranks * NUM_CANDIDATES * 3
    candidates_s = _all_gather_s(group, numbers, device)
    return HeadGather(
        group=group.name,
        batch=batch,
        logits_us=logits_s * 1e6,
        candidates_us=candidates_s * 1e6,
        saved_share=(logits_s - candidates_s)
        * 1e3
        / step_of(group, batch, context, device).tpot_ms,
    )


def _stage(group: Group, stage: int, rows: int, context: int, device: Device) -> Parts:
    """Of ``rows`` tokens; the last one has the head, too."""
    model, ranks = group.model, group.num_ranks
    num_layers = model.num_layers / group.num_stages
    parameters = num_layers * model.layer_parameters
    exchange_s = 2 * num_layers * _all_reduce_s(group, rows, device)
    if stage == group.num_stages - 1:
        parameters += model.head_parameters
        exchange_s += _all_gather_s(group, rows * model.vocab_size, device)
    read_s = parameters * NUMBER_BYTES / ranks / device.bytes_per_s
    products_s = 2 * parameters * rows / ranks / device.flop_per_s
    kv_bytes = rows * context * model.kv_bytes_per_token / group.num_devices
    attention_flop = 4 * num_layers * model.num_heads * model.head_size * rows * context / ranks
    return Parts(
        weights_s=max(read_s, products_s),
        kv_s=max(kv_bytes / device.bytes_per_s, attention_flop / device.flop_per_s),
        exchange_s=exchange_s,
    )


def _all_reduce_s(group: Group, rows: int, device: Device) -> float:
    """Of hidden states, by a ring: each rank sends its part of the sums twice to all others."""
    others = group.num_ranks - 1
    latency_s = device.ring_base_s + 2 * others * device.ring_hop_s
    num_bytes = rows * group.model.hidden_size * NUMBER_BYTES
    return latency_s + 2 * others / group.num_ranks * num_bytes / device.nvlink_bytes_per_s


def _all_gather_s(group: Group, num_numbers: int, device: Device) -> float:
    others = group.num_ranks - 1
    latency_s = device.ring_base_s + others * device.ring_hop_s
    num_bytes = num_numbers * NUMBER_BYTES
    return latency_s + others / group.num_ranks * num_bytes / device.nvlink_bytes_per_s


def _hops_s(group: Group, rows: int, device: Device) -> float:
    """Hidden states to each next stage, each rank its slice to its counterpart, gathered there; and
    the tokens back to the first."""
    if group.num_stages == 1:
        return 0.0
    num_numbers = rows * group.model.hidden_size
    slice_s = num_numbers * NUMBER_BYTES / group.num_ranks / device.network_bytes_per_s
    hop_s = device.network_s + slice_s + _all_gather_s(group, num_numbers, device)
    return (group.num_stages - 1) * hop_s + device.network_s


def kv_tokens(group: Group, device: Device = H200) -> int:
    """What fits into the memory that weights leave."""
    weight_bytes = group.model.num_parameters * NUMBER_BYTES / group.num_devices
    free_bytes = device.memory_bytes * device.memory_share - weight_bytes
    return int(free_bytes / (group.model.kv_bytes_per_token / group.num_devices))


def largest(group: Group, context: int, tpot_ms: float = TPOT_MS) -> Largest:
    """By the limit of TPOT and by memory."""
    most = kv_tokens(group) // context
    batch = next(
        batch for batch in range(most, 0, -1) if step_of(group, batch, context).tpot_ms <= tpot_ms
    )
    step = step_of(group, batch, context)
    return Largest(
        group=group.name,
        context=context,
        step=step,
        bound="memory" if batch == most else "TPOT",
        tokens_per_s_per_device=batch / step.tpot_ms * 1e3 / group.num_devices,
    )


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
    settings = SimulationSettings(
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

"""Formulas of a step's time, from docs/parallel-steps.md."""

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

# Bytes of a weight, a hidden state, a key or a value, in bfloat16.
NUMBER_BYTES = 2
LOGIT_BYTES, TOKEN_BYTES = 4, 4
TPOT_MS = 40.0


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of one device.

    They are the bytes that it reads and the products that it computes per second, the rates to
    other devices of its host and to other hosts, and the latency of an exchange.
    """

    name: str = "H200 SXM"
    bytes_per_s: float = 4.3e12
    flop_per_s: float = 788e12
    memory_bytes: float = 141e9
    memory_share: float = 0.9
    nvlink_bytes_per_s: float = 450e9
    network_bytes_per_s: float = 50e9
    # NCCL's model: baseLatencies and hwLatencies of src/graph/tuning.cc, v2.30.7. A ring in one
    # host uses the protocol LL, and exchanges between hosts use Simple.
    ring_base_s: float = 6.6e-6
    ring_hop_s: float = 0.6e-6
    network_s: float = 8.4e-6 + 14.0e-6


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Dense Llama."""

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
        """Parameters of a layer's linear maps: queries and outputs, keys and values, the MLP."""
        heads = 2 * self.hidden_size * self.num_heads * self.head_size
        kv_heads = 2 * self.hidden_size * self.num_kv_heads * self.head_size
        return heads + kv_heads + 3 * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Number of parameters, including the embedding, of which a step reads a row per token."""
        return self.num_layers * self.layer_parameters + 2 * self.head_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * NUMBER_BYTES


class Group(NamedTuple):
    """Group of devices: ``num_ranks`` compute each layer together, in ``num_stages`` stages.

    The stages follow each other and have equally many layers.
    """

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
    """Step of one token per sequence of a batch.

    ``tpot_ms`` is the total. The other figures are its parts: weights, KV cache, and exchanges.
    """

    group: str
    batch: int
    context: int
    weights_ms: float
    kv_ms: float
    exchange_ms: float
    tpot_ms: float


class Largest(msgspec.Struct, frozen=True, kw_only=True):
    """Largest batch within the limit, and its limiting factor."""

    group: str
    context: int
    step: Step
    bound: str
    tokens_per_s_per_device: float


class HeadGather(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of gathering a batch's logits.

    ``candidates_us`` gathers only the candidates, which suffices for requests that allow no other
    tokens. ``saved_share`` is the difference as a share of the step.
    """

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
# As many candidates as the largest usual ``top_k``.
NUM_CANDIDATES = 64
GROUPS = (Group(LLAMA_70B, 4, 1), Group(LLAMA_405B, 8, 2))


# --- formulas, in seconds ---


class Parts(NamedTuple):
    """Parts of a stage's time: weights, KV cache, exchanges."""

    weights_s: float
    kv_s: float
    exchange_s: float

    @property
    def total_s(self) -> float:
        return self.weights_s + self.kv_s + self.exchange_s


def step_of(group: Group, batch: int, context: int, device: Device = H200) -> Step:
    """Return the step of a batch whose sequences attend to ``context`` tokens each.

    The batch is cut into as many parts as there are stages. A token takes the time of a part
    through all stages and back, or the time of the slowest stage for all parts, if that is longer.
    """
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
    """Return the cost of a gather of all logits, and of candidates.

    Of each row and rank, ``NUM_CANDIDATES`` candidates have a token and a logit each, in place of
    all logits.
    """
    logits_s = _all_gather_s(group, batch * group.model.vocab_size * LOGIT_BYTES, device)
    num_candidates = batch * group.num_ranks * NUM_CANDIDATES
    candidates_s = _all_gather_s(group, num_candidates * (LOGIT_BYTES + TOKEN_BYTES), device)
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
    """Return the parts of a stage for ``rows`` tokens; the last stage also has the head."""
    model, ranks = group.model, group.num_ranks
    num_layers = model.num_layers / group.num_stages
    parameters = num_layers * model.layer_parameters
    exchange_s = 2 * num_layers * _all_reduce_s(group, rows, device)
    if stage == group.num_stages - 1:
        parameters += model.head_parameters
        exchange_s += _all_gather_s(group, rows * model.vocab_size * LOGIT_BYTES, device)
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
    """Return the time of a ring all-reduce of hidden states.

    Each rank sends its part of the sums twice to all others.
    """
    others = group.num_ranks - 1
    latency_s = device.ring_base_s + 2 * others * device.ring_hop_s
    num_bytes = rows * group.model.hidden_size * NUMBER_BYTES
    return latency_s + 2 * others / group.num_ranks * num_bytes / device.nvlink_bytes_per_s


def _all_gather_s(group: Group, num_bytes: int, device: Device) -> float:
    others = group.num_ranks - 1
    latency_s = device.ring_base_s + others * device.ring_hop_s
    return latency_s + others / group.num_ranks * num_bytes / device.nvlink_bytes_per_s


def _hops_s(group: Group, rows: int, device: Device) -> float:
    """Return the time of the hops between stages.

    Each rank sends its slice of the hidden states to its counterpart in the next stage, which
    gathers them. Tokens go back to the first stage.
    """
    if group.num_stages == 1:
        return 0.0
    num_bytes = rows * group.model.hidden_size * NUMBER_BYTES
    slice_s = num_bytes / group.num_ranks / device.network_bytes_per_s
    hop_s = device.network_s + slice_s + _all_gather_s(group, num_bytes, device)
    return (group.num_stages - 1) * hop_s + device.network_s


def kv_tokens(group: Group, device: Device = H200) -> int:
    """Return the KV tokens that fit into the memory left by the weights."""
    weight_bytes = group.model.num_parameters * NUMBER_BYTES / group.num_devices
    free_bytes = device.memory_bytes * device.memory_share - weight_bytes
    return int(free_bytes / (group.model.kv_bytes_per_token / group.num_devices))


def largest(group: Group, context: int, tpot_ms: float = TPOT_MS) -> Largest:
    """Return the largest batch within the limit of TPOT and within memory."""
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


# Tokens of a request; in the middle of them its context has the given length.
_NUM_TOKENS = 128
_BLOCK_TOKENS = 16
MOST_SLOTS = 256


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """Same step by ``millrace simulate``, for a worker with as many slots, and with the maximum."""

    batch: int
    context: int
    derived_ms: float
    simulated_ms: float
    with_most_slots_ms: float


def simulated(group: Group, batch: int, context: int) -> Simulated:
    """Simulate a group of one stage."""
    return Simulated(
        batch=batch,
        context=context,
        derived_ms=step_of(group, batch, context).tpot_ms,
        simulated_ms=_simulated_ms(group, batch, context, num_slots=batch),
        with_most_slots_ms=_simulated_ms(group, batch, context, num_slots=MOST_SLOTS),
    )


def _simulated_ms(group: Group, batch: int, context: int, num_slots: int) -> float:
    """Return the TPOT of ``batch`` simultaneous requests, whose prompts take one step."""
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
    """Return the simulation of one device, as in ``benchmarks.simulated_roles``.

    A step reads weights and KV cache. The time that a sequence adds is interpolated from a step of
    one sequence to a step of all slots, which is bound by products if these take longer. The
    exchanges follow from the shape.
    """
    model = group.model
    parameters = model.num_layers * model.layer_parameters + model.head_parameters
    read_ms = parameters * NUMBER_BYTES / device.bytes_per_s * 1e3
    full_ms = num_slots * 2 * parameters / device.flop_per_s * 1e3
    shape = ModelShape(
        num_layers=model.num_layers, hidden_size=model.hidden_size, vocab_size=model.vocab_size
    )
    link = GroupLink(bytes_per_s=device.nvlink_bytes_per_s)
    return SimulationConfig(
        # Prompts are not measured and take almost no time.
        prefill_tokens_per_s=1e9,
        step_ms=read_ms,
        step_ms_per_sequence=max(full_ms - read_ms, 0.0) / num_slots,
        step_ms_per_kv_token=model.kv_bytes_per_token / device.bytes_per_s * 1e3,
        **msgspec.structs.asdict(collective_times(shape, link, group.num_ranks)),
    )

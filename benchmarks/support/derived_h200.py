"""What an H200 with a Llama 70B in fp8 is taken to do: derived, as no GPU was measured."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from millrace.schemas.config import SimulationConfig

# NVIDIA's data sheet of an H200 SXM, dense, and how much of it is taken to be reached.
_BYTES_PER_S, _FP8_FLOP_PER_S, _MEMORY_BYTES = 4.8e12, 1_979e12, 141e9
_BANDWIDTH_SHARE, _FLOP_SHARE, _MEMORY_SHARE = 0.8, 0.5, 0.9
# The shape of a Llama 3 70B; a step reads all but the table of embeddings.
_PARAMETERS, _EMBEDDING = 70.55e9, 128_256 * 8_192
_LAYERS, _WIDTH, _KV_WIDTH = 80, 8_192, 8 * 128
NUM_SLOTS, BLOCK_TOKENS = 256, 16


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is taken to do, all of it derived, of prompts by load."""

    name: str
    step_ms: float
    step_ms_per_sequence: float
    step_ms_per_kv_token: float
    prefill_tokens_per_s: dict[str, float]
    num_blocks: int
    kv_bytes_per_token: int
    link_bytes_per_s: float
    bandwidth_share: float
    flop_share: float


def kv_bytes_per_token() -> int:
    """Keys and values of all layers, in fp8."""
    return 2 * _LAYERS * _KV_WIDTH


def simulation_of(mean_context: int) -> SimulationConfig:
    """What steps take of one H200, where a token of a prompt attends to so many in the mean. A step
    reads the weights and the KV cache; prompts are bound by products, 2 FLOP a parameter and token,
    and 4 a layer, number and token attended to. What a sequence adds is the line from a step of
    one, which is bound by reading, to one of all slots, which is bound by products where these take
    longer."""
    bytes_per_s, flop_per_s = _BYTES_PER_S * _BANDWIDTH_SHARE, _FP8_FLOP_PER_S * _FLOP_SHARE
    num_read = _PARAMETERS - _EMBEDDING
    read_ms = num_read / bytes_per_s * 1e3
    full_ms = NUM_SLOTS * 2 * num_read / flop_per_s * 1e3
    token_flop = 2 * num_read + 4 * _LAYERS * _WIDTH * mean_context
    return SimulationConfig(
        prefill_tokens_per_s=flop_per_s / token_flop,
        step_ms=read_ms,
        step_ms_per_sequence=max(full_ms - read_ms, 0.0) / NUM_SLOTS,
        step_ms_per_kv_token=kv_bytes_per_token() / bytes_per_s * 1e3,
    )


def num_blocks() -> int:
    """Of the KV cache, in what the weights leave of the memory."""
    free_bytes = _MEMORY_BYTES * _MEMORY_SHARE - _PARAMETERS
    return int(free_bytes / (kv_bytes_per_token() * BLOCK_TOKENS))


def device_of(mean_contexts: Mapping[str, int], link_bytes_per_s: float) -> Device:
    """All of it, for loads whose prompts have such contexts."""
    simulations = {name: simulation_of(context) for name, context in mean_contexts.items()}
    first = next(iter(simulations.values()))
    return Device(
        name="H200 SXM, Llama 70B in fp8, KV cache in fp8; derived, not measured",
        step_ms=first.step_ms,
        step_ms_per_sequence=first.step_ms_per_sequence,
        step_ms_per_kv_token=first.step_ms_per_kv_token,
        prefill_tokens_per_s={
            name: simulation.prefill_tokens_per_s for name, simulation in simulations.items()
        },
        num_blocks=num_blocks(),
        kv_bytes_per_token=kv_bytes_per_token(),
        link_bytes_per_s=link_bytes_per_s,
        bandwidth_share=_BANDWIDTH_SHARE,
        flop_share=_FLOP_SHARE,
    )

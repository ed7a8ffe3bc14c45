"""What the devices of a group take to exchange what they have computed."""

from __future__ import annotations

import msgspec

# Hidden states and logits are exchanged in 16 bits.
_NUMBER_BYTES = 2
# NCCL's own model of a ring within one host, in seconds: what any collective takes, and each step
# of the ring (baseLatencies and hwLatencies of src/graph/tuning.cc, v2.30.7, protocol LL, NVLink).
_NCCL_BASE_S, _NCCL_HOP_S = 6.6e-6, 0.6e-6


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What decides how much is exchanged; by default a Llama 8B's."""

    num_layers: int = 32
    hidden_size: int = 4_096
    vocab_size: int = 128_256


class GroupLink(msgspec.Struct, frozen=True, kw_only=True):
    """What a device sends to the others of its group, and gets, in a second: by default what
    NVLink 4 carries each way. ``latency_s`` is what an exchange takes beside its bytes; None: as
    NCCL takes it to be."""

    bytes_per_s: float = 450e9
    latency_s: float | None = None

    def latency_of(self, num_hops: int) -> float:
        """Seconds that an exchange of so many hops of the ring takes beside its bytes."""
        ring_s = _NCCL_BASE_S + num_hops * _NCCL_HOP_S
        return ring_s if self.latency_s is None else self.latency_s


class CollectiveTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What a step takes beside its computing, in the terms of ``SimulationConfig``."""

    collective_ms: float
    collective_ms_per_token: float
    collective_ms_per_sequence: float


def collective_times(shape: ModelShape, link: GroupLink, num_devices: int) -> CollectiveTimes:
    """Each layer adds up hidden states twice, behind attention and behind the MLP, for which a
    device sends twice what it has not got of the sum; the logits of sequences are gathered once,
    of which each has its part of the vocabulary."""
    others = (num_devices - 1) / num_devices
    num_sums = 2 * shape.num_layers
    sum_bytes = 2 * others * shape.hidden_size * _NUMBER_BYTES
    logits_bytes = others * shape.vocab_size * _NUMBER_BYTES
    # To add up, a ring goes round twice; to gather, once.
    once = num_devices - 1
    latency_s = num_sums * link.latency_of(2 * once) + link.latency_of(once)
    return CollectiveTimes(
        collective_ms=latency_s * 1e3,
        collective_ms_per_token=num_sums * sum_bytes / link.bytes_per_s * 1e3,
        collective_ms_per_sequence=logits_bytes / link.bytes_per_s * 1e3,
    )

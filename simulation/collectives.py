"""Times of collectives in a group of devices."""

from __future__ import annotations

import msgspec

# Hidden states are exchanged in 16 bits, logits in 32.
_HIDDEN_BYTES, _LOGIT_BYTES = 2, 4
# NCCL's model of a ring within one host, in seconds: base time of a collective, and time of each
# step of the ring (baseLatencies and hwLatencies of src/graph/tuning.cc, v2.30.7, protocol LL,
# NVLink).
_NCCL_BASE_S, _NCCL_HOP_S = 6.6e-6, 0.6e-6


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Model dimensions that determine the exchanged bytes; defaults: Llama 8B."""

    num_layers: int = 32
    hidden_size: int = 4_096
    vocab_size: int = 128_256


class GroupLink(msgspec.Struct, frozen=True, kw_only=True):
    """Link between devices of a group.

    ``bytes_per_s`` is for each direction, by default NVLink 4. ``latency_s`` is the time of an
    exchange beside its bytes; None: NCCL's model.
    """

    bytes_per_s: float = 450e9
    latency_s: float | None = None

    def latency_of(self, num_hops: int) -> float:
        """Return the seconds of an exchange of ``num_hops`` hops beside its bytes."""
        ring_s = _NCCL_BASE_S + num_hops * _NCCL_HOP_S
        return ring_s if self.latency_s is None else self.latency_s


class CollectiveTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a step beside its computation, as in ``SimulationConfig``."""

    collective_ms: float
    collective_ms_per_token: float
    collective_ms_per_sequence: float


def collective_times(shape: ModelShape, link: GroupLink, num_devices: int) -> CollectiveTimes:
    """Return the times of a step's collectives.

    Each layer all-reduces hidden states twice, after attention and after the MLP. A device sends
    twice the part of the sum that it lacks. The logits of sequences are gathered once. Each device
    has its part of the vocabulary.
    """
    others = (num_devices - 1) / num_devices
    num_sums = 2 * shape.num_layers
    sum_bytes = 2 * others * shape.hidden_size * _HIDDEN_BYTES
    logits_bytes = others * shape.vocab_size * _LOGIT_BYTES
    # An all-reduce takes two rounds of the ring, a gather one.
    once = num_devices - 1
    latency_s = num_sums * link.latency_of(2 * once) + link.latency_of(once)
    return CollectiveTimes(
        collective_ms=latency_s * 1e3,
        collective_ms_per_token=num_sums * sum_bytes / link.bytes_per_s * 1e3,
        collective_ms_per_sequence=logits_bytes / link.bytes_per_s * 1e3,
    )

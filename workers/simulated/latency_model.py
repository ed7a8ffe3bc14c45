"""Latency model of a simulated engine's steps; no clock, no I/O."""

from __future__ import annotations

import math

from millrace.schemas.config import SimulationConfig
from millrace.schemas.errors import ConfigError

_TIMES = (
    "step_ms",
    "step_ms_per_sequence",
    "step_ms_per_kv_token",
    "collective_ms",
    "collective_ms_per_token",
    "collective_ms_per_sequence",
    "start_s",
)


class LatencyModel:
    """Seconds of work of one device or of a group of ``num_devices``, from a ``SimulationConfig``.

    The devices of a group share the computing and reading, and exchange their results.

    Raises:
        ConfigError: a setting is out of range; the message names it.
    """

    def __init__(self, config: SimulationConfig, num_devices: int = 1) -> None:
        if not 0 < config.prefill_tokens_per_s < math.inf:
            raise ConfigError(
                "engine.simulation.prefill_tokens_per_s must be above 0, got "
                f"{config.prefill_tokens_per_s}."
            )
        for name in _TIMES:
            value = getattr(config, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"engine.simulation.{name} must be 0 or more, got {value}.")
        if num_devices < 1:
            raise ConfigError(f"engine.tensor_parallel must be at least 1, got {num_devices}.")
        exchanged = 1e-3 if num_devices > 1 else 0.0
        per_token_s = config.collective_ms_per_token * exchanged
        per_sequence_s = config.collective_ms_per_sequence * exchanged
        shared = 1e-3 / num_devices
        self.start_s = config.start_s
        self._prefill_token_s = 1 / (config.prefill_tokens_per_s * num_devices) + per_token_s
        self.prefill_tokens_per_s = (
            config.prefill_tokens_per_s if num_devices == 1 else 1 / self._prefill_token_s
        )
        self._collective_s = config.collective_ms * exchanged
        self._base_s = config.step_ms * shared + self._collective_s
        self._sequence_s = config.step_ms_per_sequence * shared + per_token_s + per_sequence_s
        self._kv_token_s = config.step_ms_per_kv_token * shared

    def step_s(self, prefill_tokens: int, num_decodes: int, kv_tokens: int) -> float:
        """Return the duration of a step in seconds.

        Args:
            prefill_tokens: prompt tokens that the step computes.
            num_decodes: sequences that the step decodes.
            kv_tokens: tokens that these sequences attend to in all.
        """
        prefill_s = prefill_tokens * self._prefill_token_s
        if num_decodes or not prefill_tokens:
            return prefill_s + self.decode_step_s(num_decodes, kv_tokens)
        return prefill_s + self._collective_s

    def decode_step_s(self, num_decodes: int, kv_tokens: int) -> float:
        """Return the duration of a decode-only step in seconds; 0 if there is nothing to decode."""
        if not num_decodes:
            return 0.0
        return self._base_s + num_decodes * self._sequence_s + kv_tokens * self._kv_token_s

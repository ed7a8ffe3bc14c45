"""How long a step of a simulated engine takes; no clock, no I/O."""

from __future__ import annotations

import math

from millrace.schemas.config import SimulationConfig
from millrace.schemas.errors import ConfigError


class LatencyModel:
    """Seconds of work, as a ``SimulationConfig`` says. Raises ConfigError, naming the setting, for
    one out of range."""

    def __init__(self, config: SimulationConfig) -> None:
        if not 0 < config.prefill_tokens_per_s < math.inf:
            raise ConfigError(
                "engine.simulation.prefill_tokens_per_s must be above 0, got "
                f"{config.prefill_tokens_per_s}."
            )
        for name in ("step_ms", "step_ms_per_sequence", "step_ms_per_kv_token", "start_s"):
            value = getattr(config, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"engine.simulation.{name} must be 0 or more, got {value}.")
        self.start_s = config.start_s
        self.prefill_tokens_per_s = config.prefill_tokens_per_s
        self._prefill_token_s = 1 / config.prefill_tokens_per_s
        self._base_s = config.step_ms / 1e3
        self._sequence_s = config.step_ms_per_sequence / 1e3
        self._kv_token_s = config.step_ms_per_kv_token / 1e3

    def step_s(self, prefill_tokens: int, num_decodes: int, kv_tokens: int) -> float:
        """A step that computes ``prefill_tokens`` of prompts and decodes ``num_decodes`` sequences
        that attend to ``kv_tokens`` in all."""
        return prefill_tokens * self._prefill_token_s + self.decode_step_s(num_decodes, kv_tokens)

    def decode_step_s(self, num_decodes: int, kv_tokens: int) -> float:
        """A step that only decodes; 0 without anything to decode."""
        if not num_decodes:
            return 0.0
        return self._base_s + num_decodes * self._sequence_s + kv_tokens * self._kv_token_s

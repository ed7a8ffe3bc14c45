"""Settings of the own engine that no server has the like of."""

from __future__ import annotations

from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError

_UNKNOWN = (
    "num_blocks",
    "kernels",
    "deterministic",
    "host_cache_bytes",
    "idle_offload_s",
    "ageing_s",
    "itl_bound_ms",
    "collectives",
)


def check_settings(config: EngineConfig, kind: EngineKind, *known: str) -> None:
    """Raises ConfigError, naming the setting, for one that the server does not have and that is not
    among ``known``."""
    check_usual(config, kind, *(name for name in _UNKNOWN if name not in known))


def group_options(config: EngineConfig, tensor: str, experts: str = "") -> dict[str, str]:
    """Of a command line, if several devices are to compute the model; ``tensor`` and ``experts``
    are what they are called there."""
    size = config.tensor_parallel
    options = {tensor: str(size)} if size > 1 else {}
    return options | ({experts: str(size)} if experts and config.expert_parallel else {})


def check_usual(config: EngineConfig, kind: EngineKind, *names: str) -> None:
    """Raises ConfigError for one of these settings that is not as it is by default."""
    usual = EngineConfig()
    for name in names:
        if getattr(config, name) != getattr(usual, name):
            raise ConfigError(
                f"worker.engine.{name} is a setting of Millrace's own engine; leave it out, and "
                f"see worker.engine.arguments for those of {kind}."
            )

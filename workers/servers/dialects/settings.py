"""Settings of the own engine that no server has the like of."""

from __future__ import annotations

from collections.abc import Mapping

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


def device_variables(config: EngineConfig, *, hides_gpus: bool = True) -> dict[str, str]:
    """Return the variables by which a server finds its device and its number of threads.
    ``hides_gpus``: on a processor it has to be kept from the GPUs that are there."""
    variables = {}
    if config.device == "cpu" and hides_gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    elif config.device.startswith("cuda:"):
        variables["CUDA_VISIBLE_DEVICES"] = config.device.removeprefix("cuda:")
    if config.num_threads:
        variables["OMP_NUM_THREADS"] = str(config.num_threads)
    return variables


def words_of(options: Mapping[str, str]) -> tuple[str, ...]:
    """Return options as words of a command line."""
    return tuple(word for option in options.items() for word in option)

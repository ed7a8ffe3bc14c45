"""Interface between a worker and any engine, and the loader of custom engines."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from millrace.engine.types import (
    DeviceTime,
    EngineOutput,
    EngineRequest,
    EngineStats,
    PrefixChanges,
)
from millrace.registry.served import ServedModel
from millrace.runtime.clock import Clock
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError, MillraceError, PrefixCacheKeptError
from millrace.schemas.transfer import TransferEndpoint

OnOutputs = Callable[[list[EngineOutput], EngineStats], None]
OnPrefixes = Callable[[PrefixChanges], None]
OnDeviceTimes = Callable[[list[DeviceTime]], None]


class EngineFailedError(MillraceError, code="engine_failed", retryable=True):
    """Engine that ended, or could not load the model; the message says why."""


class EngineLike(ABC):
    """Engine as the worker sees it. ``tests/workers/conformance.py`` checks these promises for
    every engine; ``docs/engines.md`` shows how to write an engine.

    1. **Configure.** The class method ``start`` takes the model and ``worker.engine``. A setting
       that the engine cannot honour raises ConfigError before anything runs.
    2. **Load.** ``start`` awaits the weights. An engine that dies or exceeds its time limit
       meanwhile raises EngineFailedError with the reason and leaves no process behind.
    3. **Ready.** From now on ``stats``, ``device_uuid``, ``num_devices``, ``weights`` and
       ``transfer_endpoint`` are valid, and the engine accepts requests.
    4. **Add and cancel.** Neither blocks nor raises. The engine answers a request that it cannot
       serve with an output that has ``error``. A request added under the id of a running request
       replaces it. After ``cancel`` the request's slot and cache are free before the next step, and
       its device time is reported once, with ``over``.
    5. **Stream.** ``on_outputs`` gets outputs in order: each token of a request once, at the index
       after the tokens before it, ``output_token_ids`` included. A request ends with exactly one
       output that has ``finish_reason`` or ``error``. ``on_prefixes`` gets changes of the prefix
       cache. ``on_device_times`` gets the device time of requests: the final value of each
       cancelled request, and interim values now and then. The engine calls them on the event
       loop, never from ``add`` or ``cancel``. They must not block.
    6. **Stats.** ``stats`` costs nothing to read; its counters never fall while the engine lives.
    7. **Drain.** Without new requests every request ends by itself, and ``stats`` come to rest.
    8. **Close.** Ends everything that the engine owns, at once; no callback comes after it.
       ``wait_closed`` then returns the reason; it also returns when the engine ended by itself.
       Running requests are lost. They may be added to the next engine with their tokens so far as
       ``output_token_ids``.
    """

    def __init__(self) -> None:
        self.on_outputs: OnOutputs = ignore
        self.on_prefixes: OnPrefixes = ignore
        self.on_device_times: OnDeviceTimes = ignore
        self.device_uuid = ""
        """UUID of the first CUDA device, as its driver reports it; empty without a CUDA device."""
        self.num_devices = 1
        """Number of devices that compute together. Reported device times are those of one device.
        """
        self.weights: str | None = None
        """Fingerprint of the weights; empty if it cannot be determined, None if not reported."""
        self.transfer_endpoint: TransferEndpoint | None = None
        """Endpoint from which other workers' engines pull KV blocks; None if they cannot."""

    @property
    @abstractmethod
    def stats(self) -> EngineStats:
        """Statistics as of the last step."""

    @property
    def max_num_sequences(self) -> int:
        """Maximum number of sequences that run at a time."""
        return self.stats.max_num_sequences

    @abstractmethod
    def add(self, request: EngineRequest) -> None:
        """Generate for a request."""

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """Stop a request. Outputs of the current step may still arrive."""

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, except for blocks that running requests use.

        Raises:
            PrefixCacheKeptError: the engine has no way to empty its cache.
        """
        raise PrefixCacheKeptError("This worker's engine cannot empty its prefix cache.")

    @abstractmethod
    async def wait_closed(self) -> str:
        """Wait until the engine has ended, and return the reason."""

    @abstractmethod
    async def close(self) -> None:
        """End the engine; its running requests are lost."""


def ignore(*_: object) -> None:
    """Ignore a callback: the default of an engine that has no worker yet."""


class CustomEngine(Protocol):
    """Class of a user's own engine, as the loader uses it."""

    async def start(self, model: ServedModel, config: EngineConfig, clock: Clock, /) -> EngineLike:
        """Start an engine (a class method) and return it when ready.

        Raises:
            ConfigError: the engine cannot honour a setting.
            EngineFailedError: the engine ended or could not load the model.
        """


def load_engine_class(name: str) -> CustomEngine:
    """Return the engine class that ``name`` gives as ``module:Class`` or ``file.py:Class``.

    The class must derive from ``EngineLike`` and have a class method ``start``.

    Raises:
        ConfigError: the class cannot be found or imported, or does not fit; the message says why.
    """
    where, _, class_name = name.rpartition(":")
    if not where or not class_name:
        raise ConfigError(
            f"worker.engine.command is {name!r}; a custom engine is named as module:Class or "
            f"file.py:Class."
        )
    try:
        module = (
            _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        )
    except Exception as error:
        raise ConfigError(
            f"The custom engine's {where} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type) or not issubclass(found, EngineLike):
        raise ConfigError(f"{where} has no class {class_name} that derives from EngineLike.")
    start = getattr(found, "start", None)
    if start is None:
        raise ConfigError(f"{name} has no class method `start(model, config, clock)`.")
    return found  # type: ignore[return-value]  # a class whose method start is bound to it


def _load_file(file: Path) -> object:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module

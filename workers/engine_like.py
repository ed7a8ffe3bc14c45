"""What a worker asks of an engine, whoever wrote it, and how a user's own engine is found."""

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
    """The engine ended, or could not load the model; the message says why."""


class EngineLike(ABC):
    """An engine as the worker sees it. ``tests/workers/conformance.py`` checks these promises for
    every engine; ``docs/engines.md`` shows how to write one.

    1. **Configure.** The class method that starts it takes the model and ``worker.engine``. A
       setting that it cannot honour is a ConfigError, before anything runs.
    2. **Load.** It awaits the weights. An engine that dies meanwhile, or takes longer than it may,
       raises EngineFailedError with the reason, and leaves no process behind.
    3. **Ready.** From here on ``stats``, ``device_uuid``, ``num_devices``, ``weights`` and
       ``transfer_endpoint`` are true, and requests are taken.
    4. **Add and cancel.** Neither blocks nor raises. A request that the engine cannot serve is
       answered by an output with ``error``; one that is added under an id that runs replaces it.
       After ``cancel`` the request's slot and cache are free before the next step, and its device
       time is reported once, with ``over``.
    5. **Stream.** ``on_outputs`` gets what was made, in order: each token of a request once, at the
       index behind those before it, ``output_token_ids`` included. A request ends with exactly one
       output that has ``finish_reason`` or ``error``. ``on_prefixes`` gets what changed in the
       prefix cache, ``on_device_times`` what requests have taken of the device: the last word for
       each that was cancelled, and now and then how things stand. They are called on the event
       loop, never from ``add`` or ``cancel``, and must not block.
    6. **Stats.** ``stats`` costs nothing to read; its counters never fall while the engine lives.
    7. **Drain.** Who adds nothing more sees every request end by itself, and ``stats`` at rest.
    8. **Close.** Ends everything that the engine owns, at once; no callback comes after it.
       ``wait_closed`` returns then, or when the engine has ended by itself, with why. What ran is
       lost, and may be added to the next engine with the tokens that it had as
       ``output_token_ids``.
    """

    def __init__(self) -> None:
        self.on_outputs: OnOutputs = ignore
        self.on_prefixes: OnPrefixes = ignore
        self.on_device_times: OnDeviceTimes = ignore
        self.device_uuid = ""
        """The first CUDA device's, by which its driver knows it; empty without one."""
        self.num_devices = 1
        """How many devices it computes on, all of them at a time: device times are those of one."""
        self.weights: str | None = None
        """The fingerprint of what it runs; empty: nobody can tell, None: it does not say."""
        self.transfer_endpoint: TransferEndpoint | None = None
        """Where other workers' engines pull blocks of its KV cache from; None: they cannot."""

    @property
    @abstractmethod
    def stats(self) -> EngineStats:
        """As of the last step."""

    @property
    def max_num_sequences(self) -> int:
        """How many sequences run at a time."""
        return self.stats.max_num_sequences

    @abstractmethod
    def add(self, request: EngineRequest) -> None:
        """Generate for a request."""

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """Stop a request; outputs of a step that runs now may still come."""

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, but for what requests use that run now. Raises
        PrefixCacheKeptError, which an engine does that has no way to empty it."""
        raise PrefixCacheKeptError("The engine of this worker has no way to empty its cache.")

    @abstractmethod
    async def wait_closed(self) -> str:
        """Returns when the engine has ended, with why."""

    @abstractmethod
    async def close(self) -> None:
        """End the engine; what runs in it is lost."""


def ignore(*_: object) -> None:
    """A callback of an engine that has no worker yet."""


class CustomEngine(Protocol):
    """What the class is called for."""

    async def start(self, model: ServedModel, config: EngineConfig, clock: Clock, /) -> EngineLike:
        """A class method: an engine that is ready. Raises ConfigError or EngineFailedError."""


def load_engine_class(name: str) -> CustomEngine:
    """The class of ``module:Class`` or ``file.py:Class``, a subclass of ``EngineLike`` with a class
    method ``start``. Raises ConfigError that says what is wrong with it."""
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

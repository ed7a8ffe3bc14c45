"""Engines that a user wrote: a class that is named, not built in."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Protocol

from millrace.registry.served import ServedModel
from millrace.runtime.clock import Clock
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError
from millrace.workers.engine_like import EngineLike


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

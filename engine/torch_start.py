"""How a process that computes imports torch: without what an engine has no use for."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from types import ModuleType
from typing import Any

# Torch's operators once more, in Python, for tensors without memory.
_LATER = "torch._meta_registrations"


class _Later(ModuleType):
    """Stands for a module until something of it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_torch() -> None:
    """Import torch, in two thirds of the time that it takes otherwise.

    For the processes of engines and ranks, which have their tensors on real devices and compile
    nothing with torch: without ``torch._meta_registrations``, operators of the ``meta`` device are
    missing. The settings of its threads have to be in the environment. If torch is there already,
    it stays as it is.
    """
    if "torch" in sys.modules:
        return
    # It would read the entry points of all distributions, for devices that no engine computes on.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    sys.modules.setdefault(_LATER, _Later(_LATER))
    # All that it makes stays: looking for garbage among it takes a tenth of the time, and as much
    # again while the rest of an engine is imported.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()

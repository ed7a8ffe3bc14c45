"""Import of torch for a process that computes, without the parts that an engine does not use."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from types import ModuleType
from typing import Any

# Second definitions of torch's operators, in Python, for tensors without memory.
_LATER = "torch._meta_registrations"


class _Later(ModuleType):
    """Placeholder of a module, which is imported when an attribute is first used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_torch() -> None:
    """Import torch in two thirds of the usual time.

    For processes of engines and ranks, which have their tensors on real devices and compile nothing
    with torch. ``torch._meta_registrations`` is not imported, so operators of the ``meta`` device
    are missing. The settings of torch's threads must be in the environment before. If torch is
    imported already, nothing changes.
    """
    if "torch" in sys.modules:
        return
    # torch would read the entry points of all distributions, for devices that no engine uses.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    sys.modules.setdefault(_LATER, _Later(_LATER))
    # All objects made by the import stay. Garbage collection would take a tenth of its time, and as
    # much again while the rest of an engine is imported.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()

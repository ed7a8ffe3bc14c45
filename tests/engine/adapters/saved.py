"""Random adapters, written by PEFT, and PEFT's results with them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import torch

from millrace.engine.types import EngineRequest
from millrace.registry.checkpoints.adapters.outline import adapter_version
from millrace.schemas.models.adapters import AdapterRef
from millrace.schemas.prefix import salt_of

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    path: Path,
    model: Any,
    seed: int = 0,
    targets: tuple[str, ...] = ALL_TARGETS,
    strength: float = 1.0,
    **config: Any,
) -> Any:
    """Save a random adapter of transformers' ``model`` in ``path``; return PEFT's model of both."""
    settings = {"r": 4, "lora_alpha": 8} | config
    import peft  # seconds of CPU, which only runs of these tests take

    adapted = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(target_modules=list(targets), **settings)
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * strength / parameter.shape[-1] ** 0.5)
    adapted.save_pretrained(str(path))
    return adapted.eval()


def engine_adapter(path: Path, name: str = "") -> AdapterRef:
    """Return the adapter in ``path``, as requests name it."""
    return AdapterRef(name=name or path.name, version=adapter_version(path), source=str(path))


def with_adapter(adapter: AdapterRef | None, one: EngineRequest) -> EngineRequest:
    """Return ``one`` with an adapter, or with none, and the cache salt that goes with it."""
    version = "" if adapter is None else adapter.version
    return msgspec.structs.replace(one, adapter=adapter, cache_salt=salt_of("", "", version))

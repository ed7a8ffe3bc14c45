"""Helpers that drive an engine to the end of its work."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st

from millrace import registry
from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.devices.cpu.runner import ModelRunner
from millrace.engine.devices.cuda.runner import DeviceRunner
from millrace.engine.kv.cache import KVCache
from millrace.engine.models.decoder import Decoder
from millrace.engine.step import settings as step_settings
from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineOutput, EngineRequest
from millrace.schemas.config import EngineConfig
from millrace.schemas.sampling import SamplingParams

_DEMO = Path(registry.__path__[0]) / "demo" / "model"


class FakeMemory(KVCache):
    """Block memory without contents that notes its operations."""

    def __init__(self) -> None:
        self.scrubbed: list[int] = []
        self.copied: list[tuple[int, int]] = []

    def scrub(self, blocks: list[int]) -> None:
        self.scrubbed += blocks

    def copy_block(self, source: int, target: int) -> None:
        self.copied.append((source, target))


def resolved(
    path: Path = _DEMO, *, on: torch.device | None = None, **settings: Any
) -> ResolvedEngineConfig:
    """Return the settings of an engine for a checkpoint. ``on`` is a device that this machine need
    not have, for settings that leave the device open."""
    config = EngineConfig(**settings)
    if on is None:
        return step_settings.resolve(path, config)
    with mock.patch.object(step_settings, "choose_device", return_value=on):
        return step_settings.resolve(path, config)


def embedding_of(engine: Engine) -> torch.Tensor:
    """Return the embedding of an engine's model: [vocab_size, hidden_size]."""
    runner = engine._runner
    assert isinstance(runner, ModelRunner | DeviceRunner)
    decoder = runner._decoder
    assert isinstance(decoder, Decoder)
    return decoder._weights.embedding


def request(request_id: str, prompt: list[int], **params: Any) -> EngineRequest:
    """Return a greedy request that runs to ``max_tokens`` unless ``params`` say otherwise."""
    extra = {
        name: params.pop(name)
        for name in ("output_token_ids", "priority", "eos_token_ids", "cache_salt")
        if name in params
    }
    sampling = {"temperature": 0.0, "max_tokens": 12} | params
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**sampling),
        **extra,
    )


def prompt(seed: int, num_tokens: int, vocab_size: int = 199) -> list[int]:
    """Draw random token ids."""
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(num_tokens)]


def drain(engine: Engine, max_steps: int = 10_000) -> list[EngineOutput]:
    """Step until there is no work; return all outputs. The engine is checked at each step."""
    outputs: list[EngineOutput] = []
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
        engine.check_integrity()
    raise AssertionError(f"the engine still has work after {max_steps} steps")


def tokens_by_request(outputs: list[EngineOutput]) -> dict[str, list[int]]:
    tokens: defaultdict[str, list[int]] = defaultdict(list)
    for output in outputs:
        tokens[output.request_id] += output.token_ids
    return dict(tokens)


def last_by_request(outputs: list[EngineOutput]) -> dict[str, EngineOutput]:
    """Return the finished output of each request. Raise AssertionError if a request has two."""
    last: dict[str, EngineOutput] = {}
    for output in outputs:
        if output.finished:
            assert output.request_id not in last, f"{output.request_id} ended twice"
            last[output.request_id] = output
    return last


class SteppingClock:
    """Clock that advances by a hundredth of a second at each reading."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += 0.01
        return self._now_s


def drawn_settings(block_bytes: int) -> st.SearchStrategy[dict[str, Any]]:
    """Draw settings that sometimes make an engine short of everything; ``block_bytes`` is the size
    of a block of its KV cache."""
    return st.fixed_dictionaries(
        {
            "max_batch_tokens": st.sampled_from([5, 24, 64, 300]),
            "max_num_sequences": st.integers(1, 7),
            "prefix_cache": st.booleans(),
            "host_cache_bytes": st.sampled_from([0, 3 * block_bytes, 60 * block_bytes]),
            "idle_offload_s": st.sampled_from([0.0, 0.5, 30.0]),
            "ageing_s": st.sampled_from([0.0, 0.3, 10.0]),
            "itl_bound_ms": st.sampled_from([0.0, 2.0]),
        }
    )

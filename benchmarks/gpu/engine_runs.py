"""Engine with random weights, and its timed operations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.loads import TEMPERATURE, Load, random_prompts, write_config
from benchmarks.gpu.scope import Scope, WrongResultError
from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineOutput, EngineRequest
from millrace.schemas.config import EngineConfig
from millrace.schemas.models.adapters import AdapterRef
from millrace.schemas.sampling import SamplingParams

MOST_SEQUENCES = 256
_BATCH_TOKENS = 8192
_SMOKE_SEQUENCES = 2
_SMOKE_BATCH_TOKENS = 16
# More tokens than are timed of one sequence.
_MOST_DECODED = 2048
_WARM_STEPS, _SMOKE_WARM_STEPS = 4, 1


class DecodeSteps(NamedTuple):
    """Seconds of each step, and the tokens in the batch's KV cache in the middle of the steps."""

    steps_s: list[float]
    num_cached_tokens: int


class Throughput(NamedTuple):
    """Throughput of a load; ``whole`` is True if it was served to its end."""

    num_tokens: int
    elapsed_s: float
    whole: bool

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s


def engine_config(scope: Scope, *, kernels: str = "triton", **changes: Any) -> EngineConfig:
    """Return a config for the scope's device: as large as useful there, or tiny on the CPU.

    The KV cache takes the device's remaining memory, unless ``changes`` set its blocks. There is no
    host cache.
    """
    settings: dict[str, Any] = {
        "device": scope.device.type,
        "dtype": str(scope.dtype).removeprefix("torch."),
        "load_format": "dummy",
        "kernels": kernels,
        "max_num_sequences": _SMOKE_SEQUENCES if scope.smoke else MOST_SEQUENCES,
        "max_batch_tokens": _SMOKE_BATCH_TOKENS if scope.smoke else _BATCH_TOKENS,
        "num_blocks": 32 if scope.smoke else 0,
        "kv_cache_bytes": 0,
        "host_cache_bytes": 0,
        "num_threads": 1 if scope.smoke else 0,
    }
    return EngineConfig(**(settings | changes))


class EngineRun:
    """Engine of a model of ``shapes``, with its requests.

    ``start_s`` is the time from its files to its first possible step.
    """

    def __init__(
        self, scope: Scope, model: str, folder: Path, config: EngineConfig, **shape: Any
    ) -> None:
        self.model = write_config(folder, model, tiny=scope.smoke, **shape)
        self._scope = scope
        begin_s = time.perf_counter()
        self.engine = Engine.load(folder, config)
        if scope.device.type == "cuda":
            torch.cuda.synchronize()
        self.start_s = time.perf_counter() - begin_s
        self._num_added = 0
        self._lengths: dict[str, int] = {}

    def add(
        self,
        prompts: Sequence[tuple[int, ...]],
        num_output_tokens: Sequence[int],
        temperature: float = TEMPERATURE,
        adapters: Sequence[AdapterRef | None] = (None,),
    ) -> list[str]:
        """Add requests that run to their full length, with ``adapters`` in turns; return ids."""
        ids = []
        for prompt, max_tokens in zip(prompts, num_output_tokens, strict=True):
            request_id = str(self._num_added)
            self._num_added += 1
            self._lengths[request_id] = len(prompt)
            ids.append(request_id)
            sampling = SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                ignore_eos=True,
                seed=self._num_added,
            )
            adapter = adapters[self._num_added % len(adapters)]
            self.engine.add(
                EngineRequest(
                    request_id=request_id,
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    adapter=adapter,
                    cache_salt="" if adapter is None else adapter.version,
                )
            )
        return ids

    def step(self) -> list[EngineOutput]:
        """Run one step.

        Raises RuntimeError if a request failed, after all others were cancelled.
        """
        outputs = self.engine.step()
        for output in outputs:
            if output.error is not None:
                self.shrink(0)
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            self._lengths[output.request_id] += len(output.token_ids)
            if output.finished:
                del self._lengths[output.request_id]
        return outputs

    def grow(
        self,
        num_sequences: int,
        num_prompt_tokens: int,
        adapters: Sequence[AdapterRef | None] = (None,),
    ) -> None:
        """Add sequences with random prompts until ``num_sequences`` decode."""
        running = len(self._lengths)
        prompts = self.prompts(num_sequences - running, num_prompt_tokens)
        longest = self.engine.max_tokens_per_request - num_prompt_tokens
        lengths = [min(longest, _MOST_DECODED)] * len(prompts)
        waiting = set(self.add(prompts, lengths, adapters=adapters))
        while waiting:
            waiting.difference_update(o.request_id for o in self.step() if o.token_ids)

    def shrink(self, num_sequences: int) -> None:
        """Cancel all but the first sequences."""
        for request_id in list(self._lengths)[num_sequences:]:
            self.engine.cancel(request_id)
            del self._lengths[request_id]

    def decode_steps(self, num_steps: int) -> DecodeSteps:
        """Time steps in which all sequences decode. Raises WrongResultError if they did not."""
        for _ in range(_SMOKE_WARM_STEPS if self._scope.smoke else _WARM_STEPS):
            self.step()
        before = sum(self._lengths.values())
        times_s = [time.perf_counter()]
        for _ in range(num_steps):
            self.step()
            times_s.append(time.perf_counter())
        after = sum(self._lengths.values())
        if after - before != num_steps * len(self._lengths):
            raise WrongResultError(
                f"{after - before} tokens came of {num_steps} steps of {len(self._lengths)}"
            )
        steps_s = [end - begin for begin, end in pairwise(times_s)]
        return DecodeSteps(steps_s, (before + after) // 2)

    def prefill_s(
        self, count: int, num_tokens: int, adapters: Sequence[AdapterRef | None] = (None,)
    ) -> float:
        """Return the seconds from ``count`` new prompts to the last first token, on an idle
        engine.
        """
        prompts = self.prompts(count, num_tokens)
        begin_s = time.perf_counter()
        self.add(prompts, [1] * count, adapters=adapters)
        while self._lengths:
            self.step()
        return time.perf_counter() - begin_s

    def serve(self, load: Load, limit_s: float) -> Throughput:
        """Serve a load, all requests at once, for at most ``limit_s``."""
        begin_s = time.perf_counter()
        self.add(
            [request.prompt for request in load.requests],
            [request.num_output_tokens for request in load.requests],
        )
        num_tokens = 0
        while self._lengths and time.perf_counter() - begin_s < limit_s:
            num_tokens += sum(len(output.token_ids) for output in self.step())
        elapsed_s = time.perf_counter() - begin_s
        whole = not self._lengths
        if whole and num_tokens != load.num_output_tokens:
            raise WrongResultError(f"{num_tokens} tokens came, not {load.num_output_tokens}")
        self.shrink(0)
        return Throughput(num_tokens, elapsed_s, whole)

    def prompts(self, count: int, num_tokens: int) -> list[tuple[int, ...]]:
        """Return prompts that were not used before."""
        seed = self._scope.seed * 1_000_003 + self._num_added
        return random_prompts(count, num_tokens, self.model.vocab_size, seed)

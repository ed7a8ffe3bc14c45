"""Engine's loads on the continuous batching of ``transformers``, with the same bfloat16 model.

Uses random weights, and the best attention that needs no further package.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.loads import TEMPERATURE, Load, nano_load, thousand_load, write_config
from benchmarks.gpu.report import LLAMA_8B, QWEN_06B, QWEN_8B, Detail, over
from benchmarks.gpu.scope import Scope, WrongResultError
from benchmarks.support.transformers_batching import answered, continuous_batching

_WARM_UP_TOKENS = 4
_WARM_UP_S = 60.0
# Runs shorter than this are not reported.
_LEAST_RUN_S = 3.0


class Setting(NamedTuple):
    """Options of its ContinuousBatchingConfig; ``page_tokens`` None uses its default."""

    name: str
    max_requests_per_batch: int
    max_batch_tokens: int | None = None
    page_tokens: int | None = None
    num_pages: int | None = None


# Without flash attention, every query of a batch is multiplied by all keys of the batch, so fewer
# requests at a time may be faster. The faster setting is reported.
_SETTINGS = (
    Setting("64 at a time", 64, max_batch_tokens=2048, page_tokens=256, num_pages=1024),
    Setting("sized by itself", 256),
)
_SMOKE_SETTINGS = (Setting("2 at a time", 2, max_batch_tokens=16, page_tokens=16, num_pages=16),)


def run(scope: Scope, name: str) -> None:
    model, vocab_size = _random_model(scope, name)
    load = (
        thousand_load(smoke=scope.smoke, vocab_size=vocab_size, seed=scope.seed)
        if name == LLAMA_8B
        else nano_load(smoke=scope.smoke, vocab_size=vocab_size)
    )
    settings = _SMOKE_SETTINGS if scope.smoke else _SETTINGS
    best = 0.0
    for index, setting in enumerate(settings):
        with scope.case(f"{load.name}, {setting.name}"):
            limit_s = max(_LEAST_RUN_S, scope.left_s / (len(settings) - index) - _LEAST_RUN_S)
            best = max(best, _measure(scope, model, load, setting, limit_s))
        scope.free_memory()
    own = scope.value_of(name, load.name)
    if best and own is not None:
        scope.emit(over(load.name), own / best, "x")


def _random_model(scope: Scope, name: str) -> tuple[Any, int]:
    assert name in (LLAMA_8B, QWEN_06B, QWEN_8B)
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        vocab_size = write_config(Path(folder), name, tiny=scope.smoke).vocab_size
        config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(scope.seed)
    with torch.device(scope.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=scope.dtype, attn_implementation="sdpa"
        )
    return model.eval(), vocab_size


def _measure(scope: Scope, model: Any, load: Load, setting: Setting, limit_s: float) -> float:
    """Emit a row and return its tokens per second."""
    begin_s = time.perf_counter()
    manager = continuous_batching(
        model,
        {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0},
        page_tokens=setting.page_tokens,
        max_requests_per_batch=setting.max_requests_per_batch,
        max_batch_tokens=setting.max_batch_tokens,
        num_blocks=setting.num_pages,
    )
    manager.start()
    try:
        if not answered(manager, [((1, 2, 3), _WARM_UP_TOKENS)], 1, _WARM_UP_S):
            raise RuntimeError("transformers' continuous batching made nothing")
        attention = str(model.config._attn_implementation)
        left_s = limit_s - (time.perf_counter() - begin_s)
        served = _serve(manager, load, max(_LEAST_RUN_S, left_s))
    finally:
        if manager.is_running():
            manager.stop(block=True, timeout=30.0, hard_stop=True)
        manager.destroy()
    num_tokens = len(served.timestamps_s)
    if served.whole and num_tokens != load.num_output_tokens:
        raise WrongResultError(f"{num_tokens} tokens came, not {load.num_output_tokens}")
    note = attention
    if not served.whole:
        note += f", cut after {served.elapsed_s:.0f} s, by its second half"
    details: dict[str, Detail] = {
        "attention": attention,
        "num_output_tokens": num_tokens,
        "elapsed_s": served.elapsed_s,
        "note": note,
    }
    scope.emit(f"{load.name}, {setting.name}", served.tokens_per_s, "tokens/s", details=details)
    return served.tokens_per_s


class _Served(NamedTuple):
    """Times of tokens since the first request; ``whole`` is True if all were answered."""

    timestamps_s: list[float]
    elapsed_s: float
    whole: bool

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second; of a cut run, the better rate of the whole and its second half.

        The second half has fewer prompts, which favours the peer.
        """
        whole = len(self.timestamps_s) / self.elapsed_s
        if self.whole:
            return whole
        half_s = self.elapsed_s / 2
        return max(whole, sum(half_s <= t <= self.elapsed_s for t in self.timestamps_s) / half_s)


def _serve(manager: Any, load: Load, limit_s: float) -> _Served:
    """Send all requests at once; cancel unfinished ones at ``limit_s``, whose tokens count."""
    begin_s = time.perf_counter()
    answers = answered(manager, load.requests, len(load.requests), limit_s)
    elapsed_s = time.perf_counter() - begin_s
    timestamps_s = [at_s for answer in answers for at_s in answer.parts_s]
    whole = len(answers) == len(load.requests)
    if not whole:
        manager.stop(block=True, timeout=30.0, hard_stop=True)
        # A failed request has the tokens that it generated.
        outputs = manager.output_router.output_queue
        while not outputs.empty():
            timestamps_s += outputs.get_nowait().timestamps or []
    return _Served([at_s - begin_s for at_s in timestamps_s], elapsed_s, whole)

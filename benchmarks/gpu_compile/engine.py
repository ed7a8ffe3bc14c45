"""Engine as it would run on a GPU, from its start to its last token, without results of kernels.

All of the runner is real: settings, weights, warm-up, recording, padding, transfers, and the
addresses and numbers of kernel calls. Kernels are compiled instead of launched, so tokens and
log-probabilities are the uninitialised contents of their tensors.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.adapters.engine import write_adapter
from benchmarks.checkpoints import LlamaShape
from benchmarks.gpu_compile.compiling import Compilation
from benchmarks.gpu_compile.models import CONFIGS
from millrace.registry.checkpoints.adapters.outline import TARGETS
from millrace.schemas.config import EngineConfig
from millrace.schemas.models.adapters import AdapterRef
from millrace.schemas.sampling import SamplingParams

# Every width is a multiple of 16, so that only another batch can cause a recompilation.
_CONFIG = CONFIGS["Qwen3-0.6B"] | {
    "max_position_embeddings": 2048,
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1008,
}
_SHAPE = LlamaShape(256, 2, 4, 2, 512)
SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"kv_cache_dtype": "fp8"},
    "deterministic": {"deterministic": True},
    "int8": {"quantization": "int8"},
    "float8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "adapters": {"max_adapters": 3},
    "launched one by one": {"cuda_graphs": False, "overlap": False},
}
_SAMPLINGS = (
    SamplingParams(max_tokens=6, temperature=0.0),
    SamplingParams(max_tokens=5, temperature=0.7, seed=1),
    SamplingParams(max_tokens=4, temperature=0.7, seed=2, top_p=0.9, top_k=40, min_p=0.01),
    SamplingParams(max_tokens=6, temperature=0.7, seed=3, repetition_penalty=1.2),
    SamplingParams(max_tokens=3, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=3, temperature=0.7, seed=4, n=2),
    SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1),
    SamplingParams(max_tokens=3, temperature=0.0, logit_bias={5: 1.0}),
)
# Undefined tokens may end a request early, never late.
_MOST_STEPS = 200


def compile_engine(compilation: Compilation, name: str) -> int:
    """Run requests of every kind with the settings ``name``; return the number of steps."""
    from millrace.engine.devices.cuda import loading as device_loading
    from millrace.engine.kernels.gpu.kernel_set import triton_kernels
    from millrace.engine.step.engine import Engine
    from millrace.engine.types import EngineRequest

    compilation.user = f"engine {name}"
    config = EngineConfig(
        device="cpu",
        dtype="bfloat16",
        kernels="triton",
        load_format="dummy",
        num_blocks=200,
        max_num_sequences=20,
        max_batch_tokens=300,
        **SETTINGS[name],
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(device_loading, "choose_kernels", return_value=triton_kernels()),
        compilation.instead_of_launching(),
    ):
        (Path(folder) / "config.json").write_text(json.dumps(_CONFIG))
        engine = Engine.load(Path(folder), config)
        adapters: list[AdapterRef | None] = [None]
        for number in range(config.max_adapters or 0):
            own = Path(folder) / f"adapter{number}"
            adapters.append(write_adapter(own, _SHAPE, TARGETS[number:], 8 + 16 * number, number))
        for i, (sampling, adapter) in enumerate(
            zip(_SAMPLINGS, itertools.cycle(adapters), strict=False)
        ):
            engine.add(
                EngineRequest(
                    request_id=str(i),
                    prompt_token_ids=tuple(range(1, 30 + 17 * i)),
                    sampling=sampling,
                    adapter=adapter,
                )
            )
        for num_steps in range(_MOST_STEPS):
            if not engine.has_work:
                return num_steps
            engine.step()
    raise AssertionError(f"the engine has work after {_MOST_STEPS} steps")

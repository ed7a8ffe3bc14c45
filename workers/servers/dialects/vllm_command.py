"""What starts vLLM's server."""

from __future__ import annotations

import os
from pathlib import Path

from millrace.registry.served import ServedModel
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.sampling import MAX_LOGPROBS
from millrace.workers.servers.dialect import Command
from millrace.workers.servers.dialects.settings import (
    check_settings,
    device_variables,
    group_options,
    words_of,
)

SCHEDULING_POLICY = "--scheduling-policy"

# The device is a GPU where one of these is there, else the processor.
_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
_CPU_NUM_SEQUENCES, _GPU_NUM_SEQUENCES = 64, 256
_CPU_KV_CACHE_BYTES = 1 << 30


def vllm_command(program: Path, socket: Path, model: ServedModel, config: EngineConfig) -> Command:
    """``vllm serve`` on a Unix socket, with ``config.arguments`` last. Raises ConfigError."""
    check_settings(config, EngineKind.VLLM)
    options = {
        "--uds": str(socket),
        "--served-model-name": model.entry.name,
        "--max-model-len": str(model.context_window_tokens),
        "--dtype": config.dtype,
        "--max-num-seqs": str(num_sequences(config)),
        SCHEDULING_POLICY: "priority",
        # The server's own defaults for sampling must not count.
        "--generation-config": "vllm",
        # The library of the own engine, so that all grammars mean the same.
        "--structured-outputs-config.backend": "guidance",
        "--max-logprobs": str(MAX_LOGPROBS + 1),
        "--kv-cache-dtype": config.kv_cache_dtype,
        "--load-format": config.load_format,
        **group_options(config, "--tensor-parallel-size"),
    }
    kv_cache_bytes = config.kv_cache_bytes
    if not kv_cache_bytes and not _has_gpu(config):
        kv_cache_bytes = _CPU_KV_CACHE_BYTES
    if kv_cache_bytes:
        options["--kv-cache-memory-bytes"] = str(kv_cache_bytes)
    else:
        options["--gpu-memory-utilization"] = str(config.gpu_memory_fraction)
    if config.max_batch_tokens:
        options["--max-num-batched-tokens"] = str(config.max_batch_tokens)
    flags = [
        "--enable-scale-out",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
        "--disable-fastapi-docs",
    ]
    flags += ["--enable-expert-parallel"] if config.expert_parallel else []
    flags += [] if config.prefix_cache else ["--no-enable-prefix-caching"]
    flags += [] if config.cuda_graphs else ["--enforce-eager"]
    flags += [] if config.overlap else ["--no-async-scheduling"]
    return Command(
        (
            *(str(program), "serve", str(model.path)),
            *words_of(options),
            *flags,
            *config.arguments,
        ),
        _environment(config),
    )


def num_sequences(config: EngineConfig) -> int:
    """How many run at a time."""
    by_device = _GPU_NUM_SEQUENCES if _has_gpu(config) else _CPU_NUM_SEQUENCES
    return config.max_num_sequences or by_device


def _has_gpu(config: EngineConfig) -> bool:
    return config.device != "cpu" and any(device.exists() for device in _GPU_DEVICES)


def _environment(config: EngineConfig) -> dict[str, str]:
    # Its development mode has /reset_prefix_cache. No other user reaches its socket.
    variables = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_SERVER_DEV_MODE": "1"}
    variables |= device_variables(config)
    if config.num_threads:
        # Unless the user binds them to cores, they run where the system puts them.
        binding = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        variables["VLLM_CPU_OMP_THREADS_BIND"] = binding
    return variables

"""Commands that start the servers, and the settings that each of them supports."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from millrace.registry.served import ServedModel
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError
from millrace.schemas.sampling import MAX_LOGPROBS
from millrace.workers.servers.dialect import Command, ServerAddress

_UNKNOWN = (
    "num_blocks",
    "kernels",
    "deterministic",
    "host_cache_bytes",
    "idle_offload_s",
    "ageing_s",
    "itl_bound_ms",
    "collectives",
)
SCHEDULING_POLICY = "--scheduling-policy"

# Device files of GPUs. If none exists, the device is the CPU.
_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
_CPU_NUM_SEQUENCES, _GPU_NUM_SEQUENCES = 64, 256
_CPU_KV_CACHE_BYTES = 1 << 30
TRTLLM_NUM_SEQUENCES = 64
# TGI learns a moment after its reader that an answer is over; a quarter of its slots is reserved
# for that.
TGI_SPARE = 4
_TGI_NUM_REQUESTS = 128
_USUAL = EngineConfig()


def check_settings(config: EngineConfig, kind: EngineKind, *known: str) -> None:
    """Check that the server has all changed settings, except those in ``known``.

    Raises:
        ConfigError: names a setting that the server does not have.
    """
    check_usual(config, kind, *(name for name in _UNKNOWN if name not in known))


def group_options(config: EngineConfig, tensor: str, experts: str = "") -> dict[str, str]:
    """Return the command-line options for a model on several devices.

    ``tensor`` and ``experts`` are the server's names of the options.
    """
    size = config.tensor_parallel
    options = {tensor: str(size)} if size > 1 else {}
    return options | ({experts: str(size)} if experts and config.expert_parallel else {})


def changed(config: EngineConfig, names: Iterable[str]) -> list[str]:
    """Return the names of settings that differ from their defaults."""
    return [name for name in names if getattr(config, name) != getattr(_USUAL, name)]


def given(config: EngineConfig, **options: str) -> dict[str, str]:
    """Return command-line options for the settings that differ from their defaults."""
    return {options[name]: str(getattr(config, name)) for name in changed(config, options)}


def check_usual(config: EngineConfig, kind: EngineKind, *names: str) -> None:
    """Check that these settings have their defaults.

    Raises:
        ConfigError: names a setting that does not.
    """
    for name in changed(config, names):
        raise ConfigError(
            f"worker.engine.{name} is a setting of Millrace's own engine. Remove it; "
            f"worker.engine.arguments takes options of {kind}."
        )


def device_variables(config: EngineConfig, *, hides_gpus: bool = True) -> dict[str, str]:
    """Return the variables by which a server finds its device and its number of threads.

    ``hides_gpus``: on a CPU, hide existing GPUs from the server.
    """
    variables = {}
    if config.device == "cpu" and hides_gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    elif config.device.startswith("cuda:"):
        variables["CUDA_VISIBLE_DEVICES"] = config.device.removeprefix("cuda:")
    if config.num_threads:
        variables["OMP_NUM_THREADS"] = str(config.num_threads)
    return variables


def words_of(options: Mapping[str, str]) -> tuple[str, ...]:
    """Return options as words of a command line."""
    return tuple(word for option in options.items() for word in option)


def vllm_command(program: Path, socket: Path, model: ServedModel, config: EngineConfig) -> Command:
    """Return the command of ``vllm serve`` on a Unix socket, with ``config.arguments`` last. Raises
    ConfigError.
    """
    check_settings(config, EngineKind.VLLM)
    options = {
        "--uds": str(socket),
        "--served-model-name": model.entry.name,
        "--max-model-len": str(model.context_window_tokens),
        "--dtype": config.dtype,
        "--max-num-seqs": str(num_sequences(config)),
        SCHEDULING_POLICY: "priority",
        # Ignore the server's own defaults for sampling.
        "--generation-config": "vllm",
        # The own engine's grammar library, so that all grammars mean the same.
        "--structured-outputs-config.backend": "guidance",
        "--max-logprobs": str(MAX_LOGPROBS + 1),
        "--kv-cache-dtype": config.kv_cache_dtype,
        "--load-format": config.load_format,
        **group_options(config, "--tensor-parallel-size"),
        **given(config, max_batch_tokens="--max-num-batched-tokens"),
    }
    kv_cache_bytes = config.kv_cache_bytes
    if not kv_cache_bytes and not _has_gpu(config):
        kv_cache_bytes = _CPU_KV_CACHE_BYTES
    if kv_cache_bytes:
        options["--kv-cache-memory-bytes"] = str(kv_cache_bytes)
    else:
        options["--gpu-memory-utilization"] = str(config.gpu_memory_fraction)
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
    """Return the maximum number of sequences that run at a time."""
    by_device = _GPU_NUM_SEQUENCES if _has_gpu(config) else _CPU_NUM_SEQUENCES
    return config.max_num_sequences or by_device


def _has_gpu(config: EngineConfig) -> bool:
    return config.device != "cpu" and any(device.exists() for device in _GPU_DEVICES)


def _environment(config: EngineConfig) -> dict[str, str]:
    # Only the development mode has /reset_prefix_cache. No other user reaches its socket.
    variables = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_SERVER_DEV_MODE": "1"}
    variables |= device_variables(config)
    if config.num_threads:
        # By default the system schedules the threads on any core.
        binding = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        variables["VLLM_CPU_OMP_THREADS_BIND"] = binding
    return variables


def sglang_command(
    program: Path, address: ServerAddress, model: ServedModel, config: EngineConfig
) -> Command:
    """Return the command that starts SGLang's server. Raises ConfigError for a setting that it
    lacks.
    """
    check_settings(config, EngineKind.SGLANG, "deterministic")
    if config.kv_cache_bytes:
        raise ConfigError(
            "SGLang does not support worker.engine.kv_cache_bytes; set "
            "worker.engine.gpu_memory_fraction, or --max-total-tokens in worker.engine.arguments."
        )
    options = {
        "--model-path": str(model.path),
        "--served-model-name": model.entry.name,
        "--host": "127.0.0.1",
        "--port": str(address.port),
        "--context-length": str(model.context_window_tokens),
        "--dtype": config.dtype,
        "--load-format": config.load_format,
        "--kv-cache-dtype": "fp8_e4m3" if config.kv_cache_dtype == "fp8" else "auto",
        # Ignore the server's own defaults for sampling.
        "--sampling-defaults": "openai",
        # The own engine's grammar library, so that all grammars mean the same.
        "--grammar-backend": "llguidance",
        "--log-level-http": "warning",
        **group_options(config, "--tp-size", "--ep-size"),
        **given(
            config,
            max_num_sequences="--max-running-requests",
            max_batch_tokens="--chunked-prefill-size",
            gpu_memory_fraction="--mem-fraction-static",
        ),
    }
    if config.device == "cpu":
        options["--device"] = "cpu"
    flags = ["--enable-metrics", "--enable-priority-scheduling", "--enable-cache-report"]
    # Otherwise each event repeats all tokens so far, and events grow with the answer.
    flags += ["--incremental-streaming-output"]
    flags += ["--enable-deterministic-inference"] if config.deterministic else []
    flags += [] if config.prefix_cache else ["--disable-radix-cache"]
    flags += [] if config.cuda_graphs else ["--disable-cuda-graph"]
    flags += [] if config.overlap else ["--disable-overlap-schedule"]
    # Everyone on the machine can read a command line.
    settings = address.folder / "sglang.yaml"
    settings.touch(mode=0o600)
    settings.write_text(f"api-key: {json.dumps(address.api_key)}\n")
    is_python = program.name.startswith("python")
    launch = ("-m", "sglang.launch_server") if is_python else ("serve",)
    words = (str(program), *launch, "--config", str(settings), *words_of(options), *flags)
    return Command((*words, *config.arguments), device_variables(config, hides_gpus=False))


def tgi_command(
    program: Path, address: ServerAddress, model: ServedModel, config: EngineConfig
) -> Command:
    """Return the command that starts TGI's server. Raises ConfigError for a setting that it
    lacks.
    """
    check_settings(config, EngineKind.TGI)
    check_usual(config, EngineKind.TGI, "load_format", "overlap")
    if config.kv_cache_bytes:
        raise ConfigError(
            "TGI does not support worker.engine.kv_cache_bytes; set "
            "worker.engine.gpu_memory_fraction, or --max-batch-total-tokens in "
            "worker.engine.arguments."
        )
    window = model.context_window_tokens
    num_requests = config.max_num_sequences or _TGI_NUM_REQUESTS
    options = {
        "--model-id": str(model.path),
        "--hostname": "127.0.0.1",
        "--port": str(address.port),
        # Any free port: its metrics are at the other port, too.
        "--prometheus-port": "0",
        "--shard-uds-path": str(address.folder / "shard"),
        "--max-input-tokens": str(window - 1),
        "--max-total-tokens": str(window),
        "--max-concurrent-requests": str(num_requests + -(-num_requests // (TGI_SPARE - 1))),
        "--usage-stats": "off",
        **group_options(config, "--num-shard"),
        **given(
            config,
            dtype="--dtype",
            gpu_memory_fraction="--cuda-memory-fraction",
            max_batch_tokens="--max-batch-prefill-tokens",
        ),
    }
    if config.kv_cache_dtype == "fp8":
        options["--kv-cache-dtype"] = "fp8_e4m3fn"
    if not config.cuda_graphs:
        options["--cuda-graphs"] = "0"
    # Everyone on the machine can read a command line, but not these variables.
    variables = {"API_KEY": address.api_key, **device_variables(config)}
    if not config.prefix_cache:
        variables["PREFIX_CACHING"] = "0"
    return Command((str(program), *words_of(options), *config.arguments), variables)


def trtllm_command(
    program: Path, address: ServerAddress, model: ServedModel, config: EngineConfig
) -> Command:
    """Return the command that starts TensorRT-LLM's server. Raises ConfigError for a setting that
    it lacks.
    """
    check_settings(config, EngineKind.TRTLLM)
    if config.device == "cpu":
        raise ConfigError("worker.engine.device is cpu; TensorRT-LLM runs on GPUs only.")
    if config.kv_cache_bytes:
        raise ConfigError(
            "TensorRT-LLM does not support worker.engine.kv_cache_bytes; set "
            "worker.engine.gpu_memory_fraction, which is there the share of the memory that the "
            "weights leave free."
        )
    settings = address.folder / "trtllm.yaml"
    # JSON is also valid YAML.
    settings.write_bytes(msgspec.json.encode(_trtllm_settings(config)))
    options = {
        "--host": "127.0.0.1",
        "--port": str(address.port),
        "--max_seq_len": str(model.context_window_tokens),
        "--max_batch_size": str(config.max_num_sequences or TRTLLM_NUM_SEQUENCES),
        "--extra_llm_api_options": str(settings),
        **group_options(config, "--tp_size", "--ep_size"),
        **given(config, max_batch_tokens="--max_num_tokens"),
    }
    words = (str(program), "serve", str(model.path), *words_of(options))
    return Command((*words, *config.arguments), device_variables(config))


def _trtllm_settings(config: EngineConfig) -> dict[str, Any]:
    cache: dict[str, Any] = {"enable_block_reuse": config.prefix_cache}
    if config.gpu_memory_fraction != _USUAL.gpu_memory_fraction:
        cache["free_gpu_memory_fraction"] = config.gpu_memory_fraction
    if config.kv_cache_dtype != "auto":
        cache["dtype"] = config.kv_cache_dtype
    settings: dict[str, Any] = {
        "kv_cache_config": cache,
        # Prompts may be longer than a step.
        "enable_chunked_prefill": True,
        # Figures for /metrics.
        "enable_iter_perf_stats": True,
        "disable_overlap_scheduler": not config.overlap,
        "dtype": config.dtype,
        "load_format": config.load_format,
    }
    if not config.cuda_graphs:
        settings["cuda_graph_config"] = None
    return settings

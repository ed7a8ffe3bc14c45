"""From a checkpoint to a runner on a device, with a KV cache of the size that is left for it."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError
from millrace.workers.adapters.slots import AdapterSlots, slot_elements
from millrace.workers.engine.device.adapters import DeviceAdapters
from millrace.workers.engine.device.buffers import Bounds
from millrace.workers.engine.device.device import Device, Stopwatch
from millrace.workers.engine.device.memory import cache_bytes, check_slots
from millrace.workers.engine.device.operations import DeviceOperations
from millrace.workers.engine.device.runner import Adapted, DeviceRunner
from millrace.workers.engine.kv.cache import KVCache, block_bytes, cache_dtype, choose_num_blocks
from millrace.workers.kernels.gpu.adapter_step import AdapterTiling
from millrace.workers.kernels.gpu.attention_shape import AttentionShape
from millrace.workers.kernels.gpu.kernel_set import KernelSet, choose_kernels, is_interpreted
from millrace.workers.kernels.gpu.step_inputs import StepShape
from millrace.workers.models.decoder import Decoder, DecoderWeights
from millrace.workers.models.device_linear import DeviceLinear
from millrace.workers.models.dummy import DummyTensors
from millrace.workers.models.loader import choose_dtype, load_weights
from millrace.workers.models.stacked_experts import stacked_experts
from millrace.workers.quantization.at_load import quantize_at_load
from millrace.workers.quantization.device import quantized_linears
from millrace.workers.quantization.device_experts import quantized_stacks

_log = logging.getLogger(__name__)


class _Plans(NamedTuple):
    """What a runner is made of, apart from its KV cache."""

    config: ModelConfig
    weights: DecoderWeights
    kernels: KernelSet
    device: Device
    engine: EngineConfig
    cache_dtype: torch.dtype
    slots: AdapterSlots | None


def load_device_runner(
    path: Path, config: ModelConfig, engine: EngineConfig, device: Device
) -> DeviceRunner:
    """Load a checkpoint onto a device. ``engine`` is settled.

    Raises CheckpointError, or ConfigError if the model does not fit.
    """
    watch = Stopwatch(device)
    where = device.torch_device
    dtype = choose_dtype(config, engine.dtype, where)
    kernels = choose_kernels("triton" if engine.kernels == "auto" else engine.kernels, where)
    if kernels.name == "triton" and is_interpreted() and dtype is not torch.float32:
        raise ConfigError(
            "Triton's interpreter rounds bfloat16 and float16 wrongly: set engine.dtype to float32."
        )
    if engine.kv_cache_dtype == "int8":
        raise ConfigError("A KV cache in int8 is for CPUs: a GPU's of 8 bits is fp8.")
    fixed, has_kernels = engine.deterministic, kernels.name == "triton"
    at_load = quantize_at_load(engine.quantization)
    product = partial(DeviceLinear, kernels=kernels, fixed=fixed)
    weights = load_weights(
        path,
        config,
        dtype=dtype,
        device=where,
        source=DummyTensors(dtype, where) if engine.load_format == "dummy" else None,
        product=product,
        experts=stacked_experts(kernels.experts, product, fixed=fixed),
        quantized=quantized_linears(product, dtype, fixed=fixed, has_kernels=has_kernels),
        stacks=quantized_stacks(kernels.experts, dtype, has_kernels=has_kernels),
        quantize=at_load.layers,
        quantize_head=at_load.head,
    )
    slots = _adapter_slots(config, engine, dtype, device)
    plans = _Plans(
        config, weights, kernels, device, engine, cache_dtype(engine.kv_cache_dtype, dtype), slots
    )
    _log.info("loaded the weights of %s in %.1f s", config.architecture, watch.lap_s())
    runner = _assemble(plans, _num_blocks(plans))
    # The references look at what is on their device, which a recording must not.
    if engine.cuda_graphs and not (kernels.name == "reference" and where.type == "cuda"):
        runner.record()
    _log.info(
        "%s in %s on %s by %s kernels, %d KV blocks of %d tokens in %s, ready after %.1f s more",
        config.architecture,
        str(dtype).removeprefix("torch."),
        where,
        kernels.name,
        runner.cache.num_blocks,
        runner.cache.block_size_tokens,
        str(plans.cache_dtype).removeprefix("torch."),
        watch.lap_s(),
    )
    return runner


def _adapter_slots(
    config: ModelConfig, engine: EngineConfig, dtype: torch.dtype, device: Device
) -> AdapterSlots | None:
    num_slots, max_rank = engine.max_adapters or 0, engine.max_adapter_rank
    if not num_slots:
        return None
    info = device.memory()
    if info is not None:
        slot_bytes = slot_elements(config, max_rank) * dtype.itemsize
        check_slots(info, num_slots=num_slots, max_rank=max_rank, slot_bytes=slot_bytes)
    return AdapterSlots(
        config, num_slots=num_slots, max_rank=max_rank, dtype=dtype, device=device.torch_device
    )


def _num_blocks(plans: _Plans) -> int:
    """Blocks of the KV cache: as many as the settings say, or as the device has memory for."""
    config, engine = plans.config, plans.engine
    size_bytes = block_bytes(config, engine.block_size_tokens, plans.cache_dtype)
    kv_cache_bytes = engine.kv_cache_bytes
    if not engine.num_blocks and not kv_cache_bytes:
        kv_cache_bytes = _profiled_bytes(plans, size_bytes)
    return choose_num_blocks(config, engine, kv_cache_bytes, plans.cache_dtype)


def _profiled_bytes(plans: _Plans, size_bytes: int) -> int:
    """What the KV cache may take, by trying the largest step without one."""
    engine, device = plans.engine, plans.device
    probe = _assemble(plans, 1)
    largest = StepShape(0, engine.max_batch_tokens, 1, engine.max_num_sequences)
    work_bytes = device.peak_bytes(lambda: probe.warm_up(largest, adapted=probe.takes_adapters))
    info = device.memory()
    assert info is not None, "settings leave the size to a device without memory of its own"
    _log.info(
        "the largest step needs %.2f GiB beside weights and buffers of %.2f GiB",
        *(work_bytes / 2**30, info.allocated / 2**30),
    )
    return cache_bytes(
        info, fraction=engine.gpu_memory_fraction, work_bytes=work_bytes, block_bytes=size_bytes
    )


def _assemble(plans: _Plans, num_blocks: int) -> DeviceRunner:
    config, weights, kernels, device, engine, dtype, slots = plans
    where = device.torch_device
    cache = KVCache(
        config,
        num_blocks=num_blocks,
        block_size_tokens=engine.block_size_tokens,
        dtype=dtype,
        device=where,
        shared=bool(engine.transfer),
    )
    attention = kernels.attention(
        AttentionShape(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            block_size=engine.block_size_tokens,
            windows=config.windows,
        ),
        max_sequences=engine.max_num_sequences,
        num_programs=device.num_programs,
        device=where,
        deterministic=engine.deterministic,
    )
    operations = DeviceOperations(
        kernels,
        attention,
        [cache.layer(layer) for layer in range(config.num_hidden_layers)],
        num_heads=config.num_attention_heads,
        epsilon=config.rms_norm_eps,
    )
    bounds = Bounds(
        num_sequences=engine.max_num_sequences,
        num_tokens=engine.max_batch_tokens,
        num_blocks=-(-config.context_window_tokens // engine.block_size_tokens),
    )
    adapted = None
    if slots is not None:
        tiling = AdapterTiling(len(slots.data), fixed=engine.deterministic)
        adapters = DeviceAdapters(config, device, slots, tiling, max_tokens=bounds.num_tokens)
        decoder = Decoder(config, adapters.weights(weights, kernels), operations)
        adapted = Adapted(adapters, decoder)
    return DeviceRunner(
        config,
        Decoder(config, weights, operations),
        cache,
        kernels=kernels,
        device=device,
        bounds=bounds,
        adapted=adapted,
        is_row_exact=engine.deterministic and config.experts is None,
    )

"""Loading of a checkpoint into a device's runner, with a KV cache of the remaining memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from millrace.engine.adapters.slots import AdapterSlots, slot_elements
from millrace.engine.config import KVMemoryShare, ResolvedEngineConfig
from millrace.engine.devices.cuda.adapters import DeviceAdapters
from millrace.engine.devices.cuda.device import Device, MemoryInfo, Stopwatch
from millrace.engine.devices.cuda.operations import DeviceOperations
from millrace.engine.devices.cuda.runner import DeviceRunner
from millrace.engine.devices.cuda.steps import Adapted, DeviceSteps, StepParts
from millrace.engine.kernels.gpu.adapter_step import AdapterTiling
from millrace.engine.kernels.gpu.attention_shape import AttentionShape
from millrace.engine.kernels.gpu.kernel_set import KernelSet, choose_kernels, is_interpreted
from millrace.engine.kernels.gpu.step_inputs import StepShape
from millrace.engine.kernels.operations import Collectives
from millrace.engine.kv.cache import (
    KVCache,
    block_bytes,
    cache_dtype,
    choose_num_blocks,
    fitting_blocks,
)
from millrace.engine.models.decoder import Decoder, DecoderWeights
from millrace.engine.models.dummy import DummyTensors
from millrace.engine.models.linears import DeviceLinear
from millrace.engine.models.loader import load_weights
from millrace.engine.models.stacked_experts import stacked_experts
from millrace.engine.quantization.device import quantized_linears
from millrace.engine.quantization.device_experts import quantized_stacks
from millrace.engine.quantization.rounding import quantize_at_load
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.checkpoints.shard import WHOLE_MODEL, Shard, shard_config
from millrace.schemas.errors import ConfigError

_GIB = float(1 << 30)


def cache_bytes(info: MemoryInfo, *, fraction: float, work_bytes: int, block_bytes: int) -> int:
    """Return the bytes for the KV cache within ``fraction`` of the device's memory.

    The cache, all memory in use now, and the work of a step share that fraction. ``work_bytes`` is
    the peak of the largest step; it is set aside twice, because recorded steps keep a memory pool
    of their own.

    Raises:
        ConfigError: Not even one block fits; the message has the numbers.
    """
    taken = info.total - info.free
    left = int(fraction * info.total) - taken - 2 * work_bytes
    if left >= block_bytes:
        return left
    raise ConfigError(
        f"The model does not fit: of the device's {info.total / _GIB:.2f} GiB, "
        f"engine.gpu_memory_fraction {fraction:g} gives {fraction * info.total / _GIB:.2f} GiB. "
        f"Weights and buffers take {info.allocated / _GIB:.2f} GiB, other processes "
        f"{(taken - info.allocated) / _GIB:.2f} GiB, the work of a step "
        f"{2 * work_bytes / _GIB:.2f} GiB, and one block of the KV cache needs "
        f"{block_bytes / _GIB:.4f} GiB. Raise the fraction, lower engine.max_batch_tokens or "
        f"engine.max_num_sequences, or serve a smaller model."
    )


_log = logging.getLogger(__name__)

StepsT = TypeVar("StepsT", bound=DeviceSteps)


class Plans(NamedTuple):
    """Parts of a runner apart from its KV cache.

    They cover all of a model of ``config`` or a rank's ``shard`` of it. ``collectives`` sums
    partial products where the shard is a slice.
    """

    config: ModelConfig
    weights: DecoderWeights
    kernels: KernelSet
    device: Device
    engine: ResolvedEngineConfig
    cache_dtype: torch.dtype
    slots: AdapterSlots | None
    shard: Shard
    collectives: Collectives | None

    @property
    def own(self) -> ModelConfig:
        """Config of the shard: its heads, widths and layers."""
        return shard_config(self.config, self.shard)

    @property
    def is_row_exact(self) -> bool:
        """True if a row of logits has the same bits for any other rows in the batch.

        Sums over ranks keep a fixed order where the kernels' sums do.
        """
        return self.engine.deterministic and self.config.experts is None


def load_device_runner(
    path: Path, config: ModelConfig, engine: ResolvedEngineConfig, device: Device
) -> DeviceRunner:
    """Load a checkpoint onto a device.

    Raises CheckpointError, or ConfigError if the model does not fit.
    """
    plans = load_plans(path, config, engine, device)
    return make_ready(plans, partial(DeviceRunner, is_row_exact=plans.is_row_exact))


def load_plans(
    path: Path,
    config: ModelConfig,
    engine: ResolvedEngineConfig,
    device: Device,
    shard: Shard = WHOLE_MODEL,
    collectives: Collectives | None = None,
) -> Plans:
    """Load the weights of a checkpoint, or of a rank's ``shard`` of it, onto a device.

    Raises CheckpointError or ConfigError.
    """
    watch = Stopwatch(device)
    where = device.torch_device
    dtype: torch.dtype = getattr(torch, engine.dtype)
    kernels = choose_kernels(engine.kernels, where)
    if kernels.name == "triton" and is_interpreted() and dtype is not torch.float32:
        raise ConfigError(
            "Triton's interpreter rounds bfloat16 and float16 wrongly: set engine.dtype to float32."
        )
    if engine.kv_cache_dtype == "int8":
        raise ConfigError(
            "A KV cache in int8 is for CPUs. Set engine.kv_cache_dtype to fp8 for a GPU."
        )
    fixed, has_kernels = engine.deterministic, kernels.name == "triton"
    at_load = quantize_at_load(engine.quantization)
    product = partial(DeviceLinear, kernels=kernels, fixed=fixed)
    weights = load_weights(
        path,
        config,
        dtype=dtype,
        device=where,
        source=DummyTensors(dtype, where) if engine.has_random_weights else None,
        product=product,
        experts=stacked_experts(kernels.experts, product, fixed=fixed),
        quantized=quantized_linears(product, dtype, fixed=fixed, has_kernels=has_kernels),
        stacks=quantized_stacks(kernels.experts, dtype, has_kernels=has_kernels),
        quantize=at_load.layers,
        quantize_head=at_load.head,
        shard=shard,
        collectives=collectives,
    )
    slots = _adapter_slots(shard_config(config, shard), engine, dtype, device)
    stored = cache_dtype(engine.kv_cache_dtype, dtype)
    _log.info("loaded the weights of %s in %.1f s", config.architecture, watch.lap_s())
    return Plans(config, weights, kernels, device, engine, stored, slots, shard, collectives)


def make_ready(
    plans: Plans,
    make: Callable[[StepParts], StepsT],
    agree: Callable[[int], int] = lambda num_blocks: num_blocks,
) -> StepsT:
    """Build the steps of ``plans`` by ``make``, with a KV cache, and record them if enabled.

    The cache gets as many blocks as memory allows, or the number that ranks ``agree`` on.

    Raises:
        ConfigError: The model does not fit.
    """
    watch = Stopwatch(plans.device)
    num_blocks = agree(_num_blocks(plans, make))
    steps = _assemble(plans, num_blocks, make)
    where = plans.device.torch_device
    # References read values on their device, which a recording must not do.
    is_looked_at = plans.kernels.name == "reference" and where.type == "cuda"
    if plans.engine.cuda_graphs and not is_looked_at:
        steps.record()
    _log.info(
        "%s in %s on %s by %s kernels, %d KV blocks of %d tokens in %s, ready after %.1f s more",
        plans.config.architecture,
        str(plans.weights.dtype).removeprefix("torch."),
        where,
        plans.kernels.name,
        steps.cache.num_blocks,
        steps.cache.block_size_tokens,
        str(plans.cache_dtype).removeprefix("torch."),
        watch.lap_s(),
    )
    return steps


def _adapter_slots(
    config: ModelConfig, engine: ResolvedEngineConfig, dtype: torch.dtype, device: Device
) -> AdapterSlots | None:
    """Return the adapter slots of the settings, or None.

    Raises:
        ConfigError: The slots do not fit beside the weights; the message has the numbers.
    """
    num_slots, max_rank = engine.max_adapters, engine.max_adapter_rank
    if not num_slots:
        return None
    info = device.memory()
    if info is not None:
        slot_bytes = slot_elements(config, max_rank) * dtype.itemsize
        if num_slots * slot_bytes > info.free:
            raise ConfigError(
                f"engine.max_adapters: {num_slots} slots of {slot_bytes / _GIB:.2f} GiB each, for "
                f"adapters of ranks up to {max_rank}, do not fit into the device's remaining "
                f"{info.free / _GIB:.2f} GiB. Lower engine.max_adapters or engine.max_adapter_rank."
            )
    return AdapterSlots(
        config, num_slots=num_slots, max_rank=max_rank, dtype=dtype, device=device.torch_device
    )


def _num_blocks(plans: Plans, make: Callable[[StepParts], StepsT]) -> int:
    """Return the number of KV cache blocks, from the settings or from the device's free memory.

    A size in the settings is for all ranks together.
    """
    engine, own = plans.engine, plans.own
    size = engine.kv_cache_size
    if not isinstance(size, KVMemoryShare):
        num_layers = plans.shard.size * plans.config.num_hidden_layers
        return choose_num_blocks(own, engine, plans.cache_dtype, num_layers)
    size_bytes = block_bytes(own, engine.block_size_tokens, plans.cache_dtype)
    fitting_bytes = _profiled_bytes(plans, size.fraction, size_bytes, make)
    return fitting_blocks(own, engine, fitting_bytes, plans.cache_dtype)


def _profiled_bytes(
    plans: Plans, fraction: float, size_bytes: int, make: Callable[[StepParts], StepsT]
) -> int:
    """Return the bytes for the KV cache at a ``fraction`` of the memory.

    Runs the largest step with a cache of one block to measure its memory.
    """
    engine, device = plans.engine, plans.device
    probe = _assemble(plans, 1, make)
    bounds = engine.bounds(plans.own.context_window_tokens)
    largest = StepShape(0, bounds.num_tokens, 1, bounds.num_sequences)
    work_bytes = device.peak_bytes(lambda: probe.warm_up(largest, adapted=probe.takes_adapters))
    info = device.memory()
    assert info is not None, "settings leave the size to a device without memory of its own"
    _log.info(
        "the largest step needs %.2f GiB beside weights and buffers of %.2f GiB",
        *(work_bytes / 2**30, info.allocated / 2**30),
    )
    return cache_bytes(info, fraction=fraction, work_bytes=work_bytes, block_bytes=size_bytes)


def _assemble(plans: Plans, num_blocks: int, make: Callable[[StepParts], StepsT]) -> StepsT:
    kernels, device, engine = plans.kernels, plans.device, plans.engine
    own, where = plans.own, device.torch_device
    cache = KVCache(
        own,
        num_blocks=num_blocks,
        block_size_tokens=engine.block_size_tokens,
        dtype=plans.cache_dtype,
        device=where,
        shared=engine.transfer,
    )
    bounds = engine.bounds(own.context_window_tokens)
    attention = kernels.attention(
        AttentionShape(
            num_heads=own.num_attention_heads,
            num_kv_heads=own.num_key_value_heads,
            head_dim=own.head_dim,
            block_size=engine.block_size_tokens,
            windows=own.windows,
        ),
        max_sequences=bounds.num_sequences,
        num_programs=device.num_programs,
        device=where,
        deterministic=engine.deterministic,
    )
    operations = DeviceOperations(
        kernels,
        attention,
        [cache.layer(layer) for layer in range(own.num_hidden_layers)],
        num_heads=own.num_attention_heads,
        epsilon=own.rms_norm_eps,
    )
    adapted = None
    if plans.slots is not None:
        tiling = AdapterTiling(len(plans.slots.data), fixed=engine.deterministic)
        adapters = DeviceAdapters(
            plans.config,
            device,
            plans.slots,
            tiling,
            max_tokens=bounds.num_tokens,
            shard=plans.shard,
        )
        weights = adapters.weights(plans.weights, kernels)
        adapted = Adapted(adapters, Decoder(own, weights, operations, plans.collectives))
    return make(
        StepParts(
            config=plans.config,
            decoder=Decoder(own, plans.weights, operations, plans.collectives),
            cache=cache,
            kernels=kernels,
            device=device,
            bounds=bounds,
            adapted=adapted,
        )
    )

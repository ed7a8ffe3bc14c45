"""Resolution of an engine's settings: every open choice is made once, before an engine is
loaded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal, NamedTuple, get_type_hints

import msgspec
import torch

from millrace.engine.config import (
    DEVICE_KERNELS,
    Collectives,
    Dtype,
    Kernels,
    KVBlocks,
    KVBytes,
    KVMemoryShare,
    ResolvedEngineConfig,
    Speculation,
    check_config,
)
from millrace.engine.devices.cpu.operations import suits
from millrace.engine.kernels.build import KernelBuildError, cpu_library
from millrace.engine.kernels.cpu import CpuKernels
from millrace.engine.models.loader import choose_dtype, is_widened
from millrace.engine.parallel.layout import check_remote_stages
from millrace.engine.transfer.nixl_agent import check_nixl
from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config
from millrace.registry.checkpoints.fingerprint import weights_fingerprint
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import DRAFT_FOLDER, draft_of, eagle3_of
from millrace.schemas.errors import ConfigError

_COLLECTIVES: tuple[Literal["auto"] | Collectives, ...] = ("auto", "shared_memory", "gloo")

_log = logging.getLogger(__name__)


class _Bounds(NamedTuple):
    """Defaults of a kind of device. ``kv_cache_bytes`` None: the rest of its memory."""

    num_sequences: int
    num_tokens: int
    kv_cache_bytes: int | None


# On two cores, 384 rows have the best rate; each of 512 rows takes a fifth longer.
_CPU = _Bounds(64, 384, 1 << 30)
# A GPU reads its weights once a step for any number of sequences, and a few thousand rows keep its
# matrix units busy.
_CUDA = _Bounds(256, 4096, None)
_CPU_ADAPTERS = 20


_OPEN = get_type_hints(EngineConfig)
# Settings of the same type in both structs are copied, except for those in which 0 or "auto" leaves
# a choice open.
_SETTLED = {
    name for name, kind in get_type_hints(ResolvedEngineConfig).items() if _OPEN.get(name) == kind
} - {"device", "max_num_sequences", "max_batch_tokens"}

_NAMES: dict[torch.dtype, Dtype] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


class _Arithmetic(NamedTuple):
    kernels: Kernels
    dtype: Dtype
    only_own_products: bool = False


def resolve(
    path: Path, config: EngineConfig, *, among_others: bool = False
) -> ResolvedEngineConfig:
    """Resolve the settings for an engine of the checkpoint folder ``path``.

    Args:
        path: The checkpoint folder.
        config: The user's settings.
        among_others: Engines of other workers may exchange KV blocks with this one.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        ConfigError: A setting is out of range or does not fit the others.
    """
    check_config(config)
    check_remote_stages(config)
    device = choose_device(config.device)
    bounds = _CUDA if device.type == "cuda" else _CPU
    arithmetic = _arithmetic(read_model_config(path), config, device)
    has_device_kernels = arithmetic.kernels in DEVICE_KERNELS
    resolved = ResolvedEngineConfig(
        **{name: getattr(config, name) for name in _SETTLED},
        device=str(device),
        kernels=arithmetic.kernels,
        dtype=arithmetic.dtype,
        only_own_products=arithmetic.only_own_products,
        has_random_weights=config.load_format == "dummy",
        max_num_sequences=config.max_num_sequences or bounds.num_sequences,
        max_batch_tokens=config.max_batch_tokens or bounds.num_tokens,
        kv_cache_size=_kv_cache_size(config, bounds),
        kv_cache_dtype=None if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        num_threads=config.num_threads or None,
        collectives=None,
        speculation=_speculation(path, config, has_device_kernels=has_device_kernels),
        max_adapters=_max_adapters(config, has_device_kernels=has_device_kernels),
        ageing_s=config.ageing_s or None,
        itl_bound_s=config.itl_bound_ms / 1e3 or None,
        disk_cache_path=config.disk_cache_path or None,
        object_cache_url=config.object_cache_url or None,
        transfer=False,
        transfer_address=config.transfer_address or None,
    )
    _check_whole_blocks(resolved)
    return msgspec.structs.replace(
        resolved,
        collectives=_collectives(config, resolved),
        transfer=_transfer(path, config, resolved, among_others=among_others),
    )


def choose_device(name: str) -> torch.device:
    """Return the device by name; for "auto" a GPU if there is one, else the CPU.

    Raises ConfigError.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device is {name!r}; choose auto, cpu or cuda.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device is {name!r}, but this machine has no CUDA device.")
    return device


def _arithmetic(model: ModelConfig, config: EngineConfig, device: torch.device) -> _Arithmetic:
    """Choose the kernels and the type of the computation.

    The compiled kernels' own products are used where weights are quantized or rows have to be
    exact, and where a small model then does not have to be widened to be exact. Raises ConfigError.
    """
    wants_triton = config.kernels == "auto" and device.type == "cuda"
    for kernels in DEVICE_KERNELS:
        if config.kernels == kernels or (wants_triton and kernels == "triton"):
            return _Arithmetic(kernels, _NAMES[choose_dtype(model, config.dtype, device)])
    packs = config.quantization is not None or _is_asked(config.speculation)
    is_auto = config.dtype == "auto" and not packs
    is_exact = is_auto and _is_exact_in_bfloat16(model) and is_widened(model, device)
    if is_exact and _has_native(config.kernels, model, torch.bfloat16, device):
        return _Arithmetic("native", "bfloat16", only_own_products=True)
    dtype = choose_dtype(model, config.dtype, device, packs=packs)
    if _has_native(config.kernels, model, dtype, device):
        only_own = packs or config.kernels == "native"
        return _Arithmetic("native", _NAMES[dtype], only_own)
    return _Arithmetic("torch", _NAMES[dtype])


def _is_exact_in_bfloat16(model: ModelConfig) -> bool:
    """Return whether the compiled kernels' own products are batch-invariant for a checkpoint.

    They are for bfloat16 with a head, without quantization and experts. It then does not have to
    be widened to float32, in which it would be batch-invariant, too.
    """
    is_wide = model.dtype == "bfloat16" and model.quantization is None
    return is_wide and model.has_head and model.experts is None


def _has_native(choice: str, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the compiled kernels are wanted and available.

    Raises ConfigError for "native" if they are not available.
    """
    why = f"they do not compute {model.architecture} of this shape in {dtype} on {device}."
    if choice != "torch" and suits(model, dtype, device):
        try:
            CpuKernels(cpu_library(), dtype)
        except (KernelBuildError, OSError) as error:
            why = str(error)
            _log.warning("no compiled kernels; torch computes the model, more slowly: %s", why)
        else:
            return True
    if choice == "native":
        raise ConfigError(f"engine.kernels is 'native', but there are no kernels: {why}")
    return False


def _kv_cache_size(config: EngineConfig, bounds: _Bounds) -> KVBlocks | KVBytes | KVMemoryShare:
    if config.num_blocks:
        return KVBlocks(config.num_blocks)
    num_bytes = config.kv_cache_bytes or bounds.kv_cache_bytes
    return KVMemoryShare(config.gpu_memory_fraction) if num_bytes is None else KVBytes(num_bytes)


def _max_adapters(config: EngineConfig, *, has_device_kernels: bool) -> int:
    if config.max_adapters is not None:
        return config.max_adapters
    return 0 if has_device_kernels else _CPU_ADAPTERS


def _is_asked(speculation: str | bool | None) -> bool:
    return speculation not in (None, "off", False)


def _speculation(
    path: Path, config: EngineConfig, *, has_device_kernels: bool
) -> Speculation | None:
    """Resolve the source of proposed tokens. Device kernels propose none unless asked to.

    Raises ConfigError for a source that this engine cannot have.
    """
    if config.speculation in ("off", False):
        return None
    draft, eagle3 = draft_of(config.speculation), eagle3_of(config.speculation)
    is_asked = _is_asked(config.speculation)
    if config.pipeline_parallel > 1:
        if is_asked:
            raise ConfigError(
                "engine.speculation: a pipeline starts a step before the tokens of the last one "
                "are known, so no tokens can be proposed; leave it out."
            )
        return None
    if has_device_kernels:
        if draft is not None or eagle3 is not None:
            raise ConfigError(
                "engine.speculation: drafts and heads compute on a CPU, for models on a CPU; "
                "choose ngram on a GPU."
            )
        if not is_asked:
            return None
    own = path / DRAFT_FOLDER
    if not is_asked and (own / "config.json").is_file():
        draft = str(own)
    return Speculation(draft=draft, eagle3=eagle3, is_asked=is_asked)


def _collectives(config: EngineConfig, resolved: ResolvedEngineConfig) -> Collectives | None:
    """Choose how ranks exchange numbers.

    Raises ConfigError if shared memory is needed or asked for and not available.
    """
    if resolved.num_ranks == 1:
        return None
    if config.collectives not in _COLLECTIVES:
        raise ConfigError(
            f"engine.collectives is {config.collectives!r}; choose {', '.join(_COLLECTIVES)}."
        )
    num_linked = config.remote_stages if resolved.has_device_ranks else config.pipeline_parallel - 1
    if config.collectives == "gloo":
        if num_linked:
            raise ConfigError(
                "engine.collectives is 'gloo', but the stages of a pipeline are linked by shared "
                "memory; leave it out."
            )
        return "gloo"
    try:
        cpu_library()
    except KernelBuildError as error:
        if config.collectives == "shared_memory" or num_linked:
            raise ConfigError(
                f"Ranks share no memory without the compiled kernels: {error.message}"
            ) from error
        _log.warning("ranks exchange numbers by Gloo, more slowly: %s", error.message)
        return "gloo"
    return "shared_memory"


def _check_whole_blocks(config: ResolvedEngineConfig) -> None:
    """Raise ConfigError if settings need whole blocks and each rank has only parts."""
    for name in ("disk_cache_path", "object_cache_url"):
        if getattr(config, name) is not None and config.has_parted_blocks:
            raise ConfigError(
                f"engine.{name} keeps whole blocks, but each rank of this group has only a part of "
                "each block; leave it out."
            )


def _transfer(
    path: Path, config: EngineConfig, resolved: ResolvedEngineConfig, *, among_others: bool
) -> bool:
    """Return whether blocks are exchanged with other engines; by default only ``among_others``.

    Raises ConfigError if the settings ask for it and it is not possible.
    """
    reason = _why_no_transfer(path, resolved)
    for name in ("transfer", "transfer_address", "transfer_any_ranks"):
        if reason and getattr(config, name):
            raise ConfigError(f"engine.{name}: {reason}.")
    if reason and config.transfer_transport != "plain":
        raise ConfigError(f"engine.transfer_transport: {reason}.")
    if config.transfer is False:
        for name in ("transfer_any_ranks", "transfer_address"):
            if getattr(config, name):
                raise ConfigError(
                    f"engine.{name} needs engine.transfer, which is off; leave one of them out."
                )
        if config.transfer_transport != "plain":
            raise ConfigError(
                "engine.transfer_transport needs engine.transfer, which is off; leave one of them "
                "out."
            )
    if config.transfer_transport == "nixl":
        check_nixl()
    wanted = among_others if config.transfer is None else config.transfer
    return wanted and not reason


def _why_no_transfer(path: Path, config: ResolvedEngineConfig) -> str:
    if not (config.prefix_cache and config.host_cache_bytes):
        return (
            "exchanging blocks needs engine.prefix_cache, to find them, and "
            "engine.host_cache_bytes, to receive them"
        )
    if config.has_parted_blocks:
        return (
            "only whole blocks can be exchanged, but each rank of this group has only a part of "
            "each block"
        )
    if config.has_random_weights or not weights_fingerprint(path):
        return (
            "blocks are exchanged between workers with the same weights, and random weights have "
            "no fingerprint to compare"
        )
    return ""

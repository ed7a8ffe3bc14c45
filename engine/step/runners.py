"""Selection and loading of an engine's runner and of its draft."""

from __future__ import annotations

from pathlib import Path

import torch

from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.devices.cpu.eagle_head import HeadRunner
from millrace.engine.devices.cpu.runner import ModelRunner
from millrace.engine.devices.cuda.device import device_of
from millrace.engine.devices.cuda.loading import load_device_runner
from millrace.engine.models.dummy import DummyTensors
from millrace.engine.models.loader import load_embedding
from millrace.engine.parallel.loading import load_group
from millrace.engine.step.device_work import FLOP_PER_BYTE, DeviceWork
from millrace.engine.step.runner import DraftRunner, Runner
from millrace.engine.step.settings import resolve
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.gguf.checkpoint_folder import checkpoint_folder
from millrace.registry.gguf.parts import GGUF_ENDING
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError


def load_runner(path: Path, engine: ResolvedEngineConfig) -> Runner:
    """Load a checkpoint for a group of ranks, a device with its own kernels, or the CPU.

    Raises CheckpointError or ConfigError.
    """
    if engine.num_ranks != 1:
        return load_group(path, engine)
    if engine.has_device_kernels:
        device = device_of(torch.device(engine.device))
        return load_device_runner(path, read_model_config(path), engine, device)
    return ModelRunner.load(path, engine)


def load_draft(path: Path, target: Runner, engine: ResolvedEngineConfig) -> DraftRunner | None:
    """Load the draft or the head of the settings for ``target``, the runner of the checkpoint
    folder ``path``.

    A draft has as many blocks as ``target``. Returns None if the settings name neither, or if the
    rows of ``target`` are not exact (batch-invariant). Raises CheckpointError or ConfigError.
    """
    wanted = engine.speculation
    if wanted is None or not target.is_row_exact:
        return None
    if wanted.eagle3 is not None and isinstance(target, ModelRunner):
        return HeadRunner.load(Path(wanted.eagle3), target, _whole_embedding(path, target, engine))
    if wanted.draft is None:
        return None
    folder, cache = _draft_folder(Path(wanted.draft)), target.cache
    config = EngineConfig(
        device="cpu",
        speculation="ngram",
        num_blocks=cache.num_blocks,
        block_size_tokens=cache.block_size_tokens,
    )
    draft = ModelRunner.load(folder, resolve(folder, config))
    _check_draft(target, draft)
    return draft


def _draft_folder(draft: Path) -> Path:
    """Return the draft's folder, made from its file if it is a GGUF file."""
    return checkpoint_folder(draft) if draft.suffix == GGUF_ENDING else draft


def _whole_embedding(path: Path, target: ModelRunner, engine: ResolvedEngineConfig) -> torch.Tensor:
    """Return the whole embedding of a target's checkpoint.

    Each rank of a group has only a part of it.
    """
    if engine.tensor_parallel == 1:
        return target.embedding
    own = target.embedding
    source = DummyTensors(own.dtype, own.device) if engine.has_random_weights else None
    return load_embedding(path, target.config, own.dtype, own.device, source)


def _check_draft(target: Runner, draft: Runner) -> None:
    """Raise ConfigError for a draft that does not fit its target."""
    if draft.config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"engine.speculation: the draft has {draft.config.vocab_size} tokens and the model "
            f"{target.config.vocab_size}; choose a draft with the same vocabulary."
        )
    if draft.config.context_window_tokens < target.config.context_window_tokens:
        raise ConfigError(
            f"engine.speculation: the draft's context window of "
            f"{draft.config.context_window_tokens} tokens is shorter than the model's, "
            f"{target.config.context_window_tokens}; choose another draft."
        )
    if not draft.config.has_head or draft.host_device != torch.device("cpu"):
        raise ConfigError("engine.speculation: a draft must be a language model on the CPU.")


def device_work_of(runner: Runner) -> DeviceWork:
    """Return the roofline model by which the runner's steps are charged to sequences."""
    cache = runner.cache
    num_weights, num_bytes = runner.weight_size
    return DeviceWork(
        runner.config,
        weight_bytes=num_bytes / num_weights,
        kv_token_bytes=cache.block_bytes
        / (runner.config.num_hidden_layers * cache.block_size_tokens),
        flop_per_byte=FLOP_PER_BYTE["cuda" if cache.data.device.type == "cuda" else "cpu"],
    )


def device_uuid_of(runner: Runner) -> str:
    """Return the UUID of the runner's CUDA device; empty on a CPU."""
    device = runner.cache.data.device
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)

"""Which runner an engine has."""

from __future__ import annotations

from pathlib import Path

import torch

from millrace.engine.devices.cpu.eagle_head import HeadRunner
from millrace.engine.devices.cpu.runner import ModelRunner
from millrace.engine.devices.cuda.device import device_of
from millrace.engine.devices.cuda.loading import load_device_runner
from millrace.engine.models.dummy import DummyTensors
from millrace.engine.models.loader import load_embedding
from millrace.engine.parallel.cpu_loading import load_group
from millrace.engine.parallel.device_loading import load_device_group
from millrace.engine.parallel.layout import check_remote_stages
from millrace.engine.step.device_work import FLOP_PER_BYTE, DeviceWork
from millrace.engine.step.runner import DraftRunner, Runner
from millrace.engine.step.settings import (
    check_parted_blocks,
    choose_device,
    has_device_ranks,
    with_device_defaults,
)
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import DRAFT_FOLDER, draft_of, eagle3_of
from millrace.schemas.errors import ConfigError


def load_runner(path: Path, engine: EngineConfig) -> Runner:
    """Load a checkpoint for a device that is told what to do, or for the CPU.

    Raises CheckpointError or ConfigError.
    """
    check_parted_blocks(engine)
    if engine.tensor_parallel != 1 or engine.pipeline_parallel != 1:
        _check_group(engine)
        return (load_device_group if has_device_ranks(engine) else load_group)(path, engine)
    check_remote_stages(engine)
    device = choose_device(engine.device)
    on_cuda = device.type == "cuda"
    if engine.kernels in ("triton", "reference") or (on_cuda and engine.kernels == "auto"):
        config = read_model_config(path)
        return load_device_runner(
            path, config, with_device_defaults(engine, device), device_of(device)
        )
    return ModelRunner.load(path, engine)


def load_draft(path: Path, target: Runner, engine: EngineConfig) -> DraftRunner | None:
    """The draft or the head that the settings name or, where they leave it open, the draft that
    comes with the checkpoint folder ``path`` of ``target``, in as many blocks as that has; None if
    there is none. Raises CheckpointError or ConfigError."""
    head_path = eagle3_of(engine.speculation)
    if target.overlaps:
        _check_on_device(engine)
        return None
    if head_path is not None and target.is_row_exact and isinstance(target, ModelRunner):
        return HeadRunner.load(Path(head_path), target, _whole_embedding(path, target, engine))
    folder = _draft_folder(path, engine)
    if folder is None or not target.is_row_exact or target.num_stages > 1:
        return None
    cache = target.cache
    draft = ModelRunner.load(
        folder,
        EngineConfig(
            device="cpu",
            kernels=engine.kernels,
            speculation="ngram",
            num_blocks=cache.num_blocks,
            block_size_tokens=cache.block_size_tokens,
            max_num_sequences=engine.max_num_sequences,
        ),
    )
    _check_draft(target, draft)
    return draft


def _check_group(engine: EngineConfig) -> None:
    """Raise ConfigError for what a group cannot propose tokens with, before its ranks take minutes
    to load."""
    if engine.pipeline_parallel > 1 and engine.speculation not in (None, "off", False):
        raise ConfigError(
            "engine.speculation: a step of a pipeline begins before the tokens of the one before "
            "it are known, so there is nothing to propose from; leave it out."
        )
    if has_device_ranks(engine):
        _check_on_device(engine)


def _whole_embedding(path: Path, target: ModelRunner, engine: EngineConfig) -> torch.Tensor:
    """That of a target's checkpoint, of which each rank of a group has a part."""
    if engine.tensor_parallel == 1:
        return target.embedding
    own = target.embedding
    is_dummy = engine.load_format == "dummy"
    source = DummyTensors(own.dtype, own.device) if is_dummy else None
    return load_embedding(path, target.config, own.dtype, own.device, source)


def _check_on_device(engine: EngineConfig) -> None:
    speculation = engine.speculation
    if eagle3_of(speculation) is not None or draft_of(speculation) is not None:
        raise ConfigError(
            "engine.speculation: drafts and heads compute on a CPU, beside a model that does; "
            "choose ngram on a GPU."
        )


def _draft_folder(path: Path, engine: EngineConfig) -> Path | None:
    named = draft_of(engine.speculation)
    if named is not None:
        return Path(named)
    own = path / DRAFT_FOLDER
    return own if engine.speculation is None and (own / "config.json").is_file() else None


def _check_draft(target: Runner, draft: Runner) -> None:
    """Raise ConfigError for a draft that cannot speak for a target."""
    if draft.config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"engine.speculation: the draft has {draft.config.vocab_size} tokens and the model "
            f"{target.config.vocab_size}: a draft needs the same vocabulary."
        )
    if draft.config.context_window_tokens < target.config.context_window_tokens:
        raise ConfigError(
            f"engine.speculation: the draft's context window of "
            f"{draft.config.context_window_tokens} tokens is shorter than the model's, "
            f"{target.config.context_window_tokens}."
        )
    if not draft.config.has_head or draft.host_device != torch.device("cpu"):
        raise ConfigError("engine.speculation: a draft is a language model on the same CPU.")


def device_work_of(runner: Runner) -> DeviceWork:
    """What the runner's steps are shared by."""
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
    """That of the CUDA device on which it computes; empty on a CPU."""
    device = runner.cache.data.device
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)

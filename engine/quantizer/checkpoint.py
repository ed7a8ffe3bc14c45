"""Writer of a quantized checkpoint from a wide one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from safetensors import SafetensorError
from safetensors.torch import save_file

from millrace.engine.quantization.rounding import (
    GROUP_INPUTS,
    GROUP_STEP,
    rounded_float8,
    rounded_int4,
    rounded_int8,
)
from millrace.engine.quantization.weight import QuantizedWeight
from millrace.engine.quantizer.calibration import CalibratedLayers
from millrace.engine.quantizer.schemes import (
    LINEAR_NAMES,
    ROUTERS,
    QuantizerScheme,
    quantization_config,
)
from millrace.registry.checkpoints.checkpoint import (
    ModelConfig,
    TensorIndex,
    open_tensors,
    read_model_config,
)
from millrace.registry.checkpoints.json_fields import read_json_object
from millrace.registry.checkpoints.tensors import INDEX_FILE, SINGLE_FILE
from millrace.schemas.errors import CheckpointError, ConfigError

_PER_WORD, _BITS, _OFFSET = 8, 4, 8
_METADATA = {"format": "pt"}
_CONFIG = "config.json"
_QUANTIZED_FIELDS = ("quantization_config", "compression_config")
_WEIGHT = ".weight"
_SHARD_BYTES = 1 << 30
# File names of weights, in this layout and others.
_WEIGHT_ENDINGS = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth"),
    *(".gguf", ".h5", ".msgpack", ".onnx"),
)
_SIDE_FOLDERS = "*_Pooling"

_Rounded = Callable[..., QuantizedWeight]


def stored_tensors(
    module: str, weight: QuantizedWeight, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the tensors of ``module`` by their names in the checkpoint, on the CPU.

    Scales are stored in ``dtype``, for which they were made. The weight must be symmetric, with
    inputs in their own order.
    """
    assert weight.order is None, "this layout has inputs in their own order"
    assert weight.zeros is None, "the schemes that are made are symmetric"
    tensors = {"weight_scale": weight.scales.to(dtype)}
    if weight.bits == _BITS:
        tensors["weight_packed"] = packed(weight.codes)
        tensors["weight_shape"] = torch.tensor(weight.codes.shape, dtype=torch.int64)
    else:
        tensors["weight"] = weight.codes
    return {f"{module}.{name}": tensor.cpu().contiguous() for name, tensor in tensors.items()}


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes from -8 to 7, [num_rows, num_columns], to int32 [num_rows, ceil(columns / 8)]."""
    nibbles = F.pad(codes.to(torch.int32) + _OFFSET, (0, -codes.shape[1] % _PER_WORD))
    words = nibbles.reshape(len(codes), -1, _PER_WORD)
    shifts = torch.arange(0, _PER_WORD * _BITS, _BITS, dtype=torch.int32, device=codes.device)
    return (words << shifts).sum(-1).to(torch.int32)


class ShardWriter:
    """Writer of shards; holds up to ``shard_bytes`` of tensors, or one larger tensor, in memory."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._waiting_bytes = 0
        self._shards: list[list[str]] = []
        self.num_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add ``tensor``, which is on the CPU.

        Raises OSError or SafetensorError on a failed write.
        """
        if self._waiting and self._waiting_bytes + tensor.nbytes > self._shard_bytes:
            self._write()
        # The format rejects tensors that share memory.
        self._waiting[name] = tensor.clone(memory_format=torch.contiguous_format)
        self._waiting_bytes += tensor.nbytes
        self.num_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the remaining tensors, and an index for several files. Raises as ``add`` does."""
        self._write()
        if len(self._shards) == 1:
            self._part(0).rename(self._folder / SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            name = f"model-{number + 1:05}-of-{len(self._shards):05}.safetensors"
            self._part(number).rename(self._folder / name)
            weight_map |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"

    def _write(self) -> None:
        part = self._part(len(self._shards))
        save_file(self._waiting, part, _METADATA)
        # The library creates files readable by the user only; use the folder's permissions instead.
        part.chmod(self._folder.stat().st_mode & 0o666)
        self._shards.append(list(self._waiting))
        self._waiting, self._waiting_bytes = {}, 0


class Made(NamedTuple):
    """Result: the number of quantized linear maps, and the bytes of all tensors before and
    after.
    """

    num_quantized: int
    bytes_before: int
    bytes_after: int


class Recipe(NamedTuple):
    """Recipe of quantization.

    ``group_inputs`` is the group size of int4, a multiple of 32. ``texts`` are token ids for a
    calibration of int4, or None to round weights to nearest.
    """

    scheme: QuantizerScheme
    group_inputs: int = GROUP_INPUTS
    texts: Sequence[Sequence[int]] | None = None

    def check(self) -> None:
        """Raise ConfigError for settings that exclude each other."""
        if self.group_inputs < GROUP_STEP or self.group_inputs % GROUP_STEP:
            raise ConfigError(
                f"A group must be a multiple of {GROUP_STEP} inputs, got {self.group_inputs}."
            )
        if self.texts is not None and self.scheme is not QuantizerScheme.W4A16:
            raise ConfigError(
                f"{self.scheme} needs no calibration: its scales follow from the weights and from "
                "the inputs at run time. Remove the calibration, or choose "
                f"{QuantizerScheme.W4A16}."
            )
        if self.texts is not None and not any(self.texts):
            raise ConfigError("The calibration has no tokens.")


def check_input(path: Path) -> ModelConfig:
    """Read the config of the checkpoint at ``path``.

    Raises CheckpointError if the decoder does not support it or it is already quantized.
    """
    fields = read_json_object(path / _CONFIG)
    for name in _QUANTIZED_FIELDS:
        if fields.get(name) is not None:
            raise CheckpointError(
                f"{path / _CONFIG} has a field {name}: the weights are quantized already. Name the "
                "original wide checkpoint."
            )
    return read_model_config(path)


def check_output(path: Path) -> None:
    """Raise ConfigError unless ``path`` is missing or an empty folder."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file. The output must be a new or empty folder.")
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"The folder {path} is not empty. Name another folder, or remove it.")


def quantize_checkpoint(
    source: Path,
    output: Path,
    recipe: Recipe,
    device: torch.device,
    *,
    on_layer: Callable[[], object] = lambda: None,
    shard_bytes: int = _SHARD_BYTES,
) -> Made:
    """Write the checkpoint folder ``source`` to ``output`` with its layers' linear maps quantized.

    ``recipe`` says how. Heads, embeddings and routers of experts stay wide. ``output`` appears only
    when it is complete. ``on_layer`` is called after each layer. Memory holds one layer and
    ``shard_bytes`` at a time.

    Raises:
        CheckpointError: The source cannot be read or has weights that are not finite.
        ConfigError: The recipe or the output is invalid.
    """
    recipe.check()
    config = check_input(source)
    check_output(output)
    index = open_tensors(source)
    whole = output.resolve()
    unfinished = whole.with_name(f".{whole.name}.{os.getpid()}.unfinished")
    try:
        try:
            unfinished.mkdir(parents=True)
            job = _Job(index, config, recipe, device, ShardWriter(unfinished, shard_bytes))
            made = job.run(on_layer)
            _write_side_files(source, unfinished, job)
            unfinished.replace(whole)
        except (OSError, SafetensorError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"{output} cannot be written: {why}.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return made


class _Job:
    """Job that goes through the tensors by layer and records the result for each."""

    def __init__(
        self,
        index: TensorIndex,
        config: ModelConfig,
        recipe: Recipe,
        device: torch.device,
        writer: ShardWriter,
    ) -> None:
        self._index = index
        self._config = config
        self._recipe = recipe
        self._device = device
        self._writer = writer
        self._prefix = "model." if any(name.startswith("model.") for name in index) else ""
        # Readers keep scales in the dtype of their computation.
        self._scale_dtype: torch.dtype = getattr(torch, config.dtype)
        self._bytes_before = 0
        self._groups: dict[str, int | None] = {}

    @property
    def quantization_config(self) -> dict[str, object]:
        """Return the quantization field of ``config.json``."""
        config = self._config
        ignored = ["lm_head"] if config.has_head else []
        if config.classifier is not None:
            ignored.append("score")
        if config.experts is not None:
            ignored += ROUTERS
        return quantization_config(self._recipe.scheme, self._groups, ignored)

    def run(self, on_layer: Callable[[], object]) -> Made:
        """Write all tensors."""
        config, recipe = self._config, self._recipe
        calibrated = None
        if recipe.texts is not None:
            texts = [text for text in recipe.texts if text]
            calibrated = CalibratedLayers(self._index, config, self._prefix, texts, self._device)
        for number in range(config.num_hidden_layers):
            names = self._names_of(number)
            given: Mapping[str, QuantizedWeight] = {}
            if calibrated is not None:
                for name in names:
                    self._load(name)
                given = calibrated.quantized(
                    number,
                    group_inputs=recipe.group_inputs,
                    scale_dtype=self._scale_dtype,
                )
            self._write(names, given)
            on_layer()
        self._write(self._other_names(), {})
        self._writer.finish()
        return Made(len(self._groups), self._bytes_before, self._writer.num_bytes)

    def _names_of(self, number: int) -> list[str]:
        prefix = f"{self._prefix}layers.{number}."
        return sorted(name for name in self._index if name.startswith(prefix))

    def _other_names(self) -> Iterator[str]:
        layers = tuple(
            f"{self._prefix}layers.{number}." for number in range(self._config.num_hidden_layers)
        )
        return (name for name in self._index if not name.startswith(layers))

    def _write(self, names: Iterable[str], given: Mapping[str, QuantizedWeight]) -> None:
        for name in names:
            tensor = self._load(name)
            self._bytes_before += tensor.nbytes
            module = name.removesuffix(_WEIGHT)
            if not _is_linear(name):
                self._writer.add(name, tensor)
                continue
            weight = given[name] if name in given else self._rounded(tensor)
            whole = weight.group_inputs == weight.num_inputs
            self._groups[module] = None if whole else weight.group_inputs
            for stored, part in stored_tensors(module, weight, self._scale_dtype).items():
                self._writer.add(stored, part)

    def _load(self, name: str) -> torch.Tensor:
        tensor = self._index.load(name, self._index[name].shape)
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"Tensor {name} in {self._index[name].file} has values that are not finite."
            )
        return tensor

    def _rounded(self, tensor: torch.Tensor) -> QuantizedWeight:
        recipe = self._recipe
        by_scheme: dict[QuantizerScheme, _Rounded] = {
            QuantizerScheme.W8A8_INT8: rounded_int8,
            QuantizerScheme.W8A8_FP8: rounded_float8,
            QuantizerScheme.W4A16: partial(rounded_int4, group_inputs=recipe.group_inputs),
        }
        return by_scheme[recipe.scheme](tensor.to(self._device), scale_dtype=self._scale_dtype)


def _is_linear(name: str) -> bool:
    """Return whether a tensor is the weight of a linear map that is quantized."""
    parts = name.split(".")
    return parts[-1] == "weight" and parts[-2] in LINEAR_NAMES and "layers" in parts


def _write_side_files(source: Path, folder: Path, job: _Job) -> None:
    """Copy all files beside the weights, and write ``config.json`` with the quantization."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_ENDINGS):
            shutil.copyfile(file, folder / file.name)
    for side in sorted(source.glob(_SIDE_FOLDERS)):
        shutil.copytree(side, folder / side.name)
    config = read_json_object(source / _CONFIG)
    config["quantization_config"] = job.quantization_config
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")

"""Matrices of an adapter, found and checked by the header of its file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from millrace.registry.checkpoints.adapters.config import (
    CONFIG_FILE,
    MAX_RANK,
    AdapterConfig,
    read_adapter_config,
)
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.checkpoints.tensors import FLOATS, TensorIndex, TensorInfo, open_file
from millrace.schemas.errors import AdapterError, CheckpointError

WEIGHTS_FILE = "adapter_model.safetensors"
# Projections that adapters may change, in the order of a layer.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ATTENTION = TARGETS[:4]

# Older versions of PEFT leave the adapter's name in.
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.\w+)?\.weight"
)
_MODULE = re.compile(r"(?:.*\.)?layers\.(?P<layer>\d+)\.(?P<block>self_attn|mlp)\.(?P<target>\w+)")
_READ_BYTES = 1 << 20
_VERSION_CHARACTERS = 16


class AdaptedMatrix(NamedTuple):
    """Addition to one projection of a layer: ``scale`` times the tensor ``b`` [num_outputs, rank]
    times ``a`` [rank, num_inputs].
    """

    layer: int
    target: str
    a: str
    b: str
    rank: int
    num_inputs: int
    num_outputs: int
    scale: float


class AdapterOutline(NamedTuple):
    """Adapter that fits its model. ``rank`` is the highest rank and ``num_weights`` the total of
    its matrices.
    """

    folder: Path
    base: str
    matrices: tuple[AdaptedMatrix, ...]
    tensors: TensorIndex

    @property
    def rank(self) -> int:
        return max(matrix.rank for matrix in self.matrices)

    @property
    def targets(self) -> tuple[str, ...]:
        """Projections that the adapter changes in any layer."""
        changed = {matrix.target for matrix in self.matrices}
        return tuple(target for target in TARGETS if target in changed)

    @property
    def num_weights(self) -> int:
        return sum(one.rank * (one.num_inputs + one.num_outputs) for one in self.matrices)


def read_adapter_outline(
    folder: Path, config: ModelConfig, max_rank: int = MAX_RANK
) -> AdapterOutline:
    """Return the matrices of the adapter in ``folder``, for a model of ``config``.

    Reads the config and the header of the weights.

    Raises:
        AdapterError: names the file and the field or tensor that is missing, truncated, not
            applied, of another shape than the model needs, or of a higher rank than ``max_rank``.
    """
    adapter = read_adapter_config(folder)
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise AdapterError(
            f"{folder} has no {WEIGHTS_FILE}; an adapter is a folder in PEFT's layout, with "
            "weights in safetensors."
        )
    try:
        tensors = open_file(file)
    except CheckpointError as error:
        raise AdapterError(error.message) from error
    found: dict[tuple[int, str], dict[str, str]] = {}
    modules: dict[tuple[int, str], str] = {}
    for name in tensors:
        module, side, place = _place_of(file, name, config)
        modules[place] = module
        if found.setdefault(place, {}).setdefault(side, name) != name:
            raise AdapterError(f"{file} has two adapters of {module}: {name} and another.")
    if not found:
        raise AdapterError(f"{file} holds no tensors.")
    matrices = [
        _matrix(file, adapter, config, place, modules[place], found[place], tensors)
        for place in sorted(found, key=lambda place: (place[0], TARGETS.index(place[1])))
    ]
    outline = AdapterOutline(folder, adapter.base, tuple(matrices), tensors)
    bound = min(max_rank, MAX_RANK)
    if outline.rank > bound:
        raise AdapterError(
            f"{adapter.path}: the adapter has rank {outline.rank}, and this engine takes ranks up "
            f"to {bound} (engine.max_adapter_rank, at most {MAX_RANK})."
        )
    return outline


def adapter_version(folder: Path) -> str:
    """Return the version of an adapter: the first digits of the SHA-256 of its two files. Raises
    AdapterError if a file cannot be read.
    """
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        file = folder / name
        try:
            with file.open("rb") as stream:
                digest.update(f"{name}\0{file.stat().st_size}\0".encode())
                while block := stream.read(_READ_BYTES):
                    digest.update(block)
        except OSError as error:
            raise AdapterError(f"{file} cannot be read: {error.strerror or error}.") from error
    return digest.hexdigest()[:_VERSION_CHARACTERS]


def _place_of(file: Path, name: str, config: ModelConfig) -> tuple[str, str, tuple[int, str]]:
    """Return module, side and (layer, target) of a tensor."""
    tensor = _TENSOR.fullmatch(name)
    module = _MODULE.fullmatch(tensor["module"]) if tensor is not None else None
    if tensor is None or module is None or module["target"] not in TARGETS:
        raise AdapterError(
            f"{file}: tensor {name} is not applied; adapters may change {', '.join(TARGETS)} of a "
            "model's layers, but no embeddings, heads, experts, biases or magnitudes."
        )
    layer, target = int(module["layer"]), module["target"]
    if layer >= config.num_hidden_layers:
        raise AdapterError(
            f"{file}: tensor {name} is of layer {layer}, and the model has "
            f"{config.num_hidden_layers}: the adapter is of another model."
        )
    if (module["block"] == "self_attn") is not (target in _ATTENTION):
        raise AdapterError(f"{file}: tensor {name} belongs to no module of the model.")
    return tensor["module"], tensor["side"], (layer, target)


def _matrix(
    file: Path,
    adapter: AdapterConfig,
    config: ModelConfig,
    place: tuple[int, str],
    module: str,
    sides: Mapping[str, str],
    tensors: Mapping[str, TensorInfo],
) -> AdaptedMatrix:
    layer, target = place
    missing = {"A", "B"}.difference(sides)
    if missing:
        raise AdapterError(f"{file}: {module} has no lora_{missing.pop()} tensor.")
    if target not in _ATTENTION and config.experts is not None and layer in config.experts.layers:
        raise AdapterError(
            f"{file}: tensor {sides['A']} is of an MLP, and layer {layer} of the model is a "
            "mixture of experts, which are not adapted; merge the adapter into the model."
        )
    rank, (num_inputs, num_outputs) = adapter.rank_of(module), _shape_of(config, target)
    for side, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
        info = tensors[sides[side]]
        if info.shape != shape:
            raise AdapterError(
                f"{file}: tensor {sides[side]} has shape {list(info.shape)}, and rank {rank} "
                f"beside this model asks for {list(shape)}: the adapter is of another model, or "
                f"{CONFIG_FILE} is of another adapter."
            )
        if info.dtype not in FLOATS:
            raise AdapterError(
                f"{file}: tensor {sides[side]} is stored as {info.dtype}; supported are "
                f"{', '.join(FLOATS)}."
            )
    return AdaptedMatrix(
        layer,
        target,
        sides["A"],
        sides["B"],
        rank,
        num_inputs,
        num_outputs,
        adapter.scale_of(module),
    )


def _shape_of(config: ModelConfig, target: str) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a projection."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }[target]

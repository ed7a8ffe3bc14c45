"""Tensors of a GGUF model by the names of a checkpoint in Hugging Face layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, Keys

from millrace.engine.quantization.gguf_blocks import QUANTIZED_TYPES, WIDE_TYPES, quantized_rows
from millrace.engine.quantization.weight import QuantizedWeight
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.checkpoints.families import Experts, family_of
from millrace.registry.gguf.gguf_file import GgufFile, GgufTensor, read_gguf
from millrace.registry.gguf.own_config import all_tensors
from millrace.registry.gguf.tensor_names import checkpoint_names
from millrace.schemas.errors import CheckpointError

# Architectures whose files have the two numbers that RoPE turns together beside each other; a
# checkpoint has one in each half of a head.
_INTERLEAVED = ("llama",)


class GgufTensors:
    """Source of the tensors of a GGUF model's files, which it maps into memory.

    Iterates over the names that a checkpoint has. A tensor's rows are in the checkpoint's order.

    Raises:
        CheckpointError: a file is damaged or truncated.
    """

    def __init__(self, parts: Sequence[Path], config: ModelConfig) -> None:
        self.path = parts[0]
        files = [read_gguf(part) for part in parts]
        self._tensors = all_tensors(files)
        shapes = {name: tensor.shape for name, (_, tensor) in self._tensors.items()}
        family = family_of(config.architecture)
        is_mixtral = family is not None and family.experts is Experts.MIXTRAL
        self._places = checkpoint_names(shapes, is_mixtral=is_mixtral).places
        self._maps: dict[Path, torch.Tensor] = {}
        self._heads: dict[str, int] = {}
        if files[0].metadata.get(Keys.General.ARCHITECTURE) in _INTERLEAVED:
            self._heads = {
                "q_proj": config.num_attention_heads,
                "k_proj": config.num_key_value_heads,
            }

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def is_quantized(self, name: str) -> bool:
        """Return whether the tensor exists and is stored in codes."""
        return name in self._places and self._found(name)[1].kind in QUANTIZED_TYPES

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor ``name`` of this ``shape``, in its own dtype or widened to float32.

        Raises:
            CheckpointError: the tensor is missing or has another shape or an unknown type; names
                the tensor.
        """
        kind, rows = self._rows(name, shape, None)
        if kind in QUANTIZED_TYPES:
            return quantized_rows(kind, rows).values().reshape(shape)
        # Tensors may begin at any byte.
        return rows.clone().view(WIDE_TYPES[kind]).reshape(shape)

    def load_quantized(
        self, name: str, shape: tuple[int, int], rows: range | None
    ) -> QuantizedWeight:
        """Return the weight ``name`` of this whole ``shape``, or some ``rows`` of it.

        Raises:
            CheckpointError: as ``load`` does.
        """
        return quantized_rows(*self._rows(name, shape, rows))

    def _rows(
        self, name: str, shape: tuple[int, ...], rows: range | None
    ) -> tuple[GGMLQuantizationType, torch.Tensor]:
        """Return the type of a tensor and its stored rows, uint8 [number of rows, row bytes]."""
        file, tensor = self._found(name)
        stored = self._places[name].name
        own = tensor.shape if self._places[name].expert is None else tensor.shape[:-1]
        if own[::-1] != shape:
            raise CheckpointError(
                f"Tensor {stored} in {file.path} has shape {list(own[::-1])}, but the model's "
                f"metadata ask for {list(shape)}."
            )
        known = (*QUANTIZED_TYPES, *WIDE_TYPES)
        if tensor.kind not in known:
            raise CheckpointError(
                f"Tensor {stored} in {file.path} is stored as {tensor.kind_name}; supported are "
                f"{', '.join(kind.name for kind in known)}."
            )
        kind = GGMLQuantizationType(tensor.kind)
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if own[0] % block_size:
            raise CheckpointError(
                f"Tensor {stored} in {file.path} has rows of {own[0]} numbers, which are no whole "
                f"blocks of {kind.name} ({block_size} numbers)."
            )
        # A vector has a row for each number, as its matrix has.
        row_size = own[0] if len(own) > 1 else block_size
        row_bytes = row_size // block_size * block_bytes
        matrix = self._data(file.path, tensor).view(-1, row_bytes)
        expert = self._places[name].expert
        if expert is not None:
            matrix = matrix[expert * own[1] : (expert + 1) * own[1]]
        return kind, self._ordered(name, matrix, rows)

    def _found(self, name: str) -> tuple[GgufFile, GgufTensor]:
        if name not in self._places:
            raise CheckpointError(f"Tensor {name} is missing from {self.path}.")
        return self._tensors[self._places[name].name]

    def _data(self, file: Path, tensor: GgufTensor) -> torch.Tensor:
        if file not in self._maps:
            try:
                size = file.stat().st_size
                self._maps[file] = torch.from_file(
                    str(file), shared=False, size=size, dtype=torch.uint8
                )
            except (OSError, RuntimeError) as error:
                raise CheckpointError(f"{file} cannot be read: {error}.") from error
        return self._maps[file][tensor.offset : tensor.offset + tensor.num_bytes]

    def _ordered(self, name: str, matrix: torch.Tensor, rows: range | None) -> torch.Tensor:
        """Return ``rows`` of a matrix, counted in the checkpoint's order."""
        num_heads = self._heads.get(name.split(".")[-2])
        if num_heads is None:
            return matrix if rows is None else matrix[rows.start : rows.stop]
        pairs = torch.arange(len(matrix)).view(num_heads, -1, 2)
        order = pairs.transpose(1, 2).flatten()
        return matrix[order if rows is None else order[rows.start : rows.stop]]

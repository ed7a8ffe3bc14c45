"""Header of a GGUF file: its metadata and the places of its tensors, read without the weights.

The layout is that of the format's public specification, versions 2 and 3. The ``gguf`` package also
has a reader, but it keeps an array for each token and each merge (11 s and 660 MB for Llama 3's
vocabulary, where this reader takes 0.4 s and 40 MB), and a damaged length makes it loop forever.
Its constants for kinds of values and tensors are used here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGMLQuantizationType,
    GGUFValueType,
    Keys,
)

from millrace.registry.checkpoints.json_fields import JsonFields
from millrace.schemas.errors import CheckpointError

_VERSIONS = (2, 3)
# The metadata of vocabularies of 256,000 tokens with their merges have 20 MB.
_MAX_METADATA_BYTES = 256 * 1024 * 1024
_MAX_DIMENSIONS = 4
_NUMPY_TYPES: dict[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}
_KV_NUMBER_BYTES = 2


class GgufTensor(NamedTuple):
    """Place of a tensor in a GGUF file.

    ``shape`` has the contiguous dimension first, as in the format. ``kind`` is the number of its
    type, which may be unknown here. ``offset`` is in bytes from the file's start.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def num_bytes(self) -> int:
        """Size of its data; 0 for an unknown type."""
        if self.kind not in set(GGMLQuantizationType):
            return 0
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(self.kind)]
        return math.prod(self.shape) * block_bytes // block_size

    @property
    def kind_name(self) -> str:
        """Name of its type, as Q4_K."""
        if self.kind not in set(GGMLQuantizationType):
            return f"type {self.kind}"
        return GGMLQuantizationType(self.kind).name


class GgufFile(NamedTuple):
    """Header of a GGUF file.

    ``metadata`` is by key, with arrays as lists; ``tensors`` is by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file.

    Raises:
        CheckpointError: the file is not a GGUF file of a version that llama.cpp reads, is damaged
            or truncated; names the file, and the key or tensor.
    """
    try:
        with path.open("rb") as stream:
            return _read(path, stream)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


def _read(path: Path, stream: BinaryIO) -> GgufFile:
    header = _Header(path, stream)
    num_tensors, num_keys = header.begin()
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        header.part = "its metadata"
        key = header.string()
        if key in metadata:
            raise CheckpointError(f"{path}: key {key!r:.80} is there twice.")
        header.part = f"key {key!r:.80}"
        metadata[key] = header.value()
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        header.part = "its list of tensors"
        name = header.string()
        if name in tensors:
            raise CheckpointError(f"{path}: tensor {name!r:.80} is there twice.")
        header.part = f"tensor {name!r:.80}"
        tensors[name] = header.tensor()
    alignment = metadata.get(Keys.General.ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path}: key {Keys.General.ALIGNMENT} must be a positive integer.")
    start = -(-header.position // alignment) * alignment
    for name, tensor in tensors.items():
        tensors[name] = tensor._replace(offset=start + tensor.offset)
        end = start + tensor.offset + tensor.num_bytes
        if end > header.file_bytes:
            raise CheckpointError(
                f"{path} is truncated: tensor {name!r:.80} ends at byte {end}, the file at "
                f"byte {header.file_bytes}."
            )
    return GgufFile(path, metadata, tensors)


class _Header:
    """Reader of one value after the other. ``part`` is named in errors; ``position`` is in
    bytes.
    """

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.part = "its header"
        self.position = 0
        self.file_bytes = stream.seek(0, 2)
        stream.seek(0)
        self._path = path
        self._stream = stream

    def begin(self) -> tuple[int, int]:
        """Read the beginning, and return the numbers of tensors and keys."""
        if self.file_bytes < 4 or self._number("<I", 4) != GGUF_MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file: it does not begin with GGUF.")
        version = self._number("<I", 4)
        if version not in _VERSIONS:
            is_swapped = version and not version & 0xFFFF
            what = "is for big-endian machines" if is_swapped else f"has GGUF version {version}"
            raise CheckpointError(
                f"{self._path} {what}; supported are the versions 2 and 3, little-endian."
            )
        return self._number("<Q", 8), self._number("<Q", 8)

    def string(self) -> str:
        """Read UTF-8 text after its length."""
        data = self._take(self._number("<Q", 8))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._damaged("has text that is not UTF-8") from error

    def value(self) -> Any:
        """Read a value after its type: a bool, a number, a string or a list of these."""
        kind = self._kind()
        if kind != GGUFValueType.ARRAY:
            return self.string() if kind == GGUFValueType.STRING else self._numbers(kind, 1)[0]
        kind = self._kind()
        length = self._number("<Q", 8)
        if kind == GGUFValueType.ARRAY:
            raise self._damaged("has arrays within an array")
        if kind != GGUFValueType.STRING:
            return self._numbers(kind, length)
        self._check_left(length * 8)  # each begins with its length
        return [self.string() for _ in range(length)]

    def tensor(self) -> GgufTensor:
        """Read a tensor, whose offset is from the start of all data here."""
        num_dimensions = self._number("<I", 4)
        if num_dimensions > _MAX_DIMENSIONS:
            raise self._damaged(f"has {num_dimensions} dimensions")
        shape = tuple(self._number("<Q", 8) for _ in range(num_dimensions))
        return GgufTensor(shape, self._number("<I", 4), self._number("<Q", 8))

    def _kind(self) -> GGUFValueType:
        number = self._number("<I", 4)
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise self._damaged(f"has values of an unknown type {number}") from error

    def _numbers(self, kind: GGUFValueType, count: int) -> list[Any]:
        numpy_type = _NUMPY_TYPES[kind]
        numbers: list[Any] = np.frombuffer(
            self._take(count * numpy_type.itemsize), numpy_type
        ).tolist()
        return numbers

    def _number(self, layout: str, num_bytes: int) -> int:
        number: int = struct.unpack(layout, self._take(num_bytes))[0]
        return number

    def _take(self, num_bytes: int) -> bytes:
        self._check_left(num_bytes)
        data = self._stream.read(num_bytes)
        if len(data) != num_bytes:
            raise self._damaged("is cut off")
        self.position += num_bytes
        return data

    def _check_left(self, num_bytes: int) -> None:
        end = self.position + num_bytes
        if end > self.file_bytes:
            raise CheckpointError(
                f"{self._path} is truncated or damaged: {self.part} asks for {end} bytes, the file "
                f"has {self.file_bytes}."
            )
        if end > _MAX_METADATA_BYTES:
            raise self._damaged(f"goes beyond {_MAX_METADATA_BYTES} bytes of metadata")

    def _damaged(self, how: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {self.part} {how}.")


def kv_bytes_per_token(file: Path) -> int:
    """Return the KV cache bytes per token, for all layers in float16 as llama.cpp keeps them.

    That is 2 * layers * key heads * (key size + value size). Layers that share or compress theirs
    take less. 0 if the file lacks the numbers.

    Raises:
        CheckpointError: the header is invalid.
    """
    fields = JsonFields(file, read_gguf(file).metadata)
    architecture = fields.string(Keys.General.ARCHITECTURE, "")

    def value(key: str) -> Any:
        return fields.get(key.format(arch=architecture))

    num_heads = value(Keys.Attention.HEAD_COUNT)
    if isinstance(num_heads, list):
        num_heads = max(num_heads, default=0)
    num_layers, hidden_size = value(Keys.LLM.BLOCK_COUNT), value(Keys.LLM.EMBEDDING_LENGTH)
    if not num_heads or not num_layers or not hidden_size:
        return 0
    size = hidden_size // num_heads
    sizes = (value(Keys.Attention.KEY_LENGTH) or size) + (
        value(Keys.Attention.VALUE_LENGTH) or size
    )
    kv_heads = value(Keys.Attention.HEAD_COUNT_KV) or num_heads
    per_layer = kv_heads if isinstance(kv_heads, list) else [kv_heads] * num_layers
    return int(_KV_NUMBER_BYTES * sum(per_layer) * sizes)

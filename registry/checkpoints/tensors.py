"""Index of the tensors in a checkpoint's safetensors files, checked before they are loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec

from millrace.registry.checkpoints.json_fields import read_json_object
from millrace.schemas.errors import CheckpointError

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}
# Default storage types of weights.
FLOATS = ("F32", "F16", "BF16")
ALL_DTYPES = tuple(_ITEM_BYTES)
_MAX_NAMED = 8


class TensorInfo(msgspec.Struct, frozen=True):
    """Location, shape and type of a tensor; ``dtype`` has safetensors' name (F32, BF16, ...)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class TensorIndex(Mapping[str, TensorInfo]):
    """Index from tensor name to file, shape and dtype.

    Owns the memory-mapped files that it loads from. They are unmapped with the index and the last
    tensor loaded from them.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.path = path
        self._tensors = dict(tensors)
        self._open_files: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def load(
        self,
        name: str,
        shape: Sequence[int],
        dtypes: Sequence[str] = FLOATS,
        *,
        rows: range | None = None,
        columns: range | None = None,
    ) -> torch.Tensor:
        """Return the tensor ``name`` of this ``shape`` on the CPU in its stored dtype.

        With ``rows``, and for a matrix also ``columns``, return that part as a view; only that part
        is read.

        Raises:
            CheckpointError: the tensor is missing, has another shape (both are named) or a dtype
                that is not in ``dtypes``; names the tensor.
        """
        info = self._tensors.get(name)
        if info is None:
            raise CheckpointError(f"Tensor {name} is missing from the checkpoint {self.path}.")
        if info.shape != tuple(shape):
            raise CheckpointError(
                f"Tensor {name} in {info.file} has shape {list(info.shape)}, but config.json asks "
                f"for {list(shape)}."
            )
        if info.dtype not in dtypes:
            raise CheckpointError(
                f"Tensor {name} in {info.file} is stored as {info.dtype}; supported are "
                f"{', '.join(dtypes)}."
            )
        if rows is None and columns is None:
            return self._read(info.file, name, None)
        wanted = (rows, columns)[: len(info.shape)]
        return self._read(info.file, name, tuple(_as_slice(part) for part in wanted))

    def _read(self, file: Path, name: str, part: tuple[slice, ...] | None) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        try:
            if file not in self._open_files:
                self._open_files[file] = safe_open(file, framework="pt", device="cpu")
            opened = self._open_files[file]
            tensor: torch.Tensor
            tensor = opened.get_tensor(name) if part is None else opened.get_slice(name)[part]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}.") from error
        return tensor


def open_tensors(path: Path) -> TensorIndex:
    """Index ``model.safetensors`` or the shards that ``model.safetensors.index.json`` lists.

    Reads the headers only.

    Raises:
        CheckpointError: a file is missing, truncated or malformed, or lacks a tensor that the index
            lists. Also for a ``model.safetensors`` that the index does not list, since loaders
            differ in which one they read.
    """
    if (path / INDEX_FILE).is_file():
        return TensorIndex(path, _read_shards(path))
    if not (path / SINGLE_FILE).is_file():
        raise CheckpointError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}.")
    return TensorIndex(path, _read_header(path / SINGLE_FILE))


def open_file(file: Path) -> TensorIndex:
    """Index one safetensors file by its header. Raises CheckpointError as ``open_tensors`` does."""
    return TensorIndex(file.parent, _read_header(file))


def _read_shards(path: Path) -> dict[str, TensorInfo]:
    index_file = path / INDEX_FILE
    weight_map = read_json_object(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_file}: field weight_map must map tensor names to files.")
    for file in weight_map.values():
        if not isinstance(file, str) or len(PurePosixPath(file).parts) != 1 or file == "..":
            raise CheckpointError(
                f"{index_file}: field weight_map must hold plain file names, got {file!r:.80}."
            )
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        raise CheckpointError(f"{path} lacks {_listed(missing)}, which {INDEX_FILE} lists.")
    if SINGLE_FILE not in files and (path / SINGLE_FILE).exists():
        raise CheckpointError(
            f"{path} has {SINGLE_FILE}, and {INDEX_FILE}, whose weight_map does not list it: these "
            "may be two models; remove one of them."
        )
    headers = {file: _read_header(path / file) for file in files}
    absent = [name for name, file in weight_map.items() if name not in headers[file]]
    if absent:
        raise CheckpointError(
            f"{INDEX_FILE} lists tensors that their files in {path} lack: {_listed(absent)}."
        )
    return {name: headers[file][name] for name, file in weight_map.items()}


def _read_header(file: Path) -> dict[str, TensorInfo]:
    try:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            file_bytes = file.stat().st_size
            if file_bytes < _LENGTH_BYTES + header_bytes or header_bytes > _MAX_HEADER_BYTES:
                raise CheckpointError(f"{file} is truncated or not a safetensors file.")
            header = msgspec.json.decode(stream.read(header_bytes), type=dict[str, dict[str, Any]])
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} has a malformed header: {error}.") from error
    header.pop("__metadata__", None)
    data_bytes = file_bytes - _LENGTH_BYTES - header_bytes
    return {name: _tensor_info(file, name, entry, data_bytes) for name, entry in header.items()}


class _HeaderEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _tensor_info(file: Path, name: str, entry: dict[str, Any], data_bytes: int) -> TensorInfo:
    try:
        parsed = msgspec.convert(entry, _HeaderEntry)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{file} has a malformed header for {name}: {error}.") from error
    start, end = parsed.data_offsets
    item_bytes = _ITEM_BYTES.get(parsed.dtype)
    wanted_bytes = math.prod(parsed.shape) * item_bytes if item_bytes else end - start
    if not 0 <= start <= end or min((*parsed.shape, 0)) < 0 or end - start != wanted_bytes:
        raise CheckpointError(
            f"{file} has a malformed header for {name}: offsets and shape differ."
        )
    if end > data_bytes:
        raise CheckpointError(
            f"{file} is truncated: tensor {name} ends at byte {end} of the data, which has only "
            f"{data_bytes} bytes."
        )
    return TensorInfo(file, parsed.shape, parsed.dtype)


def _as_slice(part: range | None) -> slice:
    return slice(None) if part is None else slice(part.start, part.stop)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMED])
    return shown if len(names) <= _MAX_NAMED else f"{shown} and {len(names) - _MAX_NAMED} more"

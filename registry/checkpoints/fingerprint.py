"""Fingerprint of weights, computed without reading all of them."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from millrace.registry.checkpoints.checkpoint import gguf_parts

# Changed when a type of keys and values makes other values than before, so that no request moves
# between workers that round differently.
_CACHE_ROUNDINGS = {"int8": "int8 with a scale for 32 elements"}
_DIGEST_BYTES = 8
_SAMPLE_BYTES = 1 << 16
_NUM_SAMPLES = 16
_SUFFIXES = (".safetensors", ".gguf")
# Raised when rounding at load makes other values than before, so that no request moves between
# workers that round differently.
_ROUNDING = 2


def weights_fingerprint(
    path: Path, quantization: str | None = None, kv_cache_dtype: str | None = None
) -> str:
    """Return 16 hexadecimal digits that identify the weights in a checkpoint folder or file.

    A folder that stands for a GGUF model has the fingerprint of its files. The digits also depend
    on the type that weights are rounded to when loaded, and on the type of keys and values.

    The fingerprint covers the name and size of each weights file and samples spread over it,
    beginning with the table of tensors. So two checkpoints of one shape differ, and a large one
    takes no longer than a small one. Empty if there are no weights.
    """
    files = _weights_files(path)
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for file in files:
        # A single file may have any name.
        name = "" if len(files) == 1 and file.parent != path else file.name
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            digest.update(f"{name}:{size};".encode())
            for number in range(_NUM_SAMPLES):
                opened.seek(max(0, size - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
                digest.update(opened.read(_SAMPLE_BYTES))
    if quantization is not None:
        digest.update(f"rounded to {quantization}, {_ROUNDING};".encode())
    if kv_cache_dtype is not None:
        rounding = _CACHE_ROUNDINGS.get(kv_cache_dtype, kv_cache_dtype)
        digest.update(f"keys and values in {rounding};".encode())
    return digest.hexdigest() if files else ""


def _weights_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix in _SUFFIXES else []
    if (path / "config.json").is_file() and (parts := gguf_parts(path)):
        return list(parts)
    found = sorted(path.iterdir()) if path.is_dir() else []
    return [file for file in found if file.suffix in _SUFFIXES]

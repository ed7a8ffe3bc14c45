"""Embedding settings of a checkpoint in sentence-transformers' layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from millrace.registry.checkpoints.json_fields import JsonFields, read_json_object
from millrace.schemas.errors import CheckpointError
from millrace.schemas.pooling import Pooling

_MODULES = "modules.json"
_POOLING = "1_Pooling"
_MODES = {
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
}
_MODE_NAMES = {"lasttoken": Pooling.LAST, "mean": Pooling.MEAN}
_PREFIX = "pooling_mode_"


class EmbeddingDefaults(NamedTuple):
    """Default pooling of a checkpoint's embeddings, and whether to scale them to length 1; None if
    not set.
    """

    pooling: Pooling | None
    normalize: bool | None


def read_embedding_defaults(path: Path) -> EmbeddingDefaults:
    """Read ``modules.json`` and the pooling's ``config.json``, if they exist.

    Raises:
        CheckpointError: a module or a pooling is not supported, which would change the embeddings
            if ignored; names the file.
    """
    folder, normalize = _POOLING, None
    if (path / _MODULES).is_file():
        folder, normalize = _read_modules(path / _MODULES)
    file = path / folder / "config.json"
    return EmbeddingDefaults(_read_pooling(file) if file.is_file() else None, normalize)


class _Module(msgspec.Struct, frozen=True):
    type: str
    path: str = ""


def _read_modules(file: Path) -> tuple[str, bool]:
    """Return (the pooling's folder, whether embeddings are scaled to length 1)."""
    try:
        modules = msgspec.json.decode(file.read_bytes(), type=list[_Module])
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is not a list of modules: {error}.") from error
    folder, normalize = _POOLING, False
    for module in modules:
        kind = module.type.rpartition(".")[2]
        if kind == "Pooling":
            if ".." in Path(module.path).parts or Path(module.path).is_absolute():
                raise CheckpointError(f"{file}: path {module.path!r} leaves the checkpoint.")
            folder = module.path
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise CheckpointError(f"{file}: module {module.type} is not supported.")
    return folder, normalize


def _read_pooling(file: Path) -> Pooling:
    data = read_json_object(file)
    fields = JsonFields(file, data)
    chosen = fields.string("pooling_mode", "")
    if chosen:
        if chosen not in _MODE_NAMES:
            raise fields.bad("pooling_mode", " or ".join(_MODE_NAMES))
        return _MODE_NAMES[chosen]
    names = [name for name in _flags(data) if fields.boolean(name, default=False)]
    if len(names) != 1 or names[0] not in _MODES:
        raise CheckpointError(
            f"{file}: exactly one of {' and '.join(_MODES)} must be true, not "
            f"{', '.join(names) or 'none'}."
        )
    return _MODES[names[0]]


def _flags(data: dict[str, Any]) -> list[str]:
    return [name for name in data if name.startswith(_PREFIX)]

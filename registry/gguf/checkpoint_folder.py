"""Checkpoint folder of a GGUF file, from which tokenizers, templates and limits are read."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from gguf.constants import Keys

from millrace.registry.checkpoints.checkpoint import (
    GGUF_FILE,
    GGUF_IS_QUANTIZED,
    GGUF_PARTS,
    GGUF_WHY_NOT_OWN,
)
from millrace.registry.checkpoints.json_fields import JsonFields
from millrace.registry.gguf.gguf_file import GgufFile, read_gguf
from millrace.registry.gguf.own_config import (
    has_quantized_matrix,
    is_own_architecture,
    own_config,
)
from millrace.registry.gguf.parts import model_name_of, parts_of
from millrace.registry.gguf.tokenizer import read_tokenizer
from millrace.registry.gguf.vocabulary import Vocabulary
from millrace.runtime.binaries import cache_folder
from millrace.schemas.errors import CheckpointError

_EMBEDDING = "token_embd.weight"
_KIND = "general.type"
_POOLING_MODES = {1: "mean", 3: "lasttoken"}


def checkpoint_folder(file: Path) -> Path:
    """Return a folder with config.json, tokenizer.json and tokenizer_config.json of a GGUF file.

    ``file`` is the GGUF file, or the first of a model's files. The folder is made once for each
    state of the file, in the user's cache. Several processes may ask for it at once.

    Raises:
        CheckpointError: names the file, and the invalid key or tensor.
    """
    file = file.absolute()
    _check_parts(file)
    target = _target(file)
    if not target.is_dir():
        contents = _contents(read_gguf(file))
        try:
            _write(contents, target)
        except OSError as error:
            raise CheckpointError(
                f"{file}: its tokenizer and config cannot be written to {target.parent}: "
                f"{error.strerror or error}. Set XDG_CACHE_HOME to another folder."
            ) from error
    return target


def _check_parts(file: Path) -> None:
    parts = parts_of(file.name)
    if file.name != parts[0]:
        raise CheckpointError(f"{file} is one of {len(parts)} files: name the first, {parts[0]}.")
    missing = [part for part in parts if not file.with_name(part).is_file()]
    if missing:
        raise CheckpointError(f"{file.with_name(missing[0])} does not exist.")


def _target(file: Path) -> Path:
    """Return the folder's path, named by the state of the model's files and the code of this
    package.

    So a changed file or another version of the package never gets an old folder.
    """
    try:
        digest = hashlib.sha256(f"{file}".encode())
        for part in parts_of(file.name):
            status = file.with_name(part).stat()
            digest.update(f" {status.st_size} {status.st_mtime_ns}".encode())
        for source in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(source.read_bytes())
        return cache_folder() / "gguf" / f"{model_name_of(file.name)}-{digest.hexdigest()[:16]}"
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error
    except RuntimeError as error:  # a user without a home
        raise CheckpointError(f"There is no cache folder for {file}: {error}.") from error


def _write(contents: dict[str, Any], target: Path) -> None:
    """Write the folder beside the target, then rename it, so that no process finds half a
    folder.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        for name, content in contents.items():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            with (made / name).open("w", encoding="utf-8") as stream:
                json.dump(content, stream, ensure_ascii=False)
                stream.flush()
                os.fsync(stream.fileno())
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster
                raise


def _contents(gguf: GgufFile) -> dict[str, Any]:
    """Return the contents by file name. Raises CheckpointError."""
    fields = JsonFields(gguf.path, gguf.metadata)
    architecture = fields.string(Keys.General.ARCHITECTURE, "")
    if not architecture:
        raise fields.bad(Keys.General.ARCHITECTURE, "the name of an architecture")
    if fields.string(_KIND, "model") != "model":
        raise fields.bad(_KIND, "model: this file is an addition to a model")
    vocabulary, tokenizer, settings = read_tokenizer(fields)
    _check_embedding(gguf, fields, len(vocabulary.tokens))
    pooling = _pooling(fields, architecture)
    config = _config(fields, architecture, vocabulary) | {"has_head": pooling is None}
    contents = {
        "config.json": config | _own_fields(gguf, architecture, has_head=pooling is None),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
    }
    if pooling is not None:
        contents["1_Pooling/config.json"] = {"pooling_mode": pooling}
    return contents


def _config(fields: JsonFields, architecture: str, vocabulary: Vocabulary) -> dict[str, Any]:
    hidden_key = Keys.LLM.EMBEDDING_LENGTH.format(arch=architecture)
    # llama.cpp's limit, with or without RoPE scaling.
    window_key = Keys.LLM.CONTEXT_LENGTH.format(arch=architecture)
    return {
        GGUF_FILE: str(fields.path),
        "model_type": architecture,
        "hidden_size": fields.positive_int(hidden_key),
        "vocab_size": len(vocabulary.tokens),
        "max_position_embeddings": fields.positive_int(window_key),
        "bos_token_id": vocabulary.bos,
        "eos_token_id": list(vocabulary.endings),
    }


def _own_fields(gguf: GgufFile, architecture: str, *, has_head: bool) -> dict[str, Any]:
    """Return the fields for Millrace's own engine, or why it cannot compute the model."""
    names = parts_of(gguf.path.name)
    paths: dict[str, Any] = {GGUF_PARTS: [str(gguf.path.with_name(name)) for name in names]}
    if not is_own_architecture(architecture):
        return paths | {GGUF_WHY_NOT_OWN: f"its architecture is {architecture}"}
    parts = [gguf, *(read_gguf(gguf.path.with_name(name)) for name in names[1:])]
    own = own_config(parts, has_head=has_head)
    if own.why_not:
        return paths | {GGUF_WHY_NOT_OWN: own.why_not}
    return paths | {**own.fields, GGUF_IS_QUANTIZED: has_quantized_matrix(parts)}


def _pooling(fields: JsonFields, architecture: str) -> str | None:
    """Return the pooling of an embedding model; None for other models."""
    key = Keys.LLM.POOLING_TYPE.format(arch=architecture)
    kind = fields.number(key)
    if not kind:
        return None
    if kind not in _POOLING_MODES:
        raise fields.bad(key, "0 (none), 1 (mean) or 3 (last)")
    return _POOLING_MODES[int(kind)]


def _check_embedding(gguf: GgufFile, fields: JsonFields, num_tokens: int) -> None:
    stored = gguf.tensors.get(_EMBEDDING)
    shape = None if stored is None else stored.shape
    count = fields.get(Keys.Split.LLM_KV_SPLIT_COUNT) or 1
    if count != len(parts_of(gguf.path.name)):
        raise fields.bad(Keys.Split.LLM_KV_SPLIT_COUNT, "the number of files in the file's name")
    if shape is None and count > 1:
        return  # it is in another file of the model
    if shape is None:
        raise CheckpointError(f"{gguf.path}: tensor {_EMBEDDING} is missing: it has no weights.")
    if not shape or shape[-1] != num_tokens:
        raise CheckpointError(
            f"{gguf.path}: key {Keys.Tokenizer.LIST} has {num_tokens} tokens, but the tensor "
            f"{_EMBEDDING} is for {shape[-1] if shape else 0}."
        )

"""Small GGUF files with metadata chosen by a test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

TOKENS = ("<s>", "</s>", *(chr(code) for code in range(0x21, 0x7F)), "ab")
_CONTROL, _NORMAL = 3, 1
METADATA: Mapping[str, Any] = {
    "tiny.embedding_length": 8,
    "tiny.context_length": 64,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": list(TOKENS),
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [_CONTROL, _CONTROL] + [_NORMAL] * (len(TOKENS) - 2),
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}
"""Fields of a model with an unknown architecture and one token per character plus one."""


def write_metadata(
    path: Path,
    changes: Mapping[str, Any] | None = None,
    *,
    tensor: str = "token_embd.weight",
    num_rows: int | None = None,
) -> Path:
    """A file that says ``METADATA`` with ``changes`` (None leaves a key out), and whose only tensor
    is the embedding: with a row for each token, unless said otherwise."""
    metadata = dict(METADATA) | dict(changes or {})
    writer = GGUFWriter(path, metadata.pop("general.architecture", "tiny"))
    for key, value in metadata.items():
        if value is not None:
            _add(writer, key, value)
    num_tokens = len(metadata["tokenizer.ggml.tokens"] or ())
    writer.add_tensor(tensor, np.ones((num_rows or num_tokens, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case list():
            writer.add_array(key, value)
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_string(key, value)

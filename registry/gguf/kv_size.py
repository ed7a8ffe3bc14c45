"""What a GGUF model's keys and values take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf.constants import Keys

from millrace.registry.checkpoints.json_fields import JsonFields
from millrace.registry.gguf.gguf_file import read_gguf

_KV_NUMBER_BYTES = 2


def kv_bytes_per_token(file: Path) -> int:
    """Of all layers, in float16 as llama.cpp keeps them: 2 * layers * heads of keys * (size of a
    key + size of a value); layers that share or compress theirs take less. 0 for a model that does
    not say. Raises CheckpointError."""
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

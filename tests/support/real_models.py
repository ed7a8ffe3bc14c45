"""Real public models: the GGUF file of SmolLM2, and checkpoints in Hugging Face layout made of such
files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import pytest
import torch

from millrace.registry.artifacts.store import ModelSourceError
from millrace.registry.catalogue import ModelEntry, load_catalogue
from millrace.registry.source import gguf_file, resolve

SMOLLM2 = "smollm2"
_SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def smollm2() -> ModelEntry:
    """Return the catalogue's entry of SmolLM2-135M-Instruct."""
    return load_catalogue("").entry_for(SMOLLM2)


def write_wide(entry: ModelEntry, folder: Path, dtype: Literal["bfloat16", "float32"]) -> Path:
    """Write a model's weights as safetensors of ``dtype``, with its tokenizer, to ``folder``.

    transformers computes the values of a GGUF file's blocks.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = resolve(entry)
    if entry.is_gguf:
        file = gguf_file(entry)
        # In float32, as transformers warns of any other dtype of packed weights.
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype="float32"
        ).to(getattr(torch, dtype))
        # Otherwise transformers refuses to save a model that it has read from a GGUF file.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    else:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    model.save_pretrained(folder)
    for name in _SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    return folder


def fetched_smollm2() -> ModelEntry:
    """Return the entry of SmolLM2 once its file is in the cache folder, or skip the test.

    Where no test may be skipped (``REQUIRE_ALL_TESTS``), the test fails instead.
    """
    entry = smollm2()
    try:
        gguf_file(entry)
    except ModelSourceError as error:
        pytest.skip(f"needs a real model: {error.message}")
    return entry

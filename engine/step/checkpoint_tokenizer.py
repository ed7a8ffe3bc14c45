"""The tokenizer that lies beside the weights, for those requests that need it in the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from millrace.registry.tokenizers.tokenizer import Tokenizer


def checkpoint_tokenizer(path: Path) -> Callable[[], Tokenizer | None]:
    """Loads the tokenizer of a checkpoint folder when first called, from any thread; None if the
    folder has none. What it returns raises CheckpointError if there is one that cannot be read."""

    @cache
    def load() -> Tokenizer | None:
        return Tokenizer.load(path) if (path / "tokenizer.json").is_file() else None

    return load

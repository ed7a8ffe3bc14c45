"""Choice between Millrace's own engine and llama.cpp for a GGUF file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from millrace.registry.gguf.parts import parts_of
from millrace.schemas.errors import CheckpointError


def why_not_own_engine(file: Path) -> str:
    """Return why Millrace's own engine cannot compute the model in ``file``; empty if it can.

    ``file`` is the first of the model's files. The answer is also empty for files that are missing
    or damaged: they end in an error that names the damage, with any engine.
    """
    try:
        states = [file.with_name(part).stat() for part in parts_of(file.name)]
        return _why_not(file, tuple((state.st_size, state.st_mtime_ns) for state in states))
    except (OSError, CheckpointError):
        return ""


@lru_cache(maxsize=64)
def _why_not(file: Path, _state: tuple[tuple[int, int], ...]) -> str:
    # The parsers of tokenizers and templates take time to import, and most models are folders.
    from millrace.registry.checkpoints.checkpoint import why_not_own
    from millrace.registry.gguf.checkpoint_folder import checkpoint_folder

    return why_not_own(checkpoint_folder(file))

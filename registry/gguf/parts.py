"""Names of GGUF files: a large model is split into several numbered files."""

from __future__ import annotations

import os
import re
from pathlib import Path

GGUF_ENDING = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_PARTS = 1000


def parts_of(name: str) -> list[str]:
    """Return the names of all files of a model in order; ``name`` is any of them."""
    found = _PART.fullmatch(name)
    count = 0 if found is None else int(found["count"])
    if found is None or not 1 < count <= _MAX_PARTS:
        return [name]
    return [f"{found['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def model_name_of(name: str) -> str:
    """Return a file's name without the ending and the part's number."""
    found = _PART.fullmatch(name)
    return name.removesuffix(GGUF_ENDING) if found is None else found["stem"]


def absolute_source(path: Path) -> Path:
    """Return the absolute path of a folder with its links resolved, or of a GGUF file with links
    kept.

    A link's target may have any name, as in the hub's cache.
    """
    return Path(os.path.abspath(path)) if path.suffix == GGUF_ENDING else path.resolve()  # noqa: PTH100

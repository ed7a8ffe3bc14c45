"""Running ``millrace generate`` on a file of requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.cli.main import main

SMALL = ("--kv-cache-bytes", "2000000", "--threads", "1")


def generate(
    folder: Path, checkpoint: Path | str, lines: Sequence[Any], *options: str
) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the answers."""
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "in.jsonl").write_text(text)
    out = folder / "out.jsonl"
    code = main(
        [
            *("generate", "--model", str(checkpoint), "--input", str(folder / "in.jsonl")),
            *("--output", str(out), *SMALL, *options),
        ]
    )
    return code, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

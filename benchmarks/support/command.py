"""What the commands of benchmarks have in common: their parser, and figures as JSON."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of ``python -m benchmarks.<name>``; its help has the module's text as written."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def write_json(file: Path | None, figures: object) -> None:
    """Nothing without a file."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")

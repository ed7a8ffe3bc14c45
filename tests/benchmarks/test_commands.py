"""Documented commands of benchmarks: their modules exist and have these options."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_SUBJECTS = ("engine", "gateway", "kv", "parallel", "scheduler", "system", "telemetry")
_COMMAND = re.compile(r"python -m benchmarks\.(\w+) --only ([^`#|\n]*)")
_OF_ALL = {"--json", "--save"}
_PAGES = ("README.md", "benchmarks/README.md", *(f"docs/{p.name}" for p in _ROOT.glob("docs/*.md")))


def parts_of(subject: str) -> dict[str, Callable[..., object]]:
    """Import the function that runs each part of a subject."""
    parts: dict[str, str] = import_module(f"benchmarks.{subject}.__main__").PARTS
    places = {part: place.partition(":") for part, place in parts.items()}
    return {
        part: getattr(import_module(f"benchmarks.{subject}.{module}"), function)
        for part, (module, _, function) in places.items()
    }


@pytest.mark.parametrize("subject", _SUBJECTS)
def test_documented_commands_have_their_parts_and_options(subject: str) -> None:
    parts = parts_of(subject)
    commands = [
        words.split()
        for page in _PAGES
        for name, words in _COMMAND.findall((_ROOT / page).read_text())
        if name == subject
    ]
    named = {word for words in commands for word in words if word in parts}
    assert named == set(parts), "a part that no page names has no user"
    for words in commands:
        chosen = [word for word in words if word in parts]
        options = {word for word in words if word.startswith("--")} - _OF_ALL
        for part in chosen:
            known = {f"--{name.replace('_', '-')}" for name in signature(parts[part]).parameters}
            assert options <= known, (part, options - known)

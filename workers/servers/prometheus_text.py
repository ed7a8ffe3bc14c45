"""Reads metrics of a server in Prometheus' text format."""

from __future__ import annotations

import re
from collections.abc import Collection

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def read_samples(text: bytes, names: Collection[str]) -> dict[str, list[float]]:
    """The values of the samples with these names, in order; malformed lines are passed over."""
    values: dict[str, list[float]] = {name: [] for name in names}
    for line in text.decode(errors="replace").splitlines():
        found = _SAMPLE.match(line) if line.startswith(tuple(names)) else None
        if found is not None and found.group(1) in values:
            try:
                values[found.group(1)].append(float(found.group(3)))
            except ValueError:
                continue
    return values


def read_labels(text: bytes, name: str) -> list[dict[str, str]]:
    """The labels of the samples with this name, in order."""
    lines = text.decode(errors="replace").splitlines()
    found = [_SAMPLE.match(line) for line in lines if line.startswith(name)]
    return [
        dict(_LABEL.findall(one.group(2) or "")) for one in found if one and one.group(1) == name
    ]

"""Markers that separate a model's thoughts from its answer."""

from __future__ import annotations

import msgspec

_MAX_MARKER_CHARACTERS = 64


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Markers of thoughts, which stand between ``start`` and ``end`` at the beginning of a
    completion. ``is_open``: the prompt already contains ``start``.

    Raises ValueError for a marker that is empty, blank or too long.
    """

    start: str = "<think>"
    end: str = "</think>"
    is_open: bool = False

    def __post_init__(self) -> None:
        for name, marker in (("start", self.start), ("end", self.end)):
            if not marker.strip() or len(marker) > _MAX_MARKER_CHARACTERS:
                raise ValueError(
                    f"{name} of a reasoning format must have 1 to {_MAX_MARKER_CHARACTERS} "
                    "characters, not only blanks"
                )

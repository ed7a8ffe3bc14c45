"""Models as Anthropic's API lists them."""

from __future__ import annotations

from typing import Literal

import msgspec


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A model. ``created_at`` is a time of RFC 3339; ``max_input_tokens`` and ``max_tokens`` are
    what the caller may have of the context window, null: it is not known yet. Fields that nothing
    is known of are null."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None
    max_tokens: int | None
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"
    capabilities: None = None
    deprecated_at: None = None
    line: None = None
    retires_at: None = None


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of ``GET /v1/models``. ``has_more``: there are more in the direction of the page."""

    data: tuple[ModelInfo, ...]
    has_more: bool
    first_id: str | None
    last_id: str | None

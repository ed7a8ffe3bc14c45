"""Which dialect each kind of inference server speaks."""

from __future__ import annotations

from schemas.engines import EngineKind
from workers.servers.dialect import Dialect

DIALECTS: dict[EngineKind, type[Dialect]] = {}

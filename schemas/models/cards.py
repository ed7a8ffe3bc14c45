"""Model cards of ``/v1/models``."""

from __future__ import annotations

from typing import Literal

import msgspec

from millrace.schemas.engines import PROMISES, EngineKind
from millrace.schemas.pooling import ModelTask
from millrace.schemas.sampling import SamplingDefaults


class EngineCard(msgspec.Struct, frozen=True, kw_only=True):
    """Engine of a model with the guarantees for its streams: see ``EnginePromises``.
    ``unsupported`` are the parameters that a request may not set."""

    kind: EngineKind
    exact_token_ids: bool
    takes_token_ids: bool
    continues_sampling: bool
    continues_grammars: bool
    unsupported: tuple[str, ...]

    @classmethod
    def of(cls, kind: EngineKind) -> EngineCard:
        """Return the card shared by all engines of this kind."""
        told = {name: getattr(PROMISES[kind], name) for name in cls.__struct_fields__[1:-1]}
        return cls(kind=kind, unsupported=tuple(sorted(PROMISES[kind].unsupported)), **told)


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Model of the catalogue. ``max_model_len`` is its context window in tokens;
    ``tier_context_tokens`` is the limit for tenants of each tier (null: no limit). ``adapters`` are
    the adapters of the model; each has its own card, with the model as ``parent``. ``versions`` are
    the versions behind the name, with the percentage of its requests that each version answers
    (empty: the name has no versions); each has its own card, with the model as ``parent``.
    ``engine`` runs the model (null for a route, which leads to other models). ``sampling_defaults``
    are the defaults of unset sampling parameters, from the checkpoint's generation_config.json,
    once it is loaded."""

    id: str
    created: int
    max_model_len: int | None
    tier_context_tokens: dict[str, int | None] = {}
    adapters: tuple[str, ...] = ()
    parent: str | None = None
    versions: dict[str, float] = {}
    description: str = ""
    engine: EngineCard | None = None
    task: ModelTask | None = None
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    object: Literal["model"] = "model"
    owned_by: str = "millrace"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: tuple[ModelCard, ...]
    object: Literal["list"] = "list"

"""What ``/v1/models`` tells of models."""

from __future__ import annotations

from typing import Literal

import msgspec

from millrace.schemas.engines import PROMISES, EngineKind
from millrace.schemas.pooling import ModelTask
from millrace.schemas.sampling import SamplingDefaults


class EngineCard(msgspec.Struct, frozen=True, kw_only=True):
    """The engine of a model, and what its streams can rely on: see ``EnginePromises``.
    ``unsupported`` are the parameters that a request may not set."""

    kind: EngineKind
    exact_token_ids: bool
    takes_token_ids: bool
    continues_sampling: bool
    continues_grammars: bool
    unsupported: tuple[str, ...]

    @classmethod
    def of(cls, kind: EngineKind) -> EngineCard:
        """That of every engine of this kind."""
        told = {name: getattr(PROMISES[kind], name) for name in cls.__struct_fields__[1:-1]}
        return cls(kind=kind, unsupported=tuple(sorted(PROMISES[kind].unsupported)), **told)


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the catalogue; ``max_model_len`` is its context window in tokens, and
    ``tier_context_tokens`` what of that tenants of each tier may have (null: no limit).
    ``adapters`` are those that can be asked for with it, each with a card of its own, whose
    ``parent`` it is; ``versions`` are those that the name stands for, with the percentage of its
    requests that each answers (empty: it stands for itself), each with a card of its own, whose
    ``parent`` it is; ``engine`` is what runs it (null for a route, which leads to other models),
    ``sampling_defaults`` what requests are sampled with that do not say: by the checkpoint's
    generation_config.json, once it is loaded."""

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

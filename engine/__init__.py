"""Engine: continuous batching over a paged KV cache, as a library. ``LLM`` is its public class.

It uses no bus, no broker and no asyncio. It imports schemas, registry and runtime;
``millrace.workers`` runs it behind the bus.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.engine.llm import LLM as LLM
    from millrace.engine.offline.batch import EngineClosedError as EngineClosedError
    from millrace.engine.offline.outputs import ClassificationOutput as ClassificationOutput
    from millrace.engine.offline.outputs import CompletionOutput as CompletionOutput
    from millrace.engine.offline.outputs import EmbeddingOutput as EmbeddingOutput
    from millrace.engine.offline.outputs import GenerationDelta as GenerationDelta
    from millrace.engine.offline.outputs import GenerationOutput as GenerationOutput
    from millrace.engine.offline.outputs import RequestFailedError as RequestFailedError
    from millrace.engine.offline.outputs import ScoreOutput as ScoreOutput
    from millrace.schemas.sampling import Grammar as Grammar
    from millrace.schemas.sampling import SamplingOptions as SamplingOptions
    from millrace.schemas.sampling import SamplingParams as SamplingParams

_OUTPUTS = "millrace.engine.offline.outputs"
_SAMPLING = "millrace.schemas.sampling"
_MODULE_OF = {
    "LLM": "millrace.engine.llm",
    "EngineClosedError": "millrace.engine.offline.batch",
    "ClassificationOutput": _OUTPUTS,
    "CompletionOutput": _OUTPUTS,
    "EmbeddingOutput": _OUTPUTS,
    "GenerationDelta": _OUTPUTS,
    "GenerationOutput": _OUTPUTS,
    "RequestFailedError": _OUTPUTS,
    "ScoreOutput": _OUTPUTS,
    "Grammar": _SAMPLING,
    "SamplingOptions": _SAMPLING,
    "SamplingParams": _SAMPLING,
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing other engine modules stays
    cheap."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)

"""Tools of a model whose engine holds calls to no grammar, where the request demands no call."""

from __future__ import annotations

from msgspec.structs import replace

from millrace.registry.requests.generation_request import GenerationRequest
from millrace.schemas.engines import EngineKind, can_hold_calls
from millrace.schemas.notices import Notice, NoticeCode, Notices, notice
from millrace.schemas.sampling import SamplingOptions
from millrace.schemas.tools import ToolFormat, ToolMode


def is_unheld(request: GenerationRequest, kind: EngineKind) -> bool:
    """Whether calls of ``request`` are free, as an engine of this kind cannot hold them."""
    is_free = request.tool_choice.mode is ToolMode.AUTO and request.sampling.grammar is None
    return is_free and not can_hold_calls(kind)


def unheld_calls(
    sampling: SamplingOptions, tool_format: ToolFormat, request: GenerationRequest, kind: EngineKind
) -> tuple[SamplingOptions, Notices]:
    """Return the sampling options without a grammar, and notices of what no grammar holds. One
    call ends the completion if calls are not parallel."""
    if not request.parallel_tool_calls:
        sampling = replace(sampling, one_call=tool_format)
    why = f"the {kind} engine of this model takes no grammar of calls"
    notices: list[Notice] = []
    if any(tool.strict for tool in request.tools):
        notices.append(notice(NoticeCode.STRICT_NOT_ENFORCED, "tools", why))
    if any(request.freeform_tools.values()):
        notices.append(notice(NoticeCode.GRAMMAR_NOT_KEPT, "tools", why))
    return sampling, tuple(notices)

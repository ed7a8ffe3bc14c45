"""Spans kept in this process."""

from __future__ import annotations

from millrace.runtime.tracing import Span, Tracing


class KeptSpans:
    """``SpanSink`` that keeps its spans for the test."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, span: Span) -> None:
        self.spans.append(span)

    async def close(self) -> None:
        """Do nothing: no span is under way."""

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def one(self, name: str) -> Span:
        """Return the only span of that name."""
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def all(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def kept_tracing(sample_ratio: float = 1.0) -> tuple[Tracing, KeptSpans]:
    kept = KeptSpans()
    return Tracing(kept, sample_ratio), kept

"""One answer of a beam search: it comes whole, at the end of a stream that it shares."""

from __future__ import annotations

from msgspec.structs import replace

from millrace.gateway.streams.choice import Choice, ToldTools
from millrace.gateway.streams.parts import Part
from millrace.gateway.streams.stream import OpenStream, TokenGaps
from millrace.schemas.frames import Done, Usage
from millrace.schemas.tools import ToolFormat


class BeamChoice(Choice):
    """The ``beam``-th best answer of its stream's job. What the job took is told by the best one,
    so that it counts once. A client that has any of its tokens has them all."""

    def __init__(
        self,
        index: int,
        beam: int,
        stream: OpenStream,
        tool_format: ToolFormat | None,
        tools: ToldTools,
        from_index: int = 0,
    ) -> None:
        super().__init__(index, stream, tool_format, tools, from_index)
        self._beam = beam

    @property
    def is_plain(self) -> bool:
        """Nothing of it may be read before its end."""
        return False

    def token_ids(self, first_index: int, num_tokens: int) -> tuple[int, ...]:
        """Of the answer."""
        beam = self.stream.reader.beams[self._beam]
        return tuple(beam.token_ids[first_index : first_index + num_tokens])

    @property
    def usage(self) -> Usage:
        """Of the whole search for the best answer; nothing for the others."""
        return super().usage if self._beam == 0 else Usage()

    def collect(self, now_s: float, gaps: TokenGaps, parts: list[Part]) -> None:
        """Append the whole answer once the stream has ended."""
        self.stream.read(now_s, gaps)
        end = self.stream.reader.terminal
        if end is None or self.end is not None:
            return
        if isinstance(end, Done):
            found = self.stream.reader.beams[self._beam]
            own = end.beams[self._beam]
            was_given = self.next_index > 0
            self.next_index = own.num_tokens
            to = self.had if was_given else parts
            self._take(found.text, 0, own.num_tokens, (), to)
            if not was_given:
                self.stream.note_delivered(own.num_tokens, now_s)
            end = replace(end, finish_reason=own.finish_reason, stop_reason=own.stop_reason)
        self._end_round(end, parts)

"""Fields of a line that belong to a conversation, in OpenAI's format."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.engine.offline.chat import OfflineChat, read_chat


class ChatRow(msgspec.Struct, frozen=True):
    """Unparsed fields of a conversation."""

    messages: list[Any] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    def read(self) -> OfflineChat:
        """Parse the fields. Raises ParameterError."""
        return read_chat(
            self.messages,
            self.tools or (),
            self.tool_choice,
            parallel=self.parallel_tool_calls is not False,
        )

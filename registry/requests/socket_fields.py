"""Fields of a chat completion that are not supported over a WebSocket."""

from __future__ import annotations

from millrace.schemas.errors import ParameterError
from millrace.schemas.openai import StreamOptions
from millrace.schemas.websocket import Generate


def check_socket_fields(message: Generate) -> None:
    """Raises ParameterError naming one of these fields that asks for something."""
    options = message.stream_options or StreamOptions()
    for name, given in (
        ("prompt_logprobs", message.prompt_logprobs is not None),
        ("use_beam_search", message.use_beam_search),
        ("return_token_ids", message.return_token_ids),
        ("stream_options.continuous_usage_stats", options.continuous_usage_stats),
    ):
        if given:
            raise ParameterError(
                name,
                f"{name} is not supported over a WebSocket. Leave it out, or send the request to "
                "/v1/chat/completions.",
            )

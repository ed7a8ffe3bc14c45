"""Whether a server completes text, and has the catalogue's model, where it tells no token ids."""

from __future__ import annotations

from registry.served import ServedModel
from schemas.errors import ConfigError
from workers.engine_like import EngineFailedError
from workers.servers.client import ServerClient
from workers.servers.dialects.same_model import PROBE_TEXT

# Tokens that a server may put around a prompt beyond those of its tokenizer.
_MOST_AROUND = 2


async def check_completions(client: ServerClient, path: str, name: str, model: ServedModel) -> None:
    """Have the server's model ``name`` complete a text. Raises EngineFailedError if it does not,
    and ConfigError if it cuts the text into more or fewer tokens than the catalogue's model."""
    body = {"model": name, "prompt": PROBE_TEXT, "max_tokens": 1, "temperature": 0.0}
    answer = await client.post_json(path, body)
    try:
        text, usage = answer["choices"][0]["text"], answer.get("usage") or {}
        num_tokens = usage.get("prompt_tokens")
    except (TypeError, KeyError, IndexError, AttributeError):
        text, num_tokens = None, None
    if not isinstance(text, str):
        raise EngineFailedError(f"The server at {client.url} answers {path} with no completion.")
    own = len(model.tokenizer.encode(PROBE_TEXT, add_special_tokens=False))
    if isinstance(num_tokens, int) and not own <= num_tokens <= own + _MOST_AROUND:
        raise ConfigError(
            f"The server counts {num_tokens} tokens in a text that has {own} by the tokenizer of "
            f"the catalogue's {model.entry.name}: they are not the same model."
        )

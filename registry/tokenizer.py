"""Text to token ids and back, as the checkpoint's own tokenizer does it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from registry.chat_template import ChatTemplate
from registry.json_fields import JsonFields, read_json_object
from registry.token_bytes import (
    SUPPORTED_DECODERS,
    TokenBytes,
    UnsupportedDecoderError,
    token_bytes,
)
from schemas.errors import CheckpointError, ParameterError
from schemas.jobs import ChatMessage
from schemas.tools import ToolDefinition, ToolFormat

# Special in some checkpoints; without them in the text nobody could tell calls from content.
_CALL_TAGS = frozenset({"<tool_call>", "</tool_call>"})


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    ``vocab_size`` is one more than the highest token id. ``eos_token_ids`` end a generation: those
    of generation_config.json (config.json if there is none) and the tokenizer's own eos token.
    Safe to share between threads.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        table: TokenBytes,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self.table = table
        self.eos_token_ids = eos_token_ids
        self.vocab_size = len(table.pieces)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(
            i for i, token in added.items() if token.special and token.content not in _CALL_TAGS
        )

    @classmethod
    def load(cls, path: Path, tool_format: ToolFormat | None = None) -> Tokenizer:
        """Read tokenizer.json and what belongs to it from a checkpoint folder. ``tool_format`` is
        how the model writes tool calls; None: as its chat template shows.

        Raises CheckpointError naming the file at fault.
        """
        file = path / "tokenizer.json"
        backend = _read_backend(file)
        backend.no_truncation()
        backend.no_padding()
        settings = _settings(path)
        eos = _special_text(settings.get("eos_token"))
        return cls(
            backend,
            _table(file, backend),
            _eos_token_ids(path, None if eos is None else backend.token_to_id(eos)),
            ChatTemplate.load(path, settings, _special_texts(settings), tool_format),
        )

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None if it takes no messages, and so no tools."""
        return None if self._chat_template is None else self._chat_template.tool_format

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, with the tokens that the model expects around a prompt if
        ``add_special_tokens``. Special tokens spelled out in the text are recognised."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise ParameterError("prompt", "the prompt is not valid Unicode text") from error
        return ids

    def encode_chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolDefinition] = ()
    ) -> list[int]:
        """Token ids of a conversation in the model's template, up to where the answer begins;
        ``tools`` are described to the model.

        Raises ParameterError("messages") if there is no template or it refuses the conversation.
        """
        return self.encode(self.render_chat(messages, tools), add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolDefinition] = ()
    ) -> str:
        """The text that ``encode_chat`` encodes."""
        if self._chat_template is None:
            raise ParameterError(
                "messages",
                "this model has no chat template and takes prompts only: send a prompt instead "
                "of messages",
            )
        return self._chat_template.render(messages, tools)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``; bytes that are no UTF-8 become U+FFFD, ids beyond the
        vocabulary add nothing."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        return self.table.decode(token_ids, skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes, special or not; they need not be whole characters."""
        return self.table.bytes_of(token_id)


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise CheckpointError(
            f"{file} is missing; the checkpoint needs its tokenizer in that form."
        )
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error


def _settings(path: Path) -> dict[str, Any]:
    """tokenizer_config.json, over the file that older checkpoints name their special tokens in."""
    files = (path / "special_tokens_map.json", path / "tokenizer_config.json")
    merged: dict[str, Any] = {}
    for file in files:
        if file.is_file():
            merged |= read_json_object(file)
    return merged


def _table(file: Path, backend: tokenizers.Tokenizer) -> TokenBytes:
    ids = backend.get_vocab(with_added_tokens=True).values()
    tokens = [backend.id_to_token(i) for i in range(max(ids, default=-1) + 1)]
    decoder: dict[str, Any] | None = msgspec.json.decode(backend.to_str())["decoder"]
    try:
        return token_bytes(decoder, tokens)
    except UnsupportedDecoderError as error:
        raise CheckpointError(
            f"{file}: decoder {error} is not supported; supported are {SUPPORTED_DECODERS}."
        ) from error


def _eos_token_ids(path: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    ids: tuple[int, ...] = ()
    for name in ("generation_config.json", "config.json"):
        if (path / name).is_file():
            ids = JsonFields(path / name, read_json_object(path / name)).token_ids("eos_token_id")
            if ids:
                break
    own = () if tokenizer_eos is None else (tokenizer_eos,)
    return tuple(dict.fromkeys(ids + own))


def _special_texts(settings: dict[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like, as templates use them."""
    texts = {
        name: _special_text(settings.get(name)) for name in settings if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if text is not None}


def _special_text(value: object) -> str | None:
    """A special token is written as its text, or as an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None

"""Tokenizer of a checkpoint: text to token ids and back."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

import msgspec
import tokenizers

from millrace.registry.chat_template import NO_ARGUMENTS, ChatTemplate, given_template
from millrace.registry.checkpoints.json_fields import JsonFields, read_json_object
from millrace.registry.template_text import TemplateText
from millrace.registry.tokenizers.content import ContentTokenizer
from millrace.registry.tokenizers.long_texts import (
    PIECE_CHARACTERS,
    TextTooLongError,
    check_length,
    ids_in_pieces,
    ids_of,
)
from millrace.registry.tokenizers.text_rules import TextRules, text_rules
from millrace.registry.tokenizers.token_bytes import (
    SUPPORTED_DECODERS,
    TokenBytes,
    UnsupportedDecoderError,
    token_bytes,
)
from millrace.registry.tool_formats.tags import SPECIAL_TAGS
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.errors import CheckpointError, ParameterError
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.tools import ToolDefinition, ToolFormat

# Texts that locate special tokens: they differ, and have one token or a few each.
_FIRST, _SECOND = "a", "b"


class AroundPair(NamedTuple):
    """Special tokens before, between and after the texts of a pair."""

    before: list[int]
    between: list[int]
    behind: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.before) + len(self.between) + len(self.behind)


def around_pair(
    encode_bare: Callable[[str], list[int]], encode_pair: Callable[[str, str], list[int]]
) -> AroundPair:
    """Find the special tokens from the ids of two texts and of the pair.

    Raises:
        CheckpointError: the special tokens cannot be separated from the texts.
    """
    first, second = encode_bare(_FIRST), encode_bare(_SECOND)
    whole = encode_pair(_FIRST, _SECOND)
    found = [
        AroundPair(whole[:begin], whole[begin + len(first) : middle], whole[middle + len(second) :])
        for begin in _places_of(first, whole)
        for middle in _places_of(second, whole)
        if middle >= begin + len(first)
    ]
    if len(found) != 1:
        raise CheckpointError("tokenizer.json: the special tokens around a pair are ambiguous.")
    return found[0]


def _places_of(part: list[int], whole: list[int]) -> list[int]:
    return [at for at in range(len(whole)) if part and whole[at : at + len(part)] == part]


def cut_pair(num_first: int, num_second: int, max_tokens: int) -> tuple[int, int]:
    """Return how many tokens of each text to keep, ``max_tokens`` in all.

    The longer text is cut until both are equally long, as in transformers by default.
    """
    num_short = min(num_first, num_second, max_tokens // 2)
    num_long = min(max(num_first, num_second), max_tokens - num_short)
    return (num_short, num_long) if num_first <= num_second else (num_long, num_short)


# Encoding one text at a time does not use the backend's threads; it runs in the caller's.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """Tokenizer and chat template of a checkpoint.

    ``vocab_size`` is one more than the highest token id. ``eos_token_ids`` end a generation: those
    of generation_config.json (config.json if there is none) and the tokenizer's own eos token.
    ``reasoning_format`` is the model's format of reasoning; None if it has none. Safe to share
    between threads.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        table: TokenBytes,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: ChatTemplate | None = None,
        rules: TextRules = TextRules(),  # noqa: B008  (immutable)
        reasoning_format: ReasoningFormat | None = None,
        special_texts: Mapping[str, str] = MappingProxyType({}),
        *,
        control_tokens_in_content: bool = False,
    ) -> None:
        self.rules = rules
        self.reasoning_format = reasoning_format
        self._backend = backend
        self._chat_template = chat_template
        self._special_texts = special_texts
        self.table = table
        self.eos_token_ids = eos_token_ids
        self.vocab_size = len(table.pieces)
        self._content = (
            None if control_tokens_in_content else ContentTokenizer(backend, self.vocab_size)
        )
        added = backend.get_added_tokens_decoder()
        # Marks of calls and reasoning must stay in the text, or they could not be told from
        # content.
        shown = set(SPECIAL_TAGS)
        if reasoning_format is not None:
            shown |= {reasoning_format.start, reasoning_format.end}
        self.special_token_ids = frozenset(
            i for i, token in added.items() if token.special and token.content not in shown
        )

    @classmethod
    def load(
        cls,
        path: Path,
        tool_format: ToolFormat | None = None,
        reasoning_format: ReasoningFormat | Literal["none"] | None = None,
        *,
        control_tokens_in_content: bool = False,
    ) -> Tokenizer:
        """Read tokenizer.json and its related files from a checkpoint folder.

        Args:
            tool_format: the model's format of tool calls; None: as its chat template shows.
            reasoning_format: the model's format of reasoning; None: as its chat template shows.
            control_tokens_in_content: content may spell control tokens.

        Raises:
            CheckpointError: a file is invalid; names it.
        """
        file = path / "tokenizer.json"
        backend = _read_backend(file)
        backend.no_truncation()
        backend.no_padding()
        settings = _settings(path)
        eos = _special_text(settings.get("eos_token"))
        spec: dict[str, Any] = msgspec.json.decode(backend.to_str())
        tokens = _tokens(backend)
        table = _table(file, spec, tokens)
        special_texts = _special_texts(settings)
        template = ChatTemplate.load(path, settings, special_texts, tool_format)
        if reasoning_format is None and template is not None:
            reasoning_format = template.reasoning_format
        return cls(
            backend,
            table,
            _eos_token_ids(path, None if eos is None else backend.token_to_id(eos)),
            template,
            text_rules(spec, tokens, [table.bytes_of(i) for i in range(len(tokens))]),
            None if reasoning_format == "none" else reasoning_format,
            special_texts,
            control_tokens_in_content=control_tokens_in_content,
        )

    def with_chat_template(self, source: str) -> Self:
        """Return the tokenizer with the template of a request. Raises
        ParameterError("chat_template") for an invalid one.
        """
        tokenizer = copy.copy(self)
        special_texts = tuple(self._special_texts.items())
        tokenizer._chat_template = given_template(source, special_texts, self.tool_format)
        return tokenizer

    @property
    def tool_format(self) -> ToolFormat | None:
        """Format of the model's tool calls; None if it takes no messages, and so no tools."""
        return None if self._chat_template is None else self._chat_template.tool_format

    def encode(
        self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of ``text``, with the model's tokens around a prompt if
        ``add_special_tokens``.

        Special tokens spelled out in the text are recognised. Other threads run meanwhile. If the
        tokenizer's rules allow cuts, a long text needs no more memory than a short one plus its
        ids.

        Raises:
            TextTooLongError: there are more than ``max_tokens``. It is raised as soon as that is
                certain, mostly before any text is tokenized.
        """
        check_length(text, self.rules, max_tokens)
        around = self.special_around if add_special_tokens else ([], [])
        if around is not None and len(text) > PIECE_CHARACTERS:
            bare = partial(self._encode, add_special_tokens=False)
            return ids_in_pieces(text, self.rules, bare, max_tokens, around)
        ids = self._encode(text, add_special_tokens)
        if max_tokens is not None and len(ids) > max_tokens:
            raise TextTooLongError(len(ids), is_exact=True)
        return ids

    def encode_content(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of a text, without tokens around it.

        Control tokens spelled out in it are recognised only in the server-written spans of a
        ``TemplateText``; everywhere if the tokenizer was loaded with ``control_tokens_in_content``.
        Raises as ``encode`` does.
        """
        if self._content is None:
            return self.encode(text, add_special_tokens=False, max_tokens=max_tokens)
        check_length(text, self.rules, max_tokens)
        spelled = self._content.spelled(text)
        return ids_in_pieces(spelled, self.rules, self._content.encode, max_tokens)

    def encode_pair(
        self, first: str, second: str, *, max_tokens: int, num_kept: int | None = None
    ) -> list[int]:
        """Return the token ids of a pair of texts, with the model's tokens around and between them.

        If the pair has more than ``num_kept`` tokens (None: no limit), the longer text is cut at
        its end first.

        Raises:
            TextTooLongError: as ``encode`` does.
            ParameterError: ("truncate_prompt_tokens") ``num_kept`` leaves no text.
            CheckpointError: the special tokens are ambiguous.
        """
        around = self._around_pair
        room = max_tokens if num_kept is None else None
        first_ids, second_ids = (
            self.encode_content(text, max_tokens=room) for text in (first, second)
        )
        if num_kept is not None:
            left = num_kept - around.num_tokens
            if left < 1:
                raise ParameterError(
                    "truncate_prompt_tokens",
                    f"truncate_prompt_tokens must be more than {around.num_tokens}, the number of "
                    "special tokens around the two texts",
                )
            num_first, num_second = cut_pair(len(first_ids), len(second_ids), left)
            first_ids, second_ids = first_ids[:num_first], second_ids[:num_second]
        ids = [*around.before, *first_ids, *around.between, *second_ids, *around.behind]
        if len(ids) > max_tokens:
            raise TextTooLongError(len(ids), is_exact=True)
        return ids

    @cached_property
    def _around_pair(self) -> AroundPair:
        return around_pair(
            lambda text: self._encode(text, add_special_tokens=False),
            lambda first, second: self._encode((first, second), add_special_tokens=True),
        )

    def _encode(self, text: str | tuple[str, str], add_special_tokens: bool) -> list[int]:
        return ids_of(self._backend, text, add_special_tokens)

    @cached_property
    def special_around(self) -> tuple[list[int], list[int]] | None:
        """Tokens before and after a prompt; None if they cannot be separated from it."""
        bare = self._encode("a", add_special_tokens=False)
        whole = self._encode("a", add_special_tokens=True)
        starts = [at for at in range(len(whole)) if whole[at : at + len(bare)] == bare]
        if len(starts) != 1:
            return None
        return whole[: starts[0]], whole[starts[0] + len(bare) :]

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolDefinition] = (),
        *,
        max_tokens: int | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> list[int]:
        """Return the token ids of a conversation in the model's template.

        The prompt ends where the answer begins, without the answer's beginning if
        ``add_generation_prompt`` is false, or where the last message is to be continued. ``tools``
        are described to the model; ``arguments`` are further variables of the template.

        Raises:
            ParameterError: ("messages") there is no template; otherwise as ``ChatTemplate.render``
                does.
            TextTooLongError: as ``encode`` does.
        """
        text = self.render_chat(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            arguments=arguments,
        )
        return self.encode_content(text, max_tokens=max_tokens)

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolDefinition] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> TemplateText:
        """Return the text that ``encode_chat`` encodes."""
        if self._chat_template is None:
            raise ParameterError(
                "messages",
                "this model has no chat template and takes prompts only: send a prompt instead "
                "of messages",
            )
        return self._chat_template.render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            arguments=arguments,
        )

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``. Bytes that are not UTF-8 become U+FFFD; ids beyond the
        vocabulary add nothing.
        """
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        return self.table.decode(token_ids, skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """Return one token's bytes, special or not; they need not be whole characters."""
        return self.table.bytes_of(token_id)

    def spelling(self, token_id: int) -> str:
        """Return one token as tokenizer.json spells it, such as ``Ġmill``; empty if there is
        none.
        """
        return self._backend.id_to_token(token_id) or ""

    def first_token_bytes(self, token_id: int) -> bytes:
        """Return one token's bytes at the beginning of a text."""
        return self.table.first_bytes_of(token_id)

    @cached_property
    def silent_token_ids(self) -> frozenset[int]:
        """Tokens that no text is made of: special tokens and tokens that end a sequence."""
        return self.special_token_ids.union(self.eos_token_ids)

    @cached_property
    def ids_by_bytes(self) -> dict[bytes, int]:
        """Map from bytes within a text to a token that has them, for tokens that texts are made
        of.
        """
        made = (one for one in range(self.vocab_size) if one not in self.silent_token_ids)
        ids = {self.table.bytes_of(token_id): token_id for token_id in made}
        ids.pop(b"", None)
        return ids

    @cached_property
    def longest_token_bytes(self) -> int:
        """Length of the longest key of ``ids_by_bytes``."""
        return max(map(len, self.ids_by_bytes), default=0)

    def word_ends(self, text: str) -> list[int]:
        """Return the ends of the words into which ``text`` is split before tokenization; empty if
        it is not split.
        """
        splitter = self._backend.pre_tokenizer
        return [] if splitter is None else [end for _, (_, end) in splitter.pre_tokenize_str(text)]


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
    """Return tokenizer_config.json, merged over the file in which older checkpoints name special
    tokens.
    """
    files = (path / "special_tokens_map.json", path / "tokenizer_config.json")
    merged: dict[str, Any] = {}
    for file in files:
        if file.is_file():
            merged |= read_json_object(file)
    return merged


def _tokens(backend: tokenizers.Tokenizer) -> list[str | None]:
    """Return the tokens' spellings by id; None for a missing id."""
    ids = backend.get_vocab(with_added_tokens=True).values()
    return [backend.id_to_token(i) for i in range(max(ids, default=-1) + 1)]


def _table(file: Path, spec: dict[str, Any], tokens: Sequence[str | None]) -> TokenBytes:
    try:
        return token_bytes(spec["decoder"], tokens)
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
    """Return ``bos_token`` and the other special tokens' texts, as templates use them."""
    texts = {
        name: _special_text(settings.get(name)) for name in settings if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if text is not None}


def _special_text(value: object) -> str | None:
    """Return the text of a special token, which is given as text or as an object with it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None

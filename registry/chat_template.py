"""Conversations to prompts, by the template that comes with a checkpoint."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from schemas.errors import CheckpointError, ParameterError
from schemas.jobs import ChatMessage

ROLES = ("system", "developer", "user", "assistant", "tool")
TEMPLATE_FILE = "chat_template.jinja"

# What an expression in a template can raise, besides jinja's own errors, given odd messages.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


def _local_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).astimezone()


class _GenerationBlock(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it adds nothing."""

    tags = {"generation"}  # noqa: RUF012  declared so by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. It runs in a sandbox: it sees the conversation, the special tokens'
    texts and the time, and cannot reach or change anything else."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        origin: str = "the chat template",
        now: Callable[[], datetime.datetime] = _local_now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{origin}, line {error.lineno}: {error.message}.") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(
        cls, path: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> ChatTemplate | None:
        """The template of a checkpoint folder: chat_template.jinja, else the one (named
        ``default`` if there are several) in tokenizer_config.json; None without either."""
        file = path / TEMPLATE_FILE
        if file.is_file():
            try:
                return cls(file.read_text(encoding="utf-8"), special_tokens, str(file))
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{file} is not UTF-8 text: {error}.") from error
        origin = f"{path / 'tokenizer_config.json'}: field chat_template"
        source = tokenizer_config.get("chat_template")
        if isinstance(source, list):
            named = {x.get("name"): x.get("template") for x in source if isinstance(x, dict)}
            source = named.get("default")
            if source is None:
                raise CheckpointError(f"{origin} has no template named default.")
        if source is None:
            return None
        if not isinstance(source, str):
            raise CheckpointError(f"{origin} must be a template or a list of named ones.")
        return cls(source, special_tokens, origin)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt, up to where the assistant's answer begins.

        Raises ParameterError("messages") for no messages, an unknown role, or what the template
        itself refuses.
        """
        if not messages:
            raise ParameterError("messages", "messages must hold at least one message")
        for message in messages:
            if message.role not in ROLES:
                raise ParameterError(
                    "messages", f"role {message.role!r:.40} is not one of {', '.join(ROLES)}"
                )
        try:
            return self._template.render(
                messages=[_as_dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except _RENDER_ERRORS as error:
            raise ParameterError(
                "messages", f"the model's chat template refuses these messages: {error}"
            ) from error


def _as_dict(message: ChatMessage) -> dict[str, str]:
    turn = {"role": message.role, "content": message.content}
    return turn if message.name is None else turn | {"name": message.name}


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja's own filter would escape it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )

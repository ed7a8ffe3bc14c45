"""Conversations to prompts, by the template that comes with a checkpoint."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from msgspec.structs import replace

from millrace.registry.reasoning import format_shown as reasoning_shown
from millrace.registry.template_environment import TemplateEnvironment
from millrace.registry.template_text import TemplateText, literal
from millrace.registry.tool_formats.conversation import (
    WITH_SHORT_IDS,
    in_plain_text,
    messages_as_dicts,
    one_call_a_turn,
    tool_as_dict,
    with_tools_described,
)
from millrace.registry.tool_formats.template_manners import CallManners, format_shown, manners_of
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.errors import CheckpointError, ParameterError
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.tools import ToolDefinition, ToolFormat

ROLES = ("system", "developer", "user", "assistant", "tool")
TEMPLATE_FILE = "chat_template.jinja"
# What a template for conversations with tools is called, where there is one beside the default.
_TOOL_TEMPLATE = "tool_use"
_TOOL_TEMPLATE_FILE = f"additional_chat_templates/{_TOOL_TEMPLATE}.jinja"

NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})
# The field of requests whose values are variables of the template, and those that it may not set.
ARGUMENTS_FIELD = "chat_template_kwargs"
# Beside the functions that every template has.
_SET_HERE = frozenset(
    {
        *("messages", "tools", "add_generation_prompt"),
        *("loop", "self", "super", "caller", "varargs", "kwargs"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"),
        "mask_token",
    }
)
CONTINUE_FIELD = "continue_final_message"
# The field that gives a template in place of the model's, and how long that may be.
TEMPLATE_FIELD = "chat_template"
_MAX_GIVEN_CHARACTERS = 65_536
# Of the private use area: nobody's text has it, and if it did, ours would be the last.
_MARK = "\ue0c0\ue0c1\ue0c0"
# Whether the model is to think, as templates call it, and efforts that are none.
_THINKS = ("enable_thinking", "thinking")
_NO_EFFORT = ("none", "minimal")

# What an expression in a template can raise, besides jinja's own errors, given odd messages.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)
# What Python's own compiler raises of code that jinja makes, which has limits that jinja's language
# has not: loops within loops within loops, numbers of thousands of digits.
_COMPILE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)


def _local_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).astimezone()


class ChatTemplate:
    """A compiled template. It runs in a sandbox: it sees the conversation, the special tokens'
    texts and the time, and cannot reach or change anything else.

    ``tool_format`` is how the model writes tool calls: as the caller says, else as the template
    shows. A template that shows how calls are told but does not take tools has them described in a
    message; one that does neither, or in no format that is known here, never sees any of it: all is
    told in plain text then. ``tool_source`` is the template to use where there are tools, if that
    is another one. ``reasoning_format`` is how the model marks its thoughts, as the template shows;
    None: it has none. Refusals call it ``called``.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        origin: str = "the chat template",
        now: Callable[[], datetime.datetime] = _local_now,
        tool_format: ToolFormat | None = None,
        tool_source: str | None = None,
        called: str = "the model's chat template",
    ) -> None:
        self._called = called
        environment = TemplateEnvironment(now)
        self._template, names = _compiled(environment, source, origin)
        self._tool_template = self._template
        takes_tools = "tools" in names
        if tool_source is not None:
            self._tool_template, tool_names = _compiled(environment, tool_source, origin)
            takes_tools = "tools" in tool_names
            names |= tool_names
        told_by = source if tool_source is None else tool_source
        shown = format_shown(told_by)
        self._takes_tools = takes_tools and (tool_format or shown) is not None
        self._tells_calls = shown is not None and "tool_calls" in told_by
        if not (takes_tools or self._tells_calls):
            shown = None
        self.tool_format = tool_format or shown or ToolFormat.HERMES
        self.reasoning_format: ReasoningFormat | None = reasoning_shown(source)
        self._names = names
        self._special_tokens = {name: literal(text) for name, text in special_tokens.items()}
        self._set_here = frozenset(environment.globals).union(_SET_HERE, special_tokens)

    @classmethod
    def load(
        cls,
        path: Path,
        tokenizer_config: Mapping[str, Any],
        special_tokens: Mapping[str, str],
        tool_format: ToolFormat | None = None,
    ) -> ChatTemplate | None:
        """The template of a checkpoint folder: chat_template.jinja, else the one (named
        ``default`` if there are several) in tokenizer_config.json; None without either. One named
        ``tool_use`` beside it is for conversations with tools."""
        file = path / TEMPLATE_FILE
        source: str | None
        if file.is_file():
            origin, source = str(file), _read(file)
            tool_file = path / _TOOL_TEMPLATE_FILE
            tool_source = _read(tool_file) if tool_file.is_file() else None
        else:
            origin = f"{path / 'tokenizer_config.json'}: field chat_template"
            source, tool_source = _sources(tokenizer_config.get("chat_template"), origin)
            if source is None:
                return None
        return cls(source, special_tokens, origin, tool_format=tool_format, tool_source=tool_source)

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolDefinition] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> TemplateText:
        """The prompt, which knows what of it the template wrote, up to where the assistant's answer
        begins; without what begins it unless ``add_generation_prompt``. With
        ``continue_final_message`` it ends within the last message, which is the assistant's: behind
        its text, or its thoughts if it has nothing else.
        ``arguments`` are further variables of the template; whether a model is to think has several
        names, and the template gets it by the one that it knows.

        Raises ParameterError("messages") for no messages, an unknown role, or what the template
        itself refuses, ParameterError("continue_final_message") for a last message that cannot be
        continued, and ParameterError naming the argument that stands for what is given otherwise.
        """
        if not messages:
            raise ParameterError("messages", "messages must hold at least one message")
        for message in messages:
            if message.role not in ROLES:
                raise ParameterError(
                    "messages", f"role {message.role!r:.40} is not one of {', '.join(ROLES)}"
                )
        if continue_final_message:
            messages = (*messages[:-1], _marked(messages[-1]))
            add_generation_prompt = False
        variables = self._variables(arguments)
        refusal: Exception | None = None
        for conversation in self._ways_to_tell(messages, tools):
            try:
                text = self._render(conversation, tools, add_generation_prompt, variables)
            except _RENDER_ERRORS as error:
                refusal = refusal or error
            else:
                text = _up_to_mark(text, self._called) if continue_final_message else text
                return text if isinstance(text, TemplateText) else TemplateText(text)
        raise ParameterError(
            "messages", f"{self._called} refuses these messages: {_told(refusal)}"
        ) from refusal

    def _ways_to_tell(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolDefinition]
    ) -> Iterator[Sequence[ChatMessage]]:
        """The conversation as it is to be tried on the template, the best way first."""
        if not self._takes_tools and (tools or any(_is_of_tools(m) for m in messages)):
            if self._tells_calls:
                yield from with_tools_described(messages, tools, self.tool_format)
            yield from in_plain_text(messages, tools, self.tool_format)
            return
        yield messages
        if any(len(message.tool_calls) > 1 for message in messages):
            yield one_call_a_turn(messages)

    def _render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolDefinition],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        with_tools = (self._takes_tools or self._tells_calls) and (
            bool(tools) or any(_is_of_tools(m) for m in messages)
        )
        template = self._tool_template if with_tools else self._template
        return template.render(
            messages=messages_as_dicts(messages, self._manners),
            add_generation_prompt=add_generation_prompt,
            tools=[tool_as_dict(tool) for tool in tools] if tools and self._takes_tools else None,
            **variables,
        )

    @cached_property
    def _manners(self) -> CallManners:
        """How earlier calls are told; of no consequence where they are told in plain text."""
        manners = manners_of(self._rendered_or_nothing)
        return manners._replace(short_ids=self.tool_format in WITH_SHORT_IDS)

    def _rendered_or_nothing(self, turns: list[dict[str, Any]]) -> str:
        try:
            return self._tool_template.render(
                messages=turns, tools=None, documents=None, **self._special_tokens
            )
        except _RENDER_ERRORS:
            return ""

    def _variables(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What templates see beside the conversation."""
        variables: dict[str, Any] = {"documents": None, **self._special_tokens}
        for name in arguments:
            if name in self._set_here:
                field = f"{ARGUMENTS_FIELD}.{name:.80}"
                raise ParameterError(field, f"{field} is set by the server. Leave it out.")
        thinks = _thinks(arguments)
        variables |= arguments
        if thinks is not None:
            asked = [name for name in _THINKS if name in self._names and name not in arguments]
            variables |= dict.fromkeys(asked, thinks)
        return variables


@lru_cache(maxsize=64)
def given_template(
    source: str, special_tokens: tuple[tuple[str, str], ...], tool_format: ToolFormat | None
) -> ChatTemplate:
    """A template that came with a request, for a model that writes calls in ``tool_format``; that
    of a client is mostly the same each time. Raises ParameterError("chat_template") for one that is
    no template, or too long."""
    if len(source) > _MAX_GIVEN_CHARACTERS:
        raise ParameterError(
            TEMPLATE_FIELD, f"{TEMPLATE_FIELD} may have {_MAX_GIVEN_CHARACTERS} characters at most."
        )
    try:
        return ChatTemplate(
            source,
            dict(special_tokens),
            TEMPLATE_FIELD,
            tool_format=tool_format,
            called=f"the {TEMPLATE_FIELD} of this request",
        )
    except CheckpointError as error:
        raise ParameterError(TEMPLATE_FIELD, f"{error}") from error


def _marked(message: ChatMessage) -> ChatMessage:
    """A message with a mark where it is to be continued, which no template trims away."""
    if message.role != "assistant" or message.tool_calls:
        raise ParameterError(
            CONTINUE_FIELD, f"{CONTINUE_FIELD} takes a last message of the assistant's, no calls."
        )
    if message.reasoning and not message.content:
        return replace(message, reasoning=message.reasoning + _MARK)
    return replace(message, content=message.content + _MARK)


def _up_to_mark(text: str, called: str) -> str:
    before, mark, _ = text.rpartition(_MARK)
    if not mark:
        raise ParameterError(
            CONTINUE_FIELD,
            f"{CONTINUE_FIELD}: {called} does not tell that of the last message.",
        )
    return before


def _thinks(arguments: Mapping[str, Any]) -> bool | None:
    """Whether the model is to think before it answers, as far as that is asked. Raises
    ParameterError for what is neither true nor false."""
    asked = [name for name in _THINKS if name in arguments]
    for name in asked:
        if not isinstance(arguments[name], bool):
            field = f"{ARGUMENTS_FIELD}.{name}"
            told = msgspec.json.encode(arguments[name]).decode()
            raise ParameterError(field, f"{field} must be true or false, got {told:.80}.")
    if asked:
        value: bool = arguments[asked[0]]
        return value
    effort = arguments.get("reasoning_effort")
    return None if effort is None else effort not in _NO_EFFORT


def _is_of_tools(message: ChatMessage) -> bool:
    return message.role == "tool" or bool(message.tool_calls)


def _compiled(
    environment: TemplateEnvironment, source: str, origin: str
) -> tuple[jinja2.Template, set[str]]:
    """The template, and the names of the variables that it reads."""
    try:
        parsed = environment.parse(source)
        names = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "load"}
        template = environment.from_string(parsed)
    except jinja2.TemplateSyntaxError as error:
        message = (error.message or "no template").rstrip(".")
        raise CheckpointError(f"{origin}, line {error.lineno}: {message}.") from error
    except _COMPILE_ERRORS as error:
        raise CheckpointError(f"{origin} cannot be compiled: {_told(error)}.") from error
    # Copied for each rendering, which takes a chain of mappings longer than the rendering itself.
    template.globals = dict(template.globals)
    return template, names


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not UTF-8 text: {error}.") from error


def _sources(setting: Any, origin: str) -> tuple[str | None, str | None]:
    """The template out of the tokenizer's settings, and the one for tools, if there are any."""
    tool_source = None
    if isinstance(setting, list):
        named = {x.get("name"): x.get("template") for x in setting if isinstance(x, dict)}
        tool_source = named.get(_TOOL_TEMPLATE)
        setting = named.get("default")
        if setting is None:
            raise CheckpointError(f"{origin} has no template named default.")
    if not isinstance(setting, str | None) or not isinstance(tool_source, str | None):
        raise CheckpointError(f"{origin} must be a template or a list of named ones.")
    return setting, tool_source


def _told(error: Exception | None) -> str:
    """Its words; that memory ended comes without any."""
    return f"{error}" or type(error).__name__

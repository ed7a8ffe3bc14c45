"""Tools in prompts: by templates that know tools, and in plain text for other templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.registry.catalogue import load_catalogue
from millrace.registry.chat_template import ChatTemplate
from millrace.registry.served import ServedModel
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.registry.tool_formats import ArgumentsPiece, CallPiece, ToolCallParser
from millrace.schemas.errors import CheckpointError, ConfigError, ParameterError
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.tools import ToolCall, ToolDefinition, ToolFormat
from tests.support.engine.tokenizers_made import CHAT_TEMPLATE, byte_level, write_tokenizer

WEATHER = ToolDefinition(
    name="weather",
    description="Tells the weather «now»",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}},
)
NOW = ToolDefinition(name="now")
CALLS = (
    ToolCall(id="a", name="weather", arguments='{"city": "Łódź"}'),
    ToolCall(id="b", name="now", arguments="{}"),
)
ASKED = ChatMessage("user", "How is it?")
CALLED = ChatMessage("assistant", "I look.", tool_calls=CALLS)
TOLD = (
    ChatMessage("tool", "rain", tool_call_id="a"),
    ChatMessage("tool", "noon", tool_call_id="b"),
)
CHAT = [ASKED, CALLED, *TOLD]

# In the manner of Qwen 2.5 and 3.
QWEN_LIKE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0].content if messages[0].role == 'system' else 'Hi.' }}
    {{- '\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n</tools> Call so: <tool_call>{"name": .., "arguments": ..}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}
                {{- tool_call.arguments }}
            {%- else %}
                {{- tool_call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# In the manner of Llama 3.x: tools in the first question, and no more than one call in a turn.
LLAMA_LIKE = """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if tools is not none %}
    {{- '<|user|>Answer in the form {"name": function, "parameters": its arguments}.\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + '\\n' }}
    {%- endfor %}
    {{- messages[0].content + '<|eot|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('One call at a time, please') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|assistant|>{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|eot|>' }}
    {%- elif message.role in ['tool', 'ipython'] %}
        {{- '<|ipython|>' + (message.content | tojson) + '<|eot|>' }}
    {%- else %}
        {{- '<|' + message.role + '|>' + message.content + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""

# Knows no tools, insists on turns that alternate and, if so told, on there being no system.
STRICT = """\
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if no_system or not loop.first %}
            {{- raise_exception('no system here') }}
        {%- endif %}
    {%- elif message.role not in ['user', 'assistant'] %}
        {{- raise_exception('who is ' + message.role) }}
    {%- elif loop.previtem and loop.previtem.role == message.role %}
        {{- raise_exception('take turns') }}
    {%- endif %}
    {{- '[' + message.role + ']' + message.content }}
{%- endfor %}
"""

# Takes tools, in words of its own.
FOREIGN = """\
{{- '[TOOLS]' + (tools | tojson) if tools else '' }}
{%- for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}
"""


def test_the_format_is_as_the_template_shows_or_as_it_is_told() -> None:
    def format_of(source: str, given: ToolFormat | None = None) -> ToolFormat:
        return ChatTemplate(source, {}, tool_format=given).tool_format

    assert format_of(QWEN_LIKE) is ToolFormat.HERMES
    assert format_of(LLAMA_LIKE) is ToolFormat.LLAMA3
    assert format_of(STRICT) is ToolFormat.HERMES
    assert format_of(FOREIGN) is ToolFormat.HERMES
    assert format_of(STRICT, ToolFormat.LLAMA3) is ToolFormat.LLAMA3
    # It speaks of tags, but takes no tools.
    assert format_of('{{ "parameters" }}') is ToolFormat.HERMES


def test_tools_as_qwen_takes_them() -> None:
    text = ChatTemplate(QWEN_LIKE, {}).render(CHAT, [WEATHER, NOW])
    lines = text.split("\n")
    assert lines[:2] == ["<|im_start|>system", "Hi."]
    assert json.loads(lines[3])["function"] == {
        "name": "weather",
        "description": "Tells the weather «now»",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    assert text.endswith(
        "<|im_start|>user\nHow is it?<|im_end|>\n"
        "<|im_start|>assistant\nI look.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n"
        "<tool_response>\nnoon\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_without_tools_a_template_sees_none() -> None:
    template = ChatTemplate(QWEN_LIKE, {})
    assert template.render([ASKED]) == (
        "<|im_start|>user\nHow is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    # Calls of before are still told.
    assert '"arguments": {"city": "Łódź"}' in template.render(CHAT)


def test_arguments_that_are_no_object_stay_as_they_are() -> None:
    call = ToolCall(id="a", name="now", arguments='{"cut of')
    text = ChatTemplate(QWEN_LIKE, {}).render(
        [ASKED, ChatMessage("assistant", "", tool_calls=(call,))], [NOW]
    )
    assert '{"name": "now", "arguments": {"cut of}' in text


def test_parallel_calls_one_after_the_other_for_llama() -> None:
    text = ChatTemplate(LLAMA_LIKE, {"bos_token": "<|begin|>"}).render(CHAT, [WEATHER])
    head, tail = text.split("How is it?")
    assert head.startswith("<|begin|><|user|>Answer")
    assert '"name": "weather"' in head
    assert tail == (
        '<|eot|><|assistant|>{"name": "weather", "parameters": {"city": "Łódź"}}<|eot|>'
        '<|ipython|>"rain"<|eot|>'
        '<|assistant|>{"name": "now", "parameters": {}}<|eot|>'
        '<|ipython|>"noon"<|eot|><|assistant|>'
    )


def test_calls_without_results_are_kept_apart_too() -> None:
    text = ChatTemplate(LLAMA_LIKE, {"bos_token": ""}).render([ASKED, CALLED, ASKED])
    assert text.count("<|assistant|>{") == 2


def test_the_name_of_the_tool_goes_with_its_result() -> None:
    loop = "{% for m in messages %}{{ m.name }}/{{ m.tool_call_id }} {% endfor %}"
    text = ChatTemplate("{{ tools }}<tool_call>" + loop, {}).render(CHAT)
    assert text.endswith("weather/a now/b ")


def test_tools_are_described_in_plain_text_where_the_template_knows_none() -> None:
    template = ChatTemplate(STRICT, {})
    system, rest = template.render(CHAT, [WEATHER, NOW]).split("[user]", 1)
    assert system.startswith("[system]You have tools.")
    given = [json.loads(line) for line in system.split("\n") if line.startswith('{"name": "')][:2]
    assert [tool["name"] for tool in given] == ["weather", "now"]
    assert "<tool_call>" in system
    assert rest == (
        "How is it?[assistant]I look.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        "[user]<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    )
    assert template.render(CHAT).startswith("[user]How is it?[assistant]I look.\n<tool_call>")


def test_a_question_after_results_is_in_their_turn() -> None:
    text = ChatTemplate(STRICT, {}).render([*CHAT, ChatMessage("user", "And?")], [NOW])
    assert text.endswith("noon\n</tool_response>\nAnd?")


def test_the_system_s_own_words_come_first() -> None:
    text = ChatTemplate(STRICT, {}).render([ChatMessage("system", "Be brief."), ASKED], [NOW])
    assert text.startswith("[system]Be brief.\n\nYou have tools.")
    assert text.endswith("[user]How is it?")


@pytest.mark.parametrize("system", [[], [ChatMessage("system", "Be brief.")]])
def test_tools_are_described_in_the_question_where_no_system_message_is_allowed(
    system: list[ChatMessage],
) -> None:
    text = ChatTemplate("{% set no_system = true %}" + STRICT, {}).render([*system, ASKED], [NOW])
    words = "Be brief.\n\n" if system else ""
    assert text.startswith(f"[user]{words}You have tools.")
    assert text.endswith("\n\nHow is it?")


def test_a_format_that_is_not_known_is_told_in_ours() -> None:
    text = ChatTemplate(FOREIGN, {}).render([ASKED], [NOW])
    assert "[TOOLS]" not in text
    assert "<tool_call>" in text
    # The catalogue knows better.
    template = ChatTemplate(FOREIGN, {}, tool_format=ToolFormat.HERMES)
    assert template.render([ASKED], [NOW]).startswith("[TOOLS]")


@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_what_is_told_in_plain_text_reads_as_calls(tool_format: ToolFormat) -> None:
    source = "{{ (messages | selectattr('role', 'equalto', 'assistant') | first).content }}"
    called = ChatMessage("assistant", "", tool_calls=CALLS)
    text = ChatTemplate(source, {}, tool_format=tool_format).render([ASKED, called], [NOW])
    parser = ToolCallParser(tool_format, lambda: "x")
    assert [*parser.push(text), *parser.finish()] == [
        CallPiece(0, "x", "weather"),
        ArgumentsPiece(0, '{"city": "Łódź"}'),
        CallPiece(1, "x", "now"),
        ArgumentsPiece(1, "{}"),
    ]


def test_what_no_way_of_telling_helps_is_refused_by_the_first_reason() -> None:
    with pytest.raises(ParameterError, match="take turns"):
        ChatTemplate(STRICT, {}).render([ASKED, ASKED], [NOW])


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": QWEN_LIKE}]
    for setting in ({"chat_template": named}, {}):
        if not setting:
            (tmp_path / "chat_template.jinja").write_text("plain")
            (tmp_path / "additional_chat_templates").mkdir()
            (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(QWEN_LIKE)
        template = ChatTemplate.load(tmp_path, setting, {})
        assert template is not None
        assert template.render([ASKED]) == "plain"
        assert "<tools>" in template.render([ASKED], [NOW])
        assert "<tool_response>" in template.render(CHAT)
    bad = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": 7}]
    with pytest.raises(CheckpointError, match="must be a template"):
        ChatTemplate.load(tmp_path / "none", {"chat_template": bad}, {})


def test_the_catalogue_says_the_format(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models:\n  m:\n    source: ./m\n    tool_format: llama3\n")
    assert load_catalogue(str(file)).get("m").tool_format is ToolFormat.LLAMA3
    file.write_text("models:\n  m:\n    source: ./m\n    tool_format: cobol\n")
    with pytest.raises(ConfigError, match=r"model m: Invalid enum value 'cobol'"):
        load_catalogue(str(file))


def test_a_tokenizer_encodes_what_it_renders(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level(), chat_template=CHAT_TEMPLATE)
    tokenizer = Tokenizer.load(tmp_path, ToolFormat.LLAMA3)
    assert tokenizer.tool_format is ToolFormat.LLAMA3
    text = tokenizer.render_chat([ASKED], [NOW])
    assert '"parameters": <object' in text
    assert tokenizer.encode_chat([ASKED], [NOW]) == tokenizer.encode(text, add_special_tokens=False)


def test_a_tokenizer_without_a_template_has_no_format(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level())
    assert Tokenizer.load(tmp_path).tool_format is None


def test_tags_of_calls_are_text_even_where_they_are_special(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_special_tokens(["<tool_call>", "</tool_call>", "<other>"])
    write_tokenizer(tmp_path, backend)
    tokenizer = Tokenizer.load(tmp_path)
    tokens = tokenizer.encode("<tool_call>x</tool_call><other>", add_special_tokens=False)
    assert len(tokens) == 4
    assert tokenizer.decode(tokens) == "<tool_call>x</tool_call>"


def test_the_demo_model_takes_tools() -> None:
    model = ServedModel.load(load_catalogue(""), "demo")
    assert model.tool_format is ToolFormat.HERMES
    text = model.tokenizer.render_chat(CHAT, [WEATHER, NOW])
    assert text.startswith("<|bos|><|system|>You have tools.")
    assert text.endswith("</tool_response><|end|><|assistant|>")
    assert len(model.tokenizer.encode_chat(CHAT, [WEATHER, NOW])) < 1_000

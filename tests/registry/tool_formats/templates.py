"""Chat templates in the form of those that models come with."""

from __future__ import annotations

from registry.chat_template import ChatTemplate
from schemas.jobs import ChatMessage
from schemas.tools import ToolCall, ToolDefinition

WEATHER = ToolDefinition(
    name="weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
)
NOW = ToolDefinition(name="now")
ASKED = ChatMessage("user", "How is it?")
CALLED = ChatMessage(
    "assistant",
    "",
    tool_calls=(
        ToolCall(id="call_0123456789", name="weather", arguments='{"city": "Łódź", "days": 2}'),
        ToolCall(id="abcDEF123", name="now", arguments="{}"),
    ),
)
TOLD = (
    ChatMessage("tool", "rain", tool_call_id="call_0123456789"),
    ChatMessage("tool", "noon", tool_call_id="abcDEF123"),
)
CHAT = [ASKED, CALLED, *TOLD]

# As Mistral 7B v0.3, Nemo and Small 3.1: a list, ids of nine characters.
MISTRAL = """\
{{- bos_token }}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == asked[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('ids have nine characters') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('ids have nine characters') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string }}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('who is ' + message.role) }}
    {%- endif %}
{%- endfor %}
"""

# As Magistral, Devstral and Ministral: a tag for each call and for its arguments.
MISTRAL_V11 = """\
{{- bos_token }}
{%- if tools is defined and tools is not none %}
    {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {%- if arguments is not string %}
                {%- set arguments = arguments | tojson %}
            {%- endif %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + arguments }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content | string + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

# As Llama 3.2 and 4 where calls are to be Python.
PYTHONIC = """\
{{- bos_token }}
{%- if tools is not none %}
    {{- '<|user|>Answer in the form [function(parameter=value, …), function()], tools are:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + '\\n' }}
    {%- endfor %}
    {{- '[function(parameter=value)]<|eot|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|ipython|>' + ({'output': message.content} | tojson) + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {{- '<|assistant|>[' }}
        {%- for call in message.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for name in call.function.arguments %}
                {{- name + '=' + (call.function.arguments[name] | tojson) }}
                {{- '' if loop.last else ', ' }}
            {%- endfor %}
            {{- ')' if loop.last else '), ' }}
        {%- endfor %}
        {{- ']<|eot|>' }}
    {%- else %}
        {{- '<|' + message.role + '|>' + message.content + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})

"""Chat templates in the form of models' own templates."""

from __future__ import annotations

from millrace.registry.chat_template import ChatTemplate
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.tools import ToolCall, ToolDefinition, ToolFormat

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


# As DeepSeek V3 and R1: no tools are taken, calls are told where there is no content, and their
# arguments are text.
DEEPSEEK_V3 = """\
{%- set ns = namespace(system='', results=false) %}
{%- for message in messages if message.role == 'system' %}
    {%- set ns.system = message.content %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.results = false %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' and message.content is none %}
        {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
        {%- for call in message.tool_calls %}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
            {{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
            {{- '' if loop.last else '\\n' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜tool▁outputs▁end｜>' if ns.results else '<｜Assistant｜>' }}
        {{- message.content + '<｜end▁of▁sentence｜>' }}
        {%- set ns.results = false %}
    {%- elif message.role == 'tool' %}
        {{- '' if ns.results else '<｜tool▁outputs▁begin｜>' }}
        {%- set ns.results = true %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{{- '<｜tool▁outputs▁end｜>' if ns.results }}
{%- if add_generation_prompt and not ns.results %}
    {{- '<｜Assistant｜>' }}
{%- endif %}
"""

# As DeepSeek V3.1.
DEEPSEEK_V31 = """\
{%- set system = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') %}
{{- bos_token + system | join('\\n') }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<｜User｜>' + message.content + '<｜Assistant｜></think>' }}
    {%- elif message.role == 'assistant' and message['tool_calls'] is defined %}
        {%- for call in message['tool_calls'] %}
            {{- message.content + '<｜tool▁calls▁begin｜>' if loop.first else '' }}
            {{- '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' }}
            {{- call['function']['arguments'] + '<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content + '<｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
"""

# As Qwen3-Coder.
QWEN3_CODER = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n<function>\\n<name>' ~ tool.function.name ~ '</name>' }}
        {%- for name, fields in tool.function.parameters.properties | items %}
            {{- '\\n<parameter><name>' ~ name ~ '</name></parameter>' }}
        {%- endfor %}
        {{- '\\n</function>' }}
    {%- endfor %}
    {{- '\\n</tools>\\n<tool_call>\\n<function=example>\\n<parameter=one>\\nvalue' }}
    {{- '\\n</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n' if loop.previtem and loop.previtem.role != 'tool' }}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- elif message.tool_calls is defined and message.tool_calls | length > 0 %}
        {{- '<|im_start|>assistant' }}
        {{- '\\n' + message.content | trim + '\\n' if message.content }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments | items %}
                {%- set is_json = value is mapping or (value is sequence and value is not string) %}
                {{- '<parameter=' + name + '>\\n' }}
                {{- (value | tojson if is_json else value | string) + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# As GLM 4.5 and 4.6.
GLM45 = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
<tool_call>{name}
<arg_key>{key}</arg_key>
<arg_value>{value}</arg_value>
</tool_call>{%- endif -%}
{% for m in messages %}
{%- if m.role == 'assistant' -%}
<|assistant|>
{%- if m.content.strip() -%}
{{ '\\n' + m.content.strip() }}
{%- endif -%}
{% for call in m.tool_calls or [] %}
{{ '\\n<tool_call>' + call.function.name }}
{% for key, value in call.function.arguments.items() %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{%- elif m.role == 'tool' -%}
{{- '<|observation|>' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else -%}
<|{{ m.role }}|>
{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>
{%- endif -%}
"""


_DEEPSEEK_S = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
# The template of each format, and what is one special token in its vocabulary.
FAMILIES = {
    ToolFormat.PYTHONIC: (PYTHONIC, ()),
    ToolFormat.MISTRAL: (MISTRAL, ("[TOOL_CALLS]", "[INST]", "[/INST]")),
    ToolFormat.MISTRAL_V11: (MISTRAL_V11, ("[TOOL_CALLS]", "[ARGS]", "[INST]")),
    ToolFormat.QWEN3_CODER: (QWEN3_CODER, ("<tool_call>", "</tool_call>")),
    ToolFormat.DEEPSEEK_V3: (DEEPSEEK_V3, _DEEPSEEK_S),
    ToolFormat.DEEPSEEK_V31: (DEEPSEEK_V31, _DEEPSEEK_S),
    ToolFormat.GLM45: (GLM45, ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>")),
}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})

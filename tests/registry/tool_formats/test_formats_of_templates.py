"""Formats shown by templates, and earlier calls written in them."""

from __future__ import annotations

import json
import re

import pytest

from millrace.registry.chat_template import ChatTemplate
from millrace.registry.tool_formats.call_style import CallStyle, call_style_of
from millrace.registry.tool_formats.conversation import new_call_id, short_id
from millrace.registry.tool_formats.written import calls_as_text
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.tools import ToolFormat
from tests.registry.tool_formats import templates
from tests.registry.tool_formats.reading import read
from tests.registry.tool_formats.templates import ASKED, CALLED, CHAT, NOW, WEATHER, template

SOURCES = {
    ToolFormat.MISTRAL: templates.MISTRAL,
    ToolFormat.MISTRAL_V11: templates.MISTRAL_V11,
    ToolFormat.PYTHONIC: templates.PYTHONIC,
    ToolFormat.QWEN3_CODER: templates.QWEN3_CODER,
    ToolFormat.DEEPSEEK_V3: templates.DEEPSEEK_V3,
    ToolFormat.DEEPSEEK_V31: templates.DEEPSEEK_V31,
    ToolFormat.GLM45: templates.GLM45,
}
# What stands around a turn of the assistant.
BEGINS = re.compile(r"<\|assistant\|>|<\|im_start\|>assistant|<｜Assistant｜>")
ENDS = re.compile(r"</s>|<\|eot\|>|<\|im_end\|>\n|<｜end▁of▁sentence｜>")
# Their templates take no tools.
DESCRIBED = (ToolFormat.DEEPSEEK_V3, ToolFormat.DEEPSEEK_V31)
each = pytest.mark.parametrize(("shown", "source"), SOURCES.items(), ids=list(SOURCES))


@each
def test_the_format_is_as_the_template_shows(shown: ToolFormat, source: str) -> None:
    assert template(source).tool_format is shown
    assert ChatTemplate(source, {}, tool_format=ToolFormat.HERMES).tool_format is ToolFormat.HERMES


@pytest.mark.parametrize(
    "source",
    [
        "{{ tools }}<seed:tool_call><function={{ 1 }}><parameter=a>",
        "{{ tools }}[TOOL_REQUEST]",
        "{{ 1 }}<|tool_calls_section_begin|>{{ tools }}",
    ],
)
def test_what_is_not_known_is_told_in_plain_text(source: str) -> None:
    made = ChatTemplate(source + "{{ messages[0].content }}", {})
    assert made.tool_format is ToolFormat.HERMES
    assert "You have tools." in made.render([ASKED], [WEATHER])


@each
def test_the_template_is_given_tools(shown: ToolFormat, source: str) -> None:
    text = template(source).render([ASKED], [WEATHER, NOW])
    assert ("You have tools." in text) is (shown in DESCRIBED)
    assert "<tool_response>" not in text
    assert "weather" in text
    assert "city" in text


@each
def test_what_the_template_tells_of_calls_reads_as_these(shown: ToolFormat, source: str) -> None:
    without = template(source).render([ASKED], add_generation_prompt=False)
    text = template(source).render([ASKED, CALLED], add_generation_prompt=False)
    turn = BEGINS.sub("", text.removeprefix(without))
    content, calls = read(shown, ENDS.sub("", turn), [WEATHER, NOW])
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("weather", {"city": "Łódź", "days": 2}),
        ("now", {}),
    ]


@pytest.mark.parametrize("tool_format", list(ToolFormat))
def test_what_a_model_is_told_to_write_is_what_is_read(tool_format: ToolFormat) -> None:
    source = "{{ (messages | selectattr('role', 'equalto', 'assistant') | first).content }}"
    text = ChatTemplate(source, {}, tool_format=tool_format).render([ASKED, CALLED], [NOW])
    assert text == calls_as_text(CALLED.tool_calls, tool_format)
    content, calls = read(tool_format, text)
    assert (content, [name for name, _ in calls]) == ("", ["weather", "now"])


def test_mistral_s_ids_have_nine_characters() -> None:
    text = template(templates.MISTRAL).render(CHAT, [WEATHER])
    short = short_id("call_0123456789")
    assert len(short) == 9
    assert text == (
        "<s>[AVAILABLE_TOOLS] "
        + text.split("[AVAILABLE_TOOLS] ")[1].split("[/AVAILABLE_TOOLS]")[0]
        + "[/AVAILABLE_TOOLS][INST] How is it?[/INST]"
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Łódź", "days": 2}, '
        f'"id": "{short}"}}, {{"name": "now", "arguments": {{}}, "id": "abcDEF123"}}]</s>'
        f'[TOOL_RESULTS] {{"content": rain, "call_id": "{short}"}}[/TOOL_RESULTS]'
        '[TOOL_RESULTS] {"content": noon, "call_id": "abcDEF123"}[/TOOL_RESULTS]'
    )


@pytest.mark.parametrize("tool_format", [ToolFormat.MISTRAL, ToolFormat.MISTRAL_V11])
def test_ids_that_are_made_for_mistral(tool_format: ToolFormat) -> None:
    ids = [new_call_id(tool_format, f"request/{i}") for i in range(50)]
    assert len(set(ids)) == 50
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert [short_id(one) for one in ids] == ids
    assert new_call_id(ToolFormat.HERMES, "request/0").startswith("call_")


def test_results_through_mistral_v11() -> None:
    text = template(templates.MISTRAL_V11).render([*CHAT, ChatMessage("assistant", "Wet.")])
    assert text == (
        "<s>[INST]How is it?[/INST]"
        '[TOOL_CALLS]weather[ARGS]{"city": "Łódź", "days": 2}[TOOL_CALLS]now[ARGS]{}</s>'
        "[TOOL_RESULTS]rain[/TOOL_RESULTS][TOOL_RESULTS]noon[/TOOL_RESULTS]Wet.</s>"
    )


def test_results_through_a_pythonic_template() -> None:
    text = template(templates.PYTHONIC).render(CHAT)
    assert text == (
        "<s><|user|>How is it?<|eot|>"
        '<|assistant|>[weather(city="Łódź", days=2), now()]<|eot|>'
        '<|ipython|>{"output": "rain"}<|eot|><|ipython|>{"output": "noon"}<|eot|><|assistant|>'
    )


@pytest.mark.parametrize(
    ("source", "style"),
    [
        ("{{ c.function | tojson }}", CallStyle()),
        ("{{ c.function.name + c.function.arguments }}", CallStyle(arguments_as_text=True)),
        ("{{ c.function.name }}{{ c.function.arguments }}", CallStyle(arguments_as_text=True)),
        (
            "{% if m.content is none %}{{ c.function | tojson }}{% endif %}",
            CallStyle(without_content=True, apart=True),
        ),
        (
            "{{ c.function | tojson }}{% if m.content is not none %}<|assistant|>{% endif %}",
            CallStyle(without_content=True),
        ),
        ("{{ c.nothing }}", CallStyle()),
        ("{{ raise_exception('no') }}", CallStyle()),
    ],
)
def test_how_a_template_wants_calls_told(source: str, style: CallStyle) -> None:
    loops = "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls %}"
    made = ChatTemplate("{{ tools }}<tool_call>" + loops + source + "{% endfor %}{% endfor %}", {})
    assert call_style_of(made._rendered_or_nothing) == style

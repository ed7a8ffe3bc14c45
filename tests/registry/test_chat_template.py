"""Chat templates: the conventions of the hub, the sandbox, and refusals."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Backend

from millrace.registry.chat_template import ChatTemplate
from millrace.schemas.errors import CheckpointError, ParameterError
from millrace.schemas.jobs import ChatMessage
from tests.support.engine.tokenizers_made import byte_level

CHAT = [
    ChatMessage("system", "Be brief.\n"),
    ChatMessage("user", 'What is "TTFT" <now>? 你好'),
    ChatMessage("assistant", " First token. "),
    ChatMessage("user", "Thanks"),
]
LLAMA_LIKE = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|system|>' + system + eos_token }}
{% for message in messages %}
    {% if message.role not in ['user', 'assistant'] %}
{{ raise_exception('Only user and assistant, not ' + message.role) }}
    {% endif %}
    {% if loop.index0 % 2 == 0 and message.role != 'user' %}{% continue %}{% endif %}
<|{{ message.role }}|>{{ message.content | tojson }}
    {% generation %}{{ message.get('name', '-') }}{% endgeneration %}

{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def render(source: str, messages: list[ChatMessage], **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(messages)


@pytest.mark.parametrize("messages", [CHAT, CHAT[1:], CHAT[:2]])
def test_renders_as_transformers_does(messages: list[ChatMessage]) -> None:
    backend: Backend = byte_level()
    make: Any = transformers.PreTrainedTokenizerFast
    reference = make(
        tokenizer_object=backend,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        chat_template=LLAMA_LIKE,
    )
    turns = [{"role": message.role, "content": message.content} for message in messages]
    expected = reference.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert render(LLAMA_LIKE, messages, bos_token="<|begin|>", eos_token="<|end|>") == expected


def test_a_last_message_is_left_open() -> None:
    template = ChatTemplate(LLAMA_LIKE, {"bos_token": "<|begin|>", "eos_token": "<|end|>"})
    whole = template.render(CHAT[:3], add_generation_prompt=False)
    text = template.render(CHAT[:3], continue_final_message=True)
    assert text.endswith('<|assistant|>" First token. ')
    assert whole.startswith(text)


def test_a_message_that_a_template_leaves_out_is_not_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(ParameterError, match="leaves out the text") as refused:
        template.render(CHAT[:3], continue_final_message=True)
    assert refused.value.param == "continue_final_message"


def test_names_are_passed_on() -> None:
    source = "{% for m in messages %}{{ m.name }}{% endfor %}"
    assert render(source, [ChatMessage("user", "hi", name="Ada")]) == "Ada"


def test_the_time_is_passed_in() -> None:
    now = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: now)
    assert template.render(CHAT) == "21 Nov 2026"


@pytest.mark.parametrize(
    ("source", "messages", "words"),
    [
        (LLAMA_LIKE, [ChatMessage("developer", "x")], "Only user and assistant, not developer"),
        (LLAMA_LIKE, [ChatMessage("wizard", "x")], "role 'wizard' is not one of system"),
        (LLAMA_LIKE, [], "at least one message"),
        ("{{ messages[9].content.x }}", CHAT, "refuses"),
        ("{{ 1 / 0 }}", CHAT, "refuses"),
        ("{{ 'a' + 1 }}", CHAT, "refuses"),
        ("{{ messages.append(1) }}", CHAT, "refuses"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", CHAT, "refuses"),
    ],
)
def test_refusals_are_the_caller_s_to_mend(
    source: str, messages: list[ChatMessage], words: str
) -> None:
    with pytest.raises(ParameterError, match=words) as caught:
        render(source, messages, bos_token="<|begin|>", eos_token="<|end|>")
    assert caught.value.param == "messages"


def test_a_template_with_an_error_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m. }}\n")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja, line 2"):
        ChatTemplate.load(tmp_path, {}, {})


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, None),
        ("one", "one"),
        ([{"name": "tool_use", "template": "two"}, {"name": "default", "template": "one"}], "one"),
    ],
)
def test_template_from_the_tokenizer_s_settings(
    tmp_path: Path, setting: Any, expected: str | None
) -> None:
    template = ChatTemplate.load(tmp_path, json.loads(json.dumps({"chat_template": setting})), {})
    assert (None if template is None else template.render(CHAT)) == expected


def test_a_template_file_comes_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("file")
    template = ChatTemplate.load(tmp_path, {"chat_template": "setting"}, {})
    assert template is not None
    assert template.render(CHAT) == "file"


@pytest.mark.parametrize("setting", [7, [{"name": "rag", "template": "x"}]])
def test_an_unusable_setting_is_named(tmp_path: Path, setting: Any) -> None:
    with pytest.raises(CheckpointError, match="chat_template"):
        ChatTemplate.load(tmp_path, {"chat_template": setting}, {})

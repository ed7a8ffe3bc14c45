"""A model that makes a test's calls, one a turn: the script of a server of completions.

The model's folder has the demo's tokenizer, a window of 200,000 tokens, and a chat template with
tools and thoughts as Qwen3 has them. The script reads from the prompt how many tools have answered.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT

NAME = "scripted"
WINDOW_TOKENS = 200_000
ASIDE = "A short title"
_DEMO = ROOT / "registry" / "demo" / "model"
RESULT = "<|user|><tool_response>\n"
_CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
  {{- "<|system|># Tools\\n<tools>" }}
  {%- for tool in tools %}{{ "\\n" + (tool | tojson) }}{% endfor %}
  {{- "\\n</tools><|end|>" }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == "tool" %}
    {{- "<|user|><tool_response>\\n" + message.content + "\\n</tool_response><|end|>" }}
  {%- else %}
    {{- "<|" + ("system" if message.role == "developer" else message.role) + "|>" }}
    {{- message.content or "" }}
    {%- for call in message.tool_calls or [] %}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- call.function.arguments if call.function.arguments is string
          else call.function.arguments | tojson }}
      {{- "}\\n</tool_call>" }}
    {%- endfor %}
    {{- "<|end|>" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- "<|assistant|>" }}
  {%- if enable_thinking is defined and not enable_thinking %}{{ "<think>\\n\\n</think>\\n\\n" }}
  {%- endif %}
{%- endif %}
"""


@dataclass(frozen=True)
class Call:
    """A call of a tool, and a text that the tool's result has to contain."""

    name: str
    arguments: dict[str, Any]
    result: str = ""

    def __str__(self) -> str:
        call = json.dumps({"name": self.name, "arguments": self.arguments})
        return f"<tool_call>\n{call}\n</tool_call>"


@dataclass
class ScriptedModel:
    """The model makes ``calls``, one a turn, then it says ``answer``.

    A prompt without tools is answered with ``aside``: agents ask for titles and summaries beside
    their loop. ``result`` begins each tool's result in a prompt. If a tool is not offered, or a
    result is not what its call says, the model's answer names the fault.
    """

    calls: Sequence[Call] = ()
    answer: str = ""
    aside: str = ASIDE
    result: str = RESULT

    def plays(
        self, calls: Sequence[Call], answer: str, *, aside: str = ASIDE, result: str = RESULT
    ) -> None:
        """Begin another script."""
        self.calls, self.answer, self.aside, self.result = calls, answer, aside, result

    def says(self, prompt: str) -> str:
        """Return the model's text after ``prompt``: the script of an OpenAiServer."""
        tools, has_tools, talk = prompt.partition("</tools>")
        if not has_tools:
            return self.aside
        _, *results = talk.split(self.result)
        for call, result in zip(self.calls, results, strict=False):
            if call.result not in result.partition("<|end|>")[0]:
                return f"The result of {call.name} lacks {call.result}."
        if len(results) >= len(self.calls):
            return self.answer
        call = self.calls[len(results)]
        if f'"name": "{call.name}"' not in tools:
            return f"There is no tool {call.name}."
        thoughts = (
            "" if prompt.endswith("</think>\n\n") else "<think>\nOne at a time.\n</think>\n\n"
        )
        return f"{thoughts}{call}"


def write_model(folder: Path) -> Path:
    """Write the model's files for the gateway and the worker, without weights."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "model.safetensors"):
        shutil.copy(_DEMO / name, folder)
    config = json.loads((_DEMO / "config.json").read_text())
    config["max_position_embeddings"] = WINDOW_TOKENS
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((_DEMO / "tokenizer_config.json").read_text())
    settings |= {"model_max_length": WINDOW_TOKENS, "chat_template": _CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder

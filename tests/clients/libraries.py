"""Libraries and small programs that call tools: how each is installed and started on the loop of
frameworks.py or ai_sdk.mjs."""

from __future__ import annotations

from dataclasses import dataclass

from tests.clients.coding_agents import IS, SAID, SHOW, WAS
from tests.clients.scripted_model import RESULT, Call

TOOLS = (
    Call("read_file", {"path": "notes.txt"}, f"{IS} millrace."),
    Call("write_file", {"path": "answer.txt", "text": "millrace\n"}, "written"),
    Call("replace", {"path": "notes.txt", "old": IS, "new": WAS}, "replaced"),
    Call("shell", {"command": SHOW}, SAID),
)


@dataclass(frozen=True)
class Library:
    """``section`` is the library's heading in docs/agents.md, ``command`` runs its loop."""

    section: str
    packages: tuple[str, ...]
    command: tuple[str, ...]
    calls: tuple[Call, ...] = TOOLS
    result: str = RESULT


def _python(section: str, function: str, *packages: str) -> Library:
    return Library(section, packages, ("python", "frameworks.py", function))


_AI_SDK = (
    *("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/anthropic@4.0.105"),
    "zod@4.1.12",
)
# The answer is an argument of its last tool, and results are the user's words.
_SMOLAGENTS = Library(
    "smolagents",
    ("smolagents[openai]==1.26.0",),
    ("python", "frameworks.py", "smolagents"),
    (*TOOLS, Call("final_answer", {"answer": "All four steps are done."})),
    "<|user|>Observation:\n",
)

PYTHON = (
    _python("OpenAI Agents SDK", "openai_agents", "openai-agents==0.24.0"),
    _python("Pydantic AI", "pydantic_ai", "pydantic-ai-slim[openai]==2.68.0"),
    _python(
        "LangChain", "langchain", "langchain==1.5.2", "langchain-openai==1.7.4", "langgraph==1.2.24"
    ),
    _python(
        "LlamaIndex",
        "llama_index",
        "llama-index-core==0.14.25",
        "llama-index-llms-openai-like==0.8.1",
    ),
    _SMOLAGENTS,
    Library(
        "llm",
        ("llm==0.36",),
        (
            "llm",
            "--model",
            "scripted",
            "--chain-limit",
            "0",
            "--functions",
            "agent_tools.py",
            "Do it.",
        ),
    ),
)
JAVASCRIPT = tuple(
    Library(section, _AI_SDK, ("node", "ai_sdk.mjs"))
    for section in ("Vercel AI SDK", "Vercel AI SDK, Messages API")
)

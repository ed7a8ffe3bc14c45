"""The same loop of four tools by each framework: ``python frameworks.py NAME`` prints the answer.

It runs in the framework's environment, beside ``agent_tools.py`` and ``configured.py``: the lines
of docs/agents.md that make ``model``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any

from agent_tools import read_file, replace, shell, write_file
from configured import model

_TASK = "Do it."
_TOOLS: Sequence[Callable[..., str]] = (read_file, write_file, replace, shell)


def openai_agents() -> str:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(disabled=True)
    agent = Agent(name="a", model=model, tools=[function_tool(tool) for tool in _TOOLS])
    return str(Runner.run_sync(agent, _TASK).final_output)


def pydantic_ai() -> str:
    from pydantic_ai import Agent

    return str(Agent(model, tools=_TOOLS).run_sync(_TASK).output)


def langchain() -> str:
    from langchain.agents import create_agent

    state = create_agent(model, [*_TOOLS]).invoke({"messages": [("user", _TASK)]})
    return str(state["messages"][-1].content)


def llama_index() -> str:
    from llama_index.core.agent.workflow import FunctionAgent

    async def run() -> Any:
        return await FunctionAgent(tools=[*_TOOLS], llm=model).run(_TASK)

    return str(asyncio.run(run()))


def smolagents() -> str:
    from smolagents import ToolCallingAgent, tool

    return str(ToolCallingAgent([tool(one) for one in _TOOLS], model, verbosity_level=0).run(_TASK))


if __name__ == "__main__":
    print(globals()[sys.argv[1]]())

"""Generation request of a client, independent of the endpoint."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.schemas.jobs import ChatMessage, Tier
from millrace.schemas.models.adapters import Adapter
from millrace.schemas.notices import Notices
from millrace.schemas.sampling import SamplingOptions
from millrace.schemas.tools import ToolChoice, ToolDefinition


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Well-formed request: the prompt, the options, and the caller's labels.

    - Exactly one of ``prompt``, ``messages`` and ``prompt_token_ids`` is given. ``other_prompts``
      are further prompts.
    - ``sampling.n`` choices are made of each prompt, each by a job of its own, except in a beam
      search. ``tier`` None is the caller's own.
    - The client runs ``tools``; the gateway runs the tools named in ``server_tools``.
    - If the gateway chose ``model``, ``model_requested`` is the requested name and
      ``route_reason`` the reason of the choice. ``adapter`` is the adapter that ``model`` stands
      for, in its version when the request was accepted.
    - ``chat_template_kwargs`` are variables of the model's chat template, or of ``chat_template``,
      which replaces it. Without ``add_generation_prompt`` the beginning of an answer is left out.
      With ``continue_final_message`` the answer continues the last message.
    - ``cache_salt`` separates its prompt from others in prefix caches. Only the last
      ``truncate_prompt_tokens`` of the prompt are used, if given (-1: as many as fit).
    - Of a tenant's requests, those with a lower ``priority`` are served earlier.
    - ``prediction`` is the expected answer, for the most part. ``metadata`` is stored in
      analytics.
    - ``grammar_field`` is the caller's field with the grammar of ``sampling``. ``words`` maps
      fields of jobs to the caller's names.
    - The answer includes reasoning if ``include_reasoning``, log-probabilities of the prompt if
      ``tells_prompt_logprobs``, and token ids if ``tells_token_ids``. Without
      ``tells_completion`` it has the prompt only.
    - ``notices`` name the features that its parser left out.
    - Tools in ``freeform_tools`` take text that matches a regular expression; empty: any text.
    """

    model: str
    model_requested: str = ""
    route_reason: str = ""
    adapter: Adapter | None = None
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    other_prompts: tuple[str | tuple[int, ...], ...] = ()
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    server_tools: tuple[str, ...] = ()
    sampling: SamplingOptions
    grammar_field: str = ""
    words: dict[str, str] = {}
    tier: Tier | None = None
    user: str = ""
    session_id: str = ""
    cache_salt: str = ""
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    prediction: str = ""
    metadata: dict[str, str] = {}
    session_keep: int | None = None
    echo: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    include_reasoning: bool = True
    tells_prompt_logprobs: bool = False
    tells_token_ids: bool = False
    tells_completion: bool = True
    notices: Notices = ()
    freeform_tools: dict[str, str] = {}

    @property
    def form_field(self) -> str:
        """Name of the field to blame if the form of the answer cannot be enforced; empty if no
        field demands a form.
        """
        return self.grammar_field or ("tools" if self.tools or self.server_tools else "")

    @property
    def demand_field(self) -> str:
        """Name of the field that demands a grammar of the answer."""
        return self.grammar_field or "tool_choice"

    @property
    def jobs_per_prompt(self) -> int:
        """Number of jobs for the choices of one prompt."""
        return self.sampling.n // self.sampling.num_answers

    @property
    def num_prompt_characters(self) -> int:
        """Number of characters to tokenize."""
        if self.messages is not None:
            return sum(len(one.content) + len(one.reasoning) for one in self.messages)
        return len(self.prompt or "")

"""What a client asks to have generated, whatever endpoint it came by."""

from __future__ import annotations

from typing import Any

import msgspec

from millrace.schemas.jobs import ChatMessage, Tier
from millrace.schemas.models.adapters import Adapter
from millrace.schemas.notices import Notices
from millrace.schemas.sampling import SamplingOptions
from millrace.schemas.tools import ToolChoice, ToolDefinition


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is well formed: what to continue, how, and for whom.

    Exactly one of ``prompt``, ``messages`` and ``prompt_token_ids`` is given; ``other_prompts`` are
    further ones. ``sampling.n`` choices are made of each, every one by a job of its own unless a
    beam search finds them. ``tier`` None is the caller's own. ``tools`` are those that the client
    runs, ``server_tools`` names of those that the gateway runs. Where the gateway chose ``model``,
    ``model_requested`` is what was asked for and ``route_reason`` why it is this one; ``adapter``
    is the one that ``model`` stands for, as it was when the request was accepted.
    ``chat_template_kwargs`` are variables of the model's chat template, or of ``chat_template`` in
    its place; what begins an answer is left out unless ``add_generation_prompt``, the answer goes
    on with the last message if ``continue_final_message``, ``cache_salt`` keeps its prompt apart in
    prefix caches, of which the last ``truncate_prompt_tokens`` count if that is given (-1: as many
    as there is room for). Of its tenant's requests those of a lower ``priority`` are served
    earlier. ``prediction`` is what the answer will be, for the most part. ``metadata`` is for its
    row in analytics. ``grammar_field`` is where the caller wrote the grammar of ``sampling``, and
    ``words`` has the caller's names of fields that jobs call otherwise.
    Thoughts are given out if ``include_reasoning``, log-probabilities of the prompt if
    ``tells_prompt_logprobs``, and the ids of all tokens if ``tells_token_ids``; without
    ``tells_completion`` all that is given out is the prompt. ``notices`` are what its parser left
    out. The input of the tools in ``freeform_tools`` is text that matches a regular expression, any
    text if that is empty.
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
        """The field at fault if the form of the answer cannot be kept; empty: none asks for it."""
        return self.grammar_field or ("tools" if self.tools or self.server_tools else "")

    @property
    def demand_field(self) -> str:
        """The field that demands a grammar of the answer."""
        return self.grammar_field or "tool_choice"

    @property
    def jobs_per_prompt(self) -> int:
        """How many jobs the choices of one prompt are."""
        return self.sampling.n // self.sampling.num_answers

    @property
    def num_prompt_characters(self) -> int:
        """How much text there is to tokenise."""
        if self.messages is not None:
            return sum(len(one.content) + len(one.reasoning) for one in self.messages)
        return len(self.prompt or "")

"""Reader of a request's response: reads the streams of its choices into parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.gateway.errors import Refusal, refusal_of_end
from millrace.gateway.models import ServedModelLike
from millrace.gateway.request.index import PromptTokenIds, RequestState
from millrace.gateway.streams.choice import BeamChoice, Choice, ToldTools
from millrace.gateway.streams.parts import Part
from millrace.gateway.streams.stream import OpenStream, TokenGaps, total_usage
from millrace.gateway.tenancy.identity import Caller
from millrace.registry.requests.generation_request import GenerationRequest
from millrace.registry.requests.ready_jobs import is_unheld
from millrace.schemas.frames import Done, TerminalFrame, TokenLogprob, Usage
from millrace.schemas.notices import Notices, bounded
from millrace.schemas.sampling import SamplingOptions
from millrace.schemas.sessions import SessionInfo
from millrace.schemas.tools import ToolDefinition, ToolMode

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """Accepted request with its caller, model and route. ``created_s`` is UTC epoch seconds."""

    request: GenerationRequest
    caller: Caller
    model: ServedModelLike
    request_id: str
    created_s: int
    session: SessionInfo | None = None
    idempotency_key: str = ""
    prompt_token_ids: PromptTokenIds = ()
    path: str = ""

    @classmethod
    def of(
        cls, state: RequestState, request: GenerationRequest, caller: Caller, model: ServedModelLike
    ) -> AcceptedRequest:
        """Build it from a state. ``request`` is the state's own, or the same with its prompt."""
        return cls(
            request,
            caller,
            model,
            state.request_id,
            state.created_ns // _NS_PER_S,
            state.session,
            state.idempotency_key,
            state.prompt_token_ids,
            state.asked.api.path,
        )


class ResponseReader:
    """Reader of a response until ``ended``. The client has the tokens before ``first_indices``, one
    for each choice, from another connection.
    """

    def __init__(
        self, accepted: AcceptedRequest, gaps: TokenGaps, first_indices: tuple[int, ...] = ()
    ) -> None:
        self.request = accepted.request
        self.caller = accepted.caller
        self.model = accepted.model
        self.request_id = accepted.request_id
        self.created_s = accepted.created_s
        self.session = accepted.session
        self._prompt_token_ids = accepted.prompt_token_ids
        self.first_indices = first_indices
        self.own_tools = frozenset(accepted.request.server_tools)
        self.choices: list[Choice] = []
        self.refusal: Refusal | None = None
        self._gaps = gaps

    @property
    def notices(self) -> Notices:
        """Return the notices of the request and of its calls so far."""
        of_calls = [one for choice in self.choices for one in choice.notices]
        return bounded((*self.request.notices, *of_calls)) if of_calls else self.request.notices

    @property
    def num_jobs(self) -> int:
        """Return the number of jobs in its first rounds."""
        return len(self.choices) // self.request.sampling.num_answers

    def add_choices(self, stream: OpenStream, from_indices: Sequence[int] = ()) -> None:
        """Add the next choices, read from ``stream``: one, or all answers of a beam search.
        ``from_indices`` are their first indices, by default 0.
        """
        request = self.request
        mode = request.tool_choice.mode
        has_tools = bool(request.tools or self.own_tools) and mode is not ToolMode.NONE
        tool_format = self.model.tool_format if has_tools else None
        unheld = request.tools if is_unheld(request, self.model.engine_kind) else ()
        told = ToldTools(self.tools, self.own_tools, request.freeform_tools, unheld)
        ends = _end_token_ids(self.model, request.sampling)
        number = len(self.choices)
        if request.sampling.use_beam_search:
            indices = from_indices or (0,) * request.sampling.n
            self.choices += [
                BeamChoice(number + beam, beam, stream, tool_format, told, index)
                for beam, index in enumerate(indices)
            ]
            return
        from_index = from_indices[0] if from_indices else 0
        must_call = mode in (ToolMode.REQUIRED, ToolMode.NAMED)
        self.choices.append(
            Choice(number, stream, tool_format, told, from_index, ends, must_call=must_call)
        )

    def read_parts(self, now_s: float) -> list[Part]:
        """Return the parts since the last call, in the order of each choice."""
        parts: list[Part] = []
        gaps = self._gaps
        for choice in self.choices:
            if choice.end is None or choice.pending:
                choice.collect(now_s, gaps, parts)
            if choice.round_end is not None:
                self._on_round_end(choice)
            if choice.end is not None and type(choice.end) is not Done:
                self._on_failure(choice.end)
        return parts

    @property
    def tools(self) -> tuple[ToolDefinition, ...]:
        """Return the tools that the model was told of."""
        return self.request.tools

    @property
    def ended(self) -> bool:
        """Return whether the response has ended and all its parts were taken."""
        if self.refusal is not None:
            return True
        first = self.choices[0]
        if first.end is None or first.pending:
            return False  # the usual answer while tokens come, at no cost
        return not any(choice.end is None or choice.pending for choice in self.choices)

    @property
    def has_begun(self) -> bool:
        """Return whether a worker has started the response."""
        return any(
            choice.round or choice.stream.reader.started or choice.stream.reader.has_pending
            for choice in self.choices
        )

    @property
    def usage(self) -> Usage:
        """Return the usage of all choices and rounds; a shared prompt counts once."""
        return total_usage(choice.usage for choice in self.choices)

    @property
    def next_indices(self) -> tuple[int, ...]:
        """Return the index of the first token of each choice that was not taken yet."""
        return tuple([choice.next_index for choice in self.choices])

    def prompt_of(self, choice: int) -> str | tuple[int, ...]:
        """Return the prompt of a choice, if the request had a prompt."""
        request = self.request
        number = choice // request.sampling.n
        if number:
            return request.other_prompts[number - 1]
        return request.prompt if request.prompt is not None else request.prompt_token_ids or ()

    def prompt_token_ids(self, choice: int) -> tuple[int, ...]:
        """Return the token ids of the choice's prompt, if the request asked for token ids."""
        return self._prompt_token_ids[choice // self.request.sampling.n]

    def prompt_logprobs(self, choice: int) -> tuple[TokenLogprob | None, ...]:
        return self.choices[choice].stream.reader.prompt_logprobs

    def _on_round_end(self, choice: Choice) -> None:
        """Handle the end of a round in which the model has called tools of the gateway."""

    def _on_failure(self, end: TerminalFrame) -> None:
        """Fail the response, since one choice has failed."""
        if self.refusal is None:
            self.refusal = refusal_of_end(end, self.request.form_field)


def _end_token_ids(model: ServedModelLike, sampling: SamplingOptions) -> frozenset[int]:
    """Return the tokens that end a completion, unless they are a part of its text."""
    if sampling.include_stop_str_in_output:
        return frozenset()
    ends = () if sampling.ignore_eos else model.eos_token_ids
    return frozenset(ends).union(sampling.stop_token_ids)

"""Bytes of one answer of the Responses API: its events, or the whole object."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import get_args

import msgspec

from millrace.gateway.errors import Refusal
from millrace.gateway.request.response_reader import ResponseReader
from millrace.gateway.responses.conversations import ConversationNotFoundError, ConversationStore
from millrace.gateway.responses.items import Describe, OutputItems
from millrace.gateway.responses.normalised import THOUGHTS, named
from millrace.gateway.responses.replay import events_after
from millrace.gateway.responses.store import ResponseStore
from millrace.gateway.responses.tools import call_kinds
from millrace.gateway.streams.parts import (
    AnswerText,
    CallArguments,
    Part,
    PartEvents,
    ReasoningPart,
)
from millrace.runtime.redis.link import RedisUnreachableError
from millrace.schemas.errors import ContextLengthError
from millrace.schemas.frames import Cancelled, Usage
from millrace.schemas.notices import field_of
from millrace.schemas.openai import TextFormat
from millrace.schemas.responses.events import (
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    StreamError,
)
from millrace.schemas.responses.items import (
    ConversationReference,
    FailureInfo,
    IncompleteDetails,
    InputTokensDetails,
    Item,
    OutputTokensDetails,
    ResponseAnswer,
    ResponsesRequest,
    ResponseStatus,
    ResponseUsage,
    SchemaFormat,
    TextConfig,
)

_log = logging.getLogger(__name__)
_encode = msgspec.json.encode
_WITH_DELTA = (AnswerText, ReasoningPart, CallArguments)


class ResponseRenderer:
    """Renderer of Responses answers. ``given`` are the items of the request's input, ``earlier``
    the items before them; ``conversation`` is both, with ids. ``store`` None: the answer is not
    stored. ``conversations`` has the conversation that the request names. Only events after the
    sequence number ``after`` are emitted. An answer in the background is stored by ``keep``.
    """

    plain: tuple[bytes, bytes] | None = None

    def __init__(
        self,
        request: ResponsesRequest,
        response: ResponseReader,
        earlier: tuple[Item, ...],
        given: tuple[Item, ...],
        store: ResponseStore | None,
        describe: Describe,
        after: int = -1,
        *,
        conversations: ConversationStore | None = None,
    ) -> None:
        stem = response.request_id.rpartition("-")[2]
        self.request = request
        self._text = _text_of(request)
        self._tools = tuple(map(_without_newlines, request.tools or ()))
        self._response_stream = response
        self.conversation = (*earlier, *named(given, stem, earlier))
        self.num_earlier = len(earlier)
        self._conversation_id = request.conversation_id
        self._conversations = conversations
        self._store = store
        self._items = OutputItems(
            stem,
            len(_FIRST),
            describe,
            call_kinds(request, self.conversation),
            seals=THOUGHTS in (request.include or ()),
        )
        self._after = after

    def first(self) -> bytes:
        response = self._response("in_progress")
        return self._bytes_of(
            [kind(sequence_number=number, response=response) for number, kind in enumerate(_FIRST)]
        )

    def part(self, part: Part) -> PartEvents:
        events = self._items.add(part)
        if isinstance(part, _WITH_DELTA) and events:
            return PartEvents(self._bytes_of(events[:-1]), self._bytes_of(events[-1:]))
        return PartEvents(self._bytes_of(events))

    def last(self) -> bytes:
        kind = ResponseCompleted if self._items.incomplete is None else ResponseIncomplete
        event = kind(sequence_number=self._items.number(), response=self._final())
        return self._bytes_of([event])

    def failed(self, refusal: Refusal) -> bytes:
        if self._was_cancelled:
            end = ResponseFailed(sequence_number=self._items.number(), response=self._cancelled())
            return self._bytes_of([end])
        return self._bytes_of(
            [
                StreamError(
                    sequence_number=self._items.number(),
                    code=refusal.code,
                    message=refusal.message,
                    param=refusal.param,
                ),
                ResponseFailed(
                    sequence_number=self._items.number(),
                    response=self._failed(refusal),
                ),
            ]
        )

    def add(self, part: Part) -> None:
        self._items.add(part)

    def whole(self) -> bytes:
        return _encode(self._final())

    @property
    def must_store(self) -> bool:
        return self._store is not None or bool(self._conversation_id)

    async def store(self) -> None:
        """Store the answer if required. If storing fails, the answer has ``store`` false, and if it
        cannot be added to its conversation it has no ``conversation``: an existing answer is not
        withheld for that.
        """
        if self.request.background:
            # The holder stores it as well, but this client may fetch it as soon as it learns of the
            # end.
            await self.keep()
            return
        await self._add_to_conversation()
        if self._store is None:
            return
        try:
            await self._store.put(
                self._response_stream.caller.tenant, self._final(), self.conversation
            )
        except RedisUnreachableError:
            self._store = None
            _log.warning(
                "an answer could not be kept",
                extra={"request_id": self._response_stream.request_id},
            )

    def queued(self) -> ResponseAnswer:
        """Return the answer before it has any output."""
        return self._response("queued")

    async def keep(self) -> None:
        """Store an ended background answer. While Redis is unreachable it is not stored: a later
        request reads it again.
        """
        assert self._store is not None
        tenant = self._response_stream.caller.tenant
        if self._response_stream.refusal is None:
            await self._add_to_conversation()
        try:
            await self._store.end(tenant, self._ended(), self.conversation, self.request)
        except RedisUnreachableError:
            _log.warning(
                "the end of an answer could not be kept",
                extra={"request_id": self._response_stream.request_id},
            )

    async def _add_to_conversation(self) -> None:
        """Add the answer to its conversation, once across all readers of its end."""
        if not self._conversation_id:
            return
        response, conversations = self._response_stream, self._conversations
        assert conversations is not None
        items = (*self.conversation[self.num_earlier :], *self._items.items())
        try:
            await conversations.append(
                response.caller.tenant, self._conversation_id, items, response.request_id
            )
        except (RedisUnreachableError, ConversationNotFoundError):
            self._conversation_id = ""
            _log.warning(
                "an answer could not be added to its conversation",
                extra={"request_id": response.request_id},
            )

    def _ended(self) -> ResponseAnswer:
        refusal = self._response_stream.refusal
        if refusal is None:
            return self._final()
        return self._cancelled() if self._was_cancelled else self._failed(refusal)

    @property
    def _was_cancelled(self) -> bool:
        """Return whether a background answer was cancelled."""
        choice = self._response_stream.choices[0]
        return bool(self.request.background) and isinstance(choice.end, Cancelled)

    def _cancelled(self) -> ResponseAnswer:
        usage = _usage(self._response_stream.usage)
        return msgspec.structs.replace(self._response("cancelled"), usage=usage)

    def _failed(self, refusal: Refusal) -> ResponseAnswer:
        error = FailureInfo(code=_error_code(refusal), message=refusal.message)
        return msgspec.structs.replace(self._response("failed"), error=error)

    def _bytes_of(self, events: Sequence[ResponseEvent]) -> bytes:
        if self._after >= 0:
            events = list(events_after(events, self._after))
        return bytes_of(events)

    def _final(self) -> ResponseAnswer:
        reason = self._items.incomplete
        return msgspec.structs.replace(
            self._response("completed" if reason is None else "incomplete"),
            usage=_usage(self._response_stream.usage),
            incomplete_details=None if reason is None else IncompleteDetails(reason=reason),
        )

    def _response(self, status: ResponseStatus) -> ResponseAnswer:
        request, response = self.request, self._response_stream
        sampling, defaults = response.request.sampling, response.model.sampling_defaults
        return ResponseAnswer(
            id=response.request_id,
            created_at=response.created_s,
            status=status,
            model=response.request.model,
            output=self._items.items(),
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            service_tier=request.service_tier or "auto",
            store=self._store is not None,
            temperature=sampling.value("temperature", defaults),
            text=self._text,
            tool_choice="auto" if request.tool_choice is None else request.tool_choice,
            tools=self._tools,
            top_logprobs=request.top_logprobs or 0,
            top_p=sampling.value("top_p", defaults),
            truncation=request.truncation or "disabled",
            user=request.user,
            background=bool(request.background),
            notices=field_of(response.notices),
            conversation=ConversationReference(self._conversation_id)
            if self._conversation_id
            else None,
        )


_HEADS = {
    kind: f"event: {kind.__struct_config__.tag}\ndata: ".encode()
    for kind in get_args(ResponseEvent)
}
_FIRST: tuple[type[ResponseCreated | ResponseInProgress], ...] = (
    ResponseCreated,
    ResponseInProgress,
)


def _text_of(request: ResponsesRequest) -> TextConfig:
    form = None if request.text is None else request.text.format
    if form is None:
        return TextConfig(format=TextFormat())
    if isinstance(form, SchemaFormat):
        form = msgspec.structs.replace(form, schema=_without_newlines(form.schema))
    return TextConfig(format=form)


def _without_newlines(raw: msgspec.Raw) -> msgspec.Raw:
    """Return a schema without line breaks, since an event's data is one line."""
    return msgspec.Raw(bytes(raw).translate(None, b"\r\n"))


def bytes_of(events: Sequence[ResponseEvent]) -> bytes:
    """Return the events as server-sent events."""
    # Nearly always a single text delta.
    return _bytes_of_one(events[0]) if len(events) == 1 else b"".join(map(_bytes_of_one, events))


def _bytes_of_one(event: ResponseEvent) -> bytes:
    return _HEADS[type(event)] + _encode(event) + b"\n\n"


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def _error_code(refusal: Refusal) -> str:
    """Return the nearest error code of OpenAI's. ``invalid_prompt`` is for faults of the request
    only.
    """
    if refusal.code == ContextLengthError.code:
        return refusal.code
    if refusal.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if refusal.status in (400, 413) else "server_error"

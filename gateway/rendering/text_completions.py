"""Endpoint ``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millrace.gateway.rendering.rendering import (
    ChunkRenderer,
    encode,
    usage_info,
)
from millrace.gateway.rendering.tokens import (
    TextOffsets,
    completion_logprobs,
    prompt_tokens,
)
from millrace.gateway.request.response_reader import ResponseReader
from millrace.gateway.streams.parts import AnswerText, ChoiceEnd, Part, PartEvents
from millrace.registry.tokenizers.output_text import silent_tokens
from millrace.schemas.frames import TokenLogprob
from millrace.schemas.notices import field_of
from millrace.schemas.openai import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)

_AFTER_TEXT = b',"logprobs":null,"finish_reason":null'


class CompletionRenderer(ChunkRenderer):
    """Renderer of ``text_completion`` events and body. With ``echo`` a choice's text begins with
    its prompt, which is sent with the first output of the model.
    """

    def __init__(self, response: ResponseReader, request: CompletionRequest) -> None:
        super().__init__("text_completion", response, request.stream_options)
        num_choices = len(response.choices)
        self._text_befores = [before + b',"text":' for before in self._befores]
        had = response.first_indices
        self._to_echo = set(range(num_choices)) if response.request.echo else set()
        self._told_prompts = {i for i in range(num_choices) if had and had[i]}
        is_plain = (
            num_choices == 1
            and self._told is None
            and not response.request.echo
            and not self._is_continuous
            and response.request.tells_completion
        )
        self.plain = (
            (self._text_befores[0], _AFTER_TEXT + self._after(0))
            if is_plain and response.request.sampling.logprobs is None
            else None
        )
        self._offsets: dict[int, TextOffsets] = {}
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(num_choices)]

    def first(self) -> bytes:
        return b""

    def part(self, part: Part) -> PartEvents:
        if isinstance(part, AnswerText):
            echoed = self._echo_event(part.choice) if part.choice in self._to_echo else b""
            if not self._response.request.tells_completion:
                return PartEvents(echoed)
            if part.logprobs or self._told:
                lists = None
                if part.logprobs:
                    lists = self._lists(part.choice, part.first_index, part.logprobs)
                return PartEvents(echoed, self._event(part.choice, part.text, lists, part))
            if not part.text:
                return PartEvents(echoed)
            text = self._text_befores[part.choice] + encode(part.text) + _AFTER_TEXT
            return PartEvents(echoed, text + self._after(part.choice))
        if isinstance(part, ChoiceEnd):
            echoed = self._echo_event(part.choice) if part.choice in self._to_echo else b""
            end = b'"","logprobs":null,"finish_reason":' + self._end(part)
            end = self._text_befores[part.choice] + end
            return PartEvents(echoed + end)
        return PartEvents()

    def add(self, part: Part) -> None:
        if isinstance(part, AnswerText):
            self._logprobs[part.choice] += part.logprobs
            if self._told is not None:
                self._told.add(part)

    def whole(self) -> bytes:
        response = self._response
        return encode(
            Completion(
                id=response.request_id,
                created=response.created_s,
                model=response.request.model,
                choices=tuple(self._choice(i) for i in range(len(response.choices))),
                usage=usage_info(response.usage),
                notices=field_of(response.notices),
            )
        )

    def _choice(self, index: int) -> CompletionChoice:
        response = self._response
        prompt, prompt_lists = "", None
        if response.request.echo:
            prompt, prompt_lists = self._echo(index)
        if not response.request.tells_completion:
            return self._choice_of(index, prompt, prompt_lists)
        lists = None
        if response.request.sampling.logprobs is not None:
            lists = self._lists(index, 0, self._logprobs[index])
            if prompt_lists is not None:
                lists = _joined(prompt_lists, lists)
        return self._choice_of(index, prompt + response.choices[index].text, lists)

    def _choice_of(
        self, index: int, text: str, lists: CompletionLogprobs | None
    ) -> CompletionChoice:
        choice, told = self._response.choices[index], self._told
        return CompletionChoice(
            index=index,
            text=text,
            finish_reason=choice.reason,
            stop_reason=choice.stop_reason,
            logprobs=lists,
            prompt_logprobs=prompt_tokens(self._response, index),
            prompt_token_ids=self._response.prompt_token_ids(index) if told else msgspec.UNSET,
            token_ids=told.of_choice(index) if told else msgspec.UNSET,
        )

    def _prompt_text(self, index: int) -> str:
        prompt = self._response.prompt_of(index)
        return prompt if isinstance(prompt, str) else self._response.model.tokenizer.decode(prompt)

    def _echo(self, index: int) -> tuple[str, CompletionLogprobs | None]:
        """Return the prompt of a choice, and its log-probabilities if requested."""
        response = self._response
        prompt, text = response.prompt_of(index), self._prompt_text(index)
        tokenizer = response.model.tokenizer
        if response.request.sampling.prompt_logprobs is None:
            return text, None
        token_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        logprobs = response.prompt_logprobs(index)
        if len(logprobs) != len(token_ids):
            return text, None
        # A tokenizer may have changed the prompt: its tokens end at the end of the prompt at the
        # latest.
        offsets = [min(one, len(text)) for one in TextOffsets(tokenizer).push_all(token_ids)]
        return text, completion_logprobs(tokenizer, token_ids, logprobs, offsets)

    def _echo_event(self, index: int) -> bytes:
        self._to_echo.discard(index)
        text, lists = self._echo(index)
        return self._event(index, text, lists)

    def _event(
        self,
        index: int,
        text: str,
        lists: CompletionLogprobs | None,
        told_of: AnswerText | None = None,
    ) -> bytes:
        more = b',"logprobs":' + encode(lists) + b',"finish_reason":null'
        if self._told is not None and index not in self._told_prompts:
            self._told_prompts.add(index)
            more += b',"prompt_token_ids":' + encode(self._response.prompt_token_ids(index))
        if self._told is not None and told_of is not None:
            more += b',"token_ids":' + encode(self._told.of_part(told_of))
        return self._text_befores[index] + encode(text) + more + self._after(index)

    def _lists(
        self, index: int, first_index: int, logprobs: Sequence[TokenLogprob]
    ) -> CompletionLogprobs:
        """Return the offsets of a choice's tokens from ``first_index`` on."""
        offsets = self._offsets.get(index)
        if offsets is None:
            offsets = self._offsets[index] = self._offsets_from(index, first_index)
        token_ids = [one.token_id for one in logprobs]
        tokenizer = self._response.model.tokenizer
        return completion_logprobs(tokenizer, token_ids, logprobs, offsets.push_all(token_ids))

    def _offsets_from(self, index: int, first_index: int) -> TextOffsets:
        """Return the offsets of a choice. They begin after the echoed prompt and after the tokens
        that an earlier connection sent.
        """
        response = self._response
        sampling = response.request.sampling
        offsets = TextOffsets(
            response.model.tokenizer,
            response.prompt_of(index),
            start=len(self._prompt_text(index)) if response.request.echo else 0,
            skip_special_tokens=sampling.skip_special_tokens,
            silent=silent_tokens(response.model.eos_token_ids, sampling),
        )
        offsets.push_all(response.choices[index].token_ids(0, first_index))
        return offsets


def _joined(one: CompletionLogprobs, other: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=one.tokens + other.tokens,
        token_logprobs=one.token_logprobs + other.token_logprobs,
        top_logprobs=one.top_logprobs + other.top_logprobs,
        text_offset=one.text_offset + other.text_offset,
    )

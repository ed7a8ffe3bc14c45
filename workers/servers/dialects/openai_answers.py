"""Of /v1/completions of OpenAI's API: streams with text, or with token ids in its place."""

from __future__ import annotations

from millrace.registry.tokenizers.incremental import IncrementalTokenizer
from millrace.workers.servers.dialect import Part, ServerStreamError
from millrace.workers.servers.dialects.completions_answers import Choice, CompletionsReader


class TextReader(CompletionsReader[Choice]):
    """Makes token ids of the text by ``tokenizer``."""

    def __init__(self, tokenizer: IncrementalTokenizer) -> None:
        super().__init__(Choice)
        self._tokenizer = tokenizer

    def part_of(self, choice: Choice) -> Part:
        token_ids = self._tokenizer.push(choice.text or "")
        if choice.finish_reason is not None:
            token_ids += self._tokenizer.flush()
        return Part(token_ids=token_ids)


class TokenIdsReader(CompletionsReader[Choice]):
    """Of a server that was asked for ids in place of text."""

    def __init__(self) -> None:
        super().__init__(Choice)

    def part_of(self, choice: Choice) -> Part:
        if choice.text:
            raise ServerStreamError("The server sent text where it was asked for token ids.")
        return Part(token_ids=choice.token_ids or ())

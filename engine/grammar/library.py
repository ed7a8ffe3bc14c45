"""Wrapper of llguidance, which compiles and follows grammars.

Only this module calls that library.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import (
    LLMatcher,
    LLParserLimits,
    LLTokenizer,
    TokenizerWrapper,
    grammar_from,
)

from millrace.registry.json_schemas.keeping import UnkeptError, kept_schema, refuse
from millrace.registry.json_schemas.patterns import ends_within_escape
from millrace.schemas.errors import GrammarError
from millrace.schemas.sampling import SCHEMA_SETTINGS, TOOL_MARK, Grammar, GrammarKind

if TYPE_CHECKING:  # the probe process has to start quickly
    from llguidance._lib import JsonCompileOptions

    from millrace.registry.tokenizers.tokenizer import Tokenizer

MAX_MESSAGE_CHARACTERS = 240
# The compiler's recursion grows with the nesting of the text; the longest allowed text fits.
COMPILE_STACK_BYTES = 64 << 20
_WORD_BITS = 32
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): (failed to compile JSON schema: )?")
_PICTURE = re.compile(r"\d+ \||[\^|\s]*$")
# Messages of the library, which are for programmers, reworded for authors of grammars.
_REWORDED = (
    (
        re.compile(r"oneOf constraints are not supported\. Enable 'coerce_one_of' .*"),
        "oneOf is taken only if no text can match two of its schemas; write anyOf instead",
    ),
    (
        re.compile(r"Resource '(.*?)' is not present in a registry .*"),
        r"$ref \1 is outside of the schema, and nothing is fetched; put it into $defs",
    ),
    (
        re.compile(r"lexer precomputation failed; .*"),
        "its patterns are too large; make them smaller",
    ),
)
ANY_OBJECT = '{"type": "object"}'
# At most one blank between two parts of a document. If more are allowed, a model wastes tokens on
# them, or gets stuck.
JSON_BLANKS = r"\x20"
# Maximum lexer states, of 1 to 2 kB each. With the library's default, one grammar may fill half a
# gigabyte.
_MAX_LEXER_STATES = 50_000
# Prefix that the library adds to the bytes of a token that is no text; never in UTF-8.
_NO_TEXT = b"\xff"


class Matcher:
    """State of one sequence in its grammar. Used by one thread at a time.

    ``must_end`` is True if the last mask allows only the end, even if the request forbids it.
    """

    __slots__ = ("_failure", "_inner", "must_end")

    def __init__(self, inner: LLMatcher) -> None:
        self._inner = inner
        self._failure = ""
        self.must_end = False

    def copy(self) -> Matcher:
        """Copy the matcher; the copy advances by itself."""
        return Matcher(self._inner.deep_copy())

    @property
    def complete(self) -> bool:
        """True if the grammar is complete and nothing can follow."""
        return self._inner.is_stopped()

    @property
    def error(self) -> GrammarError | None:
        """Error if the grammar cannot be followed any further; else None."""
        if self._failure:
            return GrammarError(self._failure)
        if self._inner.is_error():
            return GrammarError(shortened(self._inner.get_error()))
        return None

    def fill_mask(self, address: int, num_words: int) -> None:
        """Set the bits of the token ids that may come next: ``num_words`` int32 at ``address``.

        Runs without the interpreter's lock. After a failure ``error`` is set.
        """
        try:
            self._inner.unsafe_compute_mask_ptr(address, num_words * 4)
        except BaseException as error:  # noqa: BLE001 (a panic of the library is no Exception)
            self._failure = f"The grammar cannot be followed any further: {type(error).__name__}."

    def fits(self, token_id: int) -> bool:
        """Return whether the token may come next."""
        return self._inner.validate_tokens([token_id]) == 1

    def num_fitting(self, token_ids: Rows[int]) -> int:
        """Return how many of the tokens may come next, one after the other."""
        return self._inner.validate_tokens(list(token_ids))

    def forced_tokens(self) -> list[int]:
        """Return the tokens of the text that must come next, as far as there is no choice.

        The text is tokenised by the tokenizer; the model may tokenise it in another way.
        """
        return self._inner.compute_ff_tokens()

    def accept(self, token_ids: Rows[int]) -> None:
        """Advance by tokens. Raises GrammarError, also for an earlier failure."""
        self._inner.consume_tokens(list(token_ids))
        error = self.error
        if error is not None:
            raise error


class GrammarLibrary:
    """Compiler of grammars for one vocabulary.

    It has the model's ``vocab_size`` token ids; a token that the tokenizer does not have is never
    allowed. Raises GrammarError for a tokenizer without an end-of-sequence token, since a
    completion could not end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        eos = [token for token in tokenizer.eos_token_ids if token < vocab_size]
        if not eos:
            raise GrammarError(
                "This model's tokenizer names no end-of-sequence token, which grammars need."
            )
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos)
        self.num_words = -(-vocab_size // _WORD_BITS)
        vocabulary = _Vocabulary(tokenizer, vocab_size, eos[0])
        self._native = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=eos)

    def compile(self, grammar: Grammar) -> Matcher:
        """Make a matcher at the grammar's start. Raises GrammarError."""
        matcher = start(self._native, grammar)
        # The first mask finds errors that appear only in use, and is cached for all copies.
        matcher.compute_bitmask()
        raise_error_of(matcher)
        return Matcher(matcher)


def start(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Make the library's own matcher at the grammar's start. Raises GrammarError."""
    limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
    try:
        matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=limits)
    except (ValueError, TypeError) as error:
        raise GrammarError(shortened(_with_place(str(error), grammar))) from error
    if matcher.is_error():
        raise GrammarError(shortened(_with_place(matcher.get_error(), grammar)))
    return matcher


def _with_place(message: str, grammar: Grammar) -> str:
    """Return the library's message with a place that the grammar's author knows.

    In a grammar made of tools, the place is a tool. In an author's own grammar, it is a line and a
    column. In a grammar that the library made from a regular expression or a schema, there is none.
    """
    found = _PLACE.match(message)
    if found is None:
        return message
    line, column, in_schema = found.groups()
    rest = message[found.end() :]
    if grammar.kind is not GrammarKind.EBNF:
        return rest
    before = grammar.text.splitlines()[: int(line)]
    tools = [one.removeprefix(TOOL_MARK) for one in before if one.startswith(TOOL_MARK)]
    if tools:
        return f"the parameters of the tool {tools[-1]}: {rest}"
    if in_schema:
        return f"the schema: {rest}"
    return f"line {line}, column {column}: {rest}"


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _json_source(ANY_OBJECT)
        case GrammarKind.JSON_SCHEMA:
            return _json_source(grammar.text)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(_checked_regex(grammar.text))
        case GrammarKind.EBNF:
            return grammar_from("ebnf", grammar.text)


def _checked_regex(text: str) -> str:
    """Return the text.

    Raises GrammarError if it ends within an escape, which the library ignores.
    """
    if ends_within_escape(text):
        raise GrammarError(
            "The grammar cannot be used: the regular expression ends in a lone backslash"
        )
    return text


def _json_source(text: str) -> str:
    """Make the grammar of a schema.

    Raises GrammarError for a schema that cannot be enforced exactly.
    """
    try:
        schema = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise GrammarError(f"The schema is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise GrammarError("The schema must be an object.")
    try:
        kept = kept_schema(schema, refuse)
    except UnkeptError as error:
        raise GrammarError(f"The schema cannot be kept: {error}.") from error
    except RecursionError as error:
        raise GrammarError("The schema is nested too deeply.") from error
    # ``kept_schema`` has checked that the schemas of oneOf exclude each other.
    defaults: JsonCompileOptions = {"coerce_one_of": True}
    if not _is_rigid(schema):
        defaults["whitespace_pattern"] = JSON_BLANKS
    kept_text = text if kept == schema else msgspec.json.encode(kept).decode()
    return LLMatcher.grammar_from_json_schema(kept_text, defaults=defaults)


def _is_rigid(schema: dict[str, Any]) -> bool:
    """Return whether the schema itself forbids blanks other than those in its separators."""
    settings = schema.get(SCHEMA_SETTINGS)
    return isinstance(settings, dict) and settings.get("whitespace_flexible") is False


def raise_error_of(matcher: LLMatcher) -> None:
    """Raise GrammarError if the matcher has failed."""
    if matcher.is_error():
        raise GrammarError(shortened(matcher.get_error()))


def shortened(message: str) -> str:
    """Return the library's message in one line of bounded length, without its excerpts of the
    text."""
    if message.startswith("NoExtension"):
        message = "no text matches it"
    lines = (line.strip() for line in message.split("\n<")[0].splitlines())
    text = " ".join(line for line in lines if not _PICTURE.match(line))
    for pattern, words in _REWORDED:
        text = pattern.sub(words, text)
    if len(text) > MAX_MESSAGE_CHARACTERS:
        text = text[: MAX_MESSAGE_CHARACTERS - 1] + "…"
    return f"The grammar cannot be used: {text or 'the library does not say why'}"


class _Vocabulary:
    """Vocabulary in the library's interface: each token's bytes, and tokenisation of a text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.special_token_ids = sorted(i for i in tokenizer.special_token_ids if i < vocab_size)
        self.tokens = [_text_bytes(tokenizer.token_bytes(i)) for i in range(vocab_size)]
        self._ids: dict[bytes, int] = {}
        specials = frozenset(self.special_token_ids)
        for token_id, token in enumerate(self.tokens):
            if token and token_id not in specials:
                self._ids.setdefault(token, token_id)
        self._longest_bytes = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Tokenise a text that the grammar forces.

        Uses the tokenizer if its tokens are exactly this text; some tokenizers begin every text
        with a blank. Otherwise takes the longest tokens first.
        """
        data = text.encode()
        tokens, size = self.tokens, len(self.tokens)
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if (
            all(token_id < size for token_id in token_ids)
            and b"".join([tokens[token_id] for token_id in token_ids]) == data
        ):
            return token_ids
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        token_ids: list[int] = []
        at = 0
        while at < len(data):
            for end in range(min(len(data), at + self._longest_bytes), at, -1):
                token_id = self._ids.get(data[at:end])
                if token_id is not None:
                    token_ids.append(token_id)
                    at = end
                    break
            else:
                # No token continues this text, so only its beginning can be forced.
                break
        return token_ids


def _text_bytes(token: bytes) -> bytes:
    return b"" if token.startswith(_NO_TEXT) else token

"""Sampling parameters and stop conditions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Self

import msgspec

from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.errors import ParameterError
from millrace.schemas.tools import ToolFormat

# Keyword of a JSON Schema that holds the grammar library's own settings.
SCHEMA_SETTINGS = "x-guidance"
# Begins a comment in a grammar of calls: the rules after it belong to the tool named there.
TOOL_MARK = "// tool "
MAX_STOP_STRINGS = 16
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_MIN_TOKENS = 2**31 - 1
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1_024
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 256
MAX_GRAMMAR_CHARACTERS = 65_536
MAX_GRAMMAR_CHOICES = 1_024
MAX_LENGTH_PENALTY = 10.0
_NOT_LITERAL = re.compile(r"[\\.+*?()|\[\]{}^$]")


class GrammarKind(StrEnum):
    """Notation of a grammar."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Grammar that a completion must match from its first token to its last.

    ``text`` is the JSON Schema, the regular expression or the grammar itself in Lark's notation;
    empty for ``json_object``, which is any JSON object. The engine checks whether it compiles.

    Raises ParameterError for a text that is missing, not allowed or too long.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if bool(self.text) != (self.kind is not GrammarKind.JSON_OBJECT):
            wanted = "no text" if self.kind is GrammarKind.JSON_OBJECT else "a text"
            raise ParameterError("grammar", f"a grammar of kind {self.kind} takes {wanted}")
        if len(self.text) > MAX_GRAMMAR_CHARACTERS:
            raise ParameterError(
                "grammar", f"a grammar must have at most {MAX_GRAMMAR_CHARACTERS} characters"
            )

    @classmethod
    def json_object(cls) -> Self:
        """Return the grammar of any JSON object."""
        return cls(kind=GrammarKind.JSON_OBJECT)

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Self:
        """Return the grammar of JSON that matches a JSON Schema."""
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        return cls(kind=GrammarKind.JSON_SCHEMA, text=text)

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Return the grammar of text that fully matches a regular expression."""
        return cls(kind=GrammarKind.REGEX, text=pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Self:
        """Return the grammar of exactly these texts."""
        return cls(kind=GrammarKind.REGEX, text=one_of("choice", texts))

    @classmethod
    def ebnf(cls, text: str) -> Self:
        """Return a grammar in Lark's notation."""
        return cls(kind=GrammarKind.EBNF, text=text)


def one_of(field: str, texts: Sequence[str]) -> str:
    """Return a regular expression that matches exactly these texts.

    Raises ParameterError naming ``field``.
    """
    if not texts or len(texts) > MAX_GRAMMAR_CHOICES or not all(texts):
        raise ParameterError(
            field, f"{field} must have 1 to {MAX_GRAMMAR_CHOICES} texts, none empty."
        )
    return "|".join(_NOT_LITERAL.sub(r"\\\g<0>", text) for text in texts)


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Defaults of a model's sampling parameters; None: the general default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class SamplingOptions(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Requested sampling and stopping of one sequence.

    ``temperature``, ``top_p``, ``top_k``, ``min_p`` and ``repetition_penalty`` None: the model's
    own defaults, else 1, 1, 0, 0 and 1. The process that accepts the request fills them in
    (``with_defaults``), so that the request means the same at every worker and time.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and ``typical_p`` 1 are off.
    ``seed`` None: the process that accepts the request draws a seed; from then on a token's draw
    depends on (seed, token index) alone. ``max_tokens`` None fills the context window.

    ``repetition_penalty`` (1 is off) divides the positive logits of the tokens of prompt and
    completion and multiplies their negative ones. ``presence_penalty`` and ``frequency_penalty`` (0
    is off) are subtracted from the logits of the completion's tokens: once, and once per
    occurrence. ``logit_bias`` is then added to the logits of single token ids. ``bad_words`` are
    excluded: the tokens of each, at the beginning of a text or after a space, never follow each
    other. With ``allowed_token_ids`` no other token is drawn, not even an end of sequence. The
    first ``min_tokens`` contain no end-of-sequence or stop token. A stop string or stop token is
    part of the text only with ``include_stop_str_in_output``; special tokens are left out with
    ``skip_special_tokens``.

    ``logprobs`` and ``prompt_logprobs`` are the number of alternatives to report per token of
    completion and prompt (0: the token itself only; None: nothing). ``n`` completions are drawn,
    each from its own random stream. Each must match ``grammar``.

    ``reasoning`` marks the thoughts with which a completion may begin; the process that accepts a
    request with messages fills it in. The grammar then constrains the text after the thoughts.
    After ``max_reasoning_tokens`` of thoughts the model is forced to end them. With ``one_call`` a
    completion ends right after its first tool call, which has that format.

    With ``use_beam_search`` nothing is drawn: at each token the ``n`` likeliest beams are kept, and
    the ``n`` completed beams with the highest scores are the completions, the best first. A score
    is the sum of a completion's log-probabilities, divided by its number of tokens to the power of
    ``length_penalty``. Log-probabilities are at ``temperature``; 0, the default of a beam search,
    leaves the model's own. Fields that would change or report them are refused.

    Raises ParameterError, naming the field, for a value out of range.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    typical_p: float = 1.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    n: int = 1
    grammar: Grammar | None = None
    reasoning: ReasoningFormat | None = None
    max_reasoning_tokens: int | None = None
    one_call: ToolFormat | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: tuple[int, ...] = ()
    use_beam_search: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ParameterError(
                "max_tokens", f"max_tokens must be at least 1, got {self.max_tokens}"
            )
        for name, low, high in _RANGES:
            _within(name, getattr(self, name), low, high)
        for name in ("top_p", "typical_p"):
            if getattr(self, name) == 0.0:
                raise ParameterError(name, f"{name} must be above 0")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ParameterError("stop", f"stop must have at most {MAX_STOP_STRINGS} strings")
        if self.stop and not all(self.stop):
            raise ParameterError("stop", "stop must not have an empty string")
        if self.stop_token_ids and min(self.stop_token_ids) < 0:
            raise ParameterError("stop_token_ids", "a token id must not be negative")
        if self.max_reasoning_tokens is not None and self.max_reasoning_tokens < 0:
            raise ParameterError(
                "max_reasoning_tokens",
                f"max_reasoning_tokens must not be negative, got {self.max_reasoning_tokens}",
            )
        self._check_min_tokens()
        self._check_logit_bias()
        self._check_bad_words()
        self._check_allowed_token_ids()
        self._check_beam_search()

    @property
    def num_answers(self) -> int:
        """Number of completions of one job."""
        return self.n if self.use_beam_search else 1

    @property
    def is_guided(self) -> bool:
        """True if the tokens so far restrict the next token (grammar or budget of thoughts)."""
        is_limited = self.reasoning is not None and self.max_reasoning_tokens is not None
        return self.grammar is not None or is_limited

    @property
    def may_end_in_text(self) -> bool:
        """True if the text of a completion may end it at any of its tokens."""
        return any(self.asks_for(name) for name in _ENDING_TEXT)

    def asks_for(self, name: str) -> bool:
        """Return whether the field ``name`` has a value with an effect."""
        value = getattr(self, name)
        return value is not None and value != getattr(_NEUTRAL, name)

    def value(self, name: str, defaults: SamplingDefaults) -> Any:
        """Return a field's value: the request's, else the model's default, else the general
        default."""
        values = (getattr(source, name) for source in (self, defaults, _NEUTRAL))
        return next(value for value in values if value is not None)

    def with_defaults(
        self, defaults: SamplingDefaults, *, seed: int, max_tokens: int
    ) -> SamplingOptions:
        """Return a copy with every field filled in, so that each worker runs the same request.

        A beam search does not use the model's defaults.
        """
        if self.use_beam_search:
            defaults = _BEAM_SEARCH_DEFAULTS
        given = {name: getattr(self, name) for name in SamplingOptions.__struct_fields__}
        for name in _WITH_DEFAULTS:
            given[name] = self.value(name, defaults)
        return SamplingOptions(**given | {"seed": seed, "max_tokens": max_tokens})

    def _check_min_tokens(self) -> None:
        limit = MAX_MIN_TOKENS if self.max_tokens is None else self.max_tokens
        if not 0 <= self.min_tokens <= limit:
            most = limit if self.max_tokens is None else f"max_tokens ({limit})"
            raise ParameterError(
                "min_tokens", f"min_tokens must be between 0 and {most}, got {self.min_tokens}"
            )

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise ParameterError(
                "logit_bias", f"logit_bias takes at most {MAX_LOGIT_BIASES} token ids"
            )
        for token, bias in self.logit_bias.items():
            if token < 0:
                raise ParameterError("logit_bias", "a token id of logit_bias must not be negative")
            _within("logit_bias", bias, -100.0, 100.0)

    def _check_bad_words(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise ParameterError("bad_words", f"at most {MAX_BAD_WORDS} bad words are taken")
        for text in self.bad_words:
            if not text.strip():
                raise ParameterError("bad_words", "none of bad_words may be blank")
            if len(text) > MAX_BAD_WORD_CHARACTERS:
                raise ParameterError(
                    "bad_words",
                    f"each of bad_words must have at most {MAX_BAD_WORD_CHARACTERS} characters",
                )

    def _check_allowed_token_ids(self) -> None:
        allowed = self.allowed_token_ids
        if len(allowed) > MAX_ALLOWED_TOKEN_IDS:
            raise ParameterError(
                "allowed_token_ids", f"at most {MAX_ALLOWED_TOKEN_IDS} token ids may be listed"
            )
        if allowed and min(allowed) < 0:
            raise ParameterError("allowed_token_ids", "a token id must not be negative")

    def _check_beam_search(self) -> None:
        if not self.use_beam_search:
            if self.length_penalty != 1.0:
                raise ParameterError(
                    "length_penalty", "length_penalty goes only with use_beam_search: true"
                )
            return
        for name, traits in SAMPLING_FIELDS.items():
            if not traits.with_beams and self.asks_for(name):
                raise ParameterError(
                    name, f"{name} does not go with use_beam_search: true; leave one of them out"
                )


class SamplingParams(
    SamplingOptions, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Complete sampling parameters of an engine, without reference to a model's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, options: SamplingOptions) -> SamplingParams:
        """Copy ``options``; unset fields have the general default."""
        names = SamplingOptions.__struct_fields__
        given = {name: getattr(options, name) for name in names}
        return cls(**{name: value for name, value in given.items() if value is not None})


class FieldTraits(NamedTuple):
    """Properties of a field of ``SamplingOptions`` besides its type and default.

    A number is between ``low`` and ``high``. ``with_beams``: a beam search accepts the field, since
    it neither changes nor reports probabilities nor reads text before a beam has ended.
    ``ends_text``: the text may end a completion at any token, so an engine's process hands out each
    token at once. ``of_every_engine``: every engine supports it, or the worker does it by itself;
    engines refuse other fields by naming them in ``unsupported``.
    """

    with_beams: bool
    low: float | None = None
    high: float | None = None
    ends_text: bool = False
    of_every_engine: bool = False


_TRAITS = {
    "max_tokens": FieldTraits(with_beams=True, of_every_engine=True),
    "temperature": FieldTraits(True, 0, 2, of_every_engine=True),
    "top_p": FieldTraits(False, 0, 1, of_every_engine=True),
    "top_k": FieldTraits(False, 0, MAX_TOP_K),
    "min_p": FieldTraits(False, 0, 1),
    "seed": FieldTraits(True, 0, MAX_SEED, of_every_engine=True),
    "stop": FieldTraits(with_beams=False, ends_text=True, of_every_engine=True),
    "stop_token_ids": FieldTraits(with_beams=True),
    "ignore_eos": FieldTraits(with_beams=True),
    "logprobs": FieldTraits(False, 0, MAX_LOGPROBS),
    "typical_p": FieldTraits(False, 0, 1),
    "repetition_penalty": FieldTraits(False, 0.01, 100),
    "presence_penalty": FieldTraits(False, -2, 2),
    "frequency_penalty": FieldTraits(False, -2, 2),
    "logit_bias": FieldTraits(with_beams=False),
    "bad_words": FieldTraits(with_beams=False),
    "min_tokens": FieldTraits(with_beams=True),
    "prompt_logprobs": FieldTraits(False, 0, MAX_LOGPROBS),
    "n": FieldTraits(True, 1, MAX_CHOICES),
    "grammar": FieldTraits(with_beams=False),
    "reasoning": FieldTraits(with_beams=True, of_every_engine=True),
    "max_reasoning_tokens": FieldTraits(with_beams=False, of_every_engine=True),
    "one_call": FieldTraits(with_beams=False, ends_text=True, of_every_engine=True),
    "include_stop_str_in_output": FieldTraits(with_beams=True, of_every_engine=True),
    "skip_special_tokens": FieldTraits(with_beams=True),
    "allowed_token_ids": FieldTraits(with_beams=False),
    "use_beam_search": FieldTraits(with_beams=True),
    # Allowed only with use_beam_search.
    "length_penalty": FieldTraits(
        True, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY, of_every_engine=True
    ),
}

SAMPLING_FIELDS = {name: _TRAITS[name] for name in SamplingOptions.__struct_fields__}
"""Every field by its name. Checks, the OpenAPI document and their tests are made from it."""

_ENDING_TEXT = tuple(name for name, traits in SAMPLING_FIELDS.items() if traits.ends_text)
_RANGES = tuple(
    (name, traits.low, traits.high)
    for name, traits in SAMPLING_FIELDS.items()
    if traits.low is not None and traits.high is not None
)


def _within(param: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    if not low <= value <= high:  # so for NaN, too
        bounds = f"{_shown(low)} and {_shown(high)}"
        raise ParameterError(param, f"{param} must be between {bounds}, got {_shown(value)}")


def _shown(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


_NEUTRAL = SamplingParams()
_BEAM_SEARCH_DEFAULTS = SamplingDefaults(temperature=0.0)
_WITH_DEFAULTS = tuple(name for name in SamplingDefaults.__struct_fields__ if name != "max_tokens")

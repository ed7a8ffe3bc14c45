"""OpenAI's request and response formats: the supported part.

A field that is known but not supported has the type Any: the gateway accepts it if its value asks
for nothing, and otherwise raises an error that names it. Unknown fields are refused.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from millrace.schemas.chat.messages import Message, TextPart
from millrace.schemas.notices import NOTICE_NAME, Notices


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream: usage at its end, and with ``continuous_usage_stats`` the usage so far
    in each chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = None


class TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Answer in any form."""


class JsonObjectFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_object"):
    """Answer that is a JSON object."""


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Schema with its name. With ``strict`` it is followed to the letter; otherwise objects with
    listed properties have no other properties, unless the schema allows them."""

    name: str
    schema: msgspec.Raw
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    """Answer in JSON that matches a schema."""

    json_schema: JsonSchema


# Value of a raw field that is missing or null.
NOT_GIVEN = msgspec.Raw(b"null")


def not_given() -> msgspec.Raw:
    """Return the default of a raw field. It is a factory because JSON Schema cannot express a
    default that is not encoded."""
    return NOT_GIVEN


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constraint on the whole completion, in vLLM's format: exactly one of ``json`` (a schema, or a
    string that holds one), ``json_object``, ``regex``, ``choice`` and ``grammar``. JSON has
    ``whitespace_pattern`` between its parts, or no whitespace with ``disable_any_whitespace``."""

    json: msgspec.Raw = msgspec.field(default_factory=not_given)
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Any = None
    disable_fallback: Any = None
    structural_tag: Any = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of every generation: sampling, and fields that are known but not supported.

    ``guided_json`` (a JSON Schema, or a string that holds one), ``guided_regex``, ``guided_choice``
    (one of these texts) and ``guided_grammar`` (in Lark's notation or GBNF) constrain the whole
    completion; ``structured_outputs`` is the same as one object. ``guided_whitespace_pattern``, a
    regular expression, is the optional whitespace between the parts of a JSON document; default:
    one blank. ``json_schema``, ``regex`` and ``ebnf`` are SGLang's names of ``guided_json``,
    ``guided_regex`` and ``guided_grammar``, and ``no_stop_trim`` is its name of
    ``include_stop_str_in_output``. ``guided_decoding_backend`` is a hint without effect: no answer
    depends on it.

    With ``session_id`` the messages continue a conversation saved on the server. ``session_keep``
    is the number of its messages to keep; later ones are deleted when the new turn is stored (None:
    all stay). The prefix cache shares prompts only among requests with the same ``cache_salt``.
    ``truncate_prompt_tokens`` keeps the last tokens of a longer prompt (-1: as many as fit). With
    ``prompt_logprobs``, an answer that is not streamed has the log-probabilities of the prompt's
    tokens, each with that number of alternatives. A tenant's requests with a lower ``priority``
    (default 0) are served earlier.

    ``use_beam_search`` finds the ``n`` likeliest completions, by the sum of their log-probabilities
    divided by their length to the power of ``length_penalty`` (default 1). It cannot be combined
    with ``stop``, a grammar, ``stream``, or a field that changes or reports probabilities.
    ``spaces_between_special_tokens`` is a hint without effect: the tokenizer decides the spaces.
    """

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    guided_json: msgspec.Raw = msgspec.field(default_factory=not_given)
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    json_schema: msgspec.Raw = msgspec.field(default_factory=not_given)
    regex: str | None = None
    ebnf: str | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None
    session_id: str | None = None
    session_keep: int | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    spaces_between_special_tokens: bool | None = None
    service_tier: str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    typical_p: float | None = None
    min_tokens: int | None = None
    bad_words: tuple[str, ...] | None = None
    n: int | None = None
    metadata: dict[str, str] | None = None
    cache_salt: str | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted text of most of the answer: it does not change the answer and may save time."""

    content: str | tuple[TextPart, ...]
    type: Literal["content"] = "content"


class ChatFields(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a generation from messages, over HTTP or WebSocket.

    ``tools`` are functions and custom tools; tools that only a provider's server can run are left
    out. ``server_tools`` are names of the gateway's own tools, which it runs itself.
    ``tool_choice`` is ``auto``, ``none``, ``required``, an object that names a tool, or
    ``allowed_tools`` with the tools that the model sees. ``prompt_cache_key``,
    ``prompt_cache_retention``, ``store`` and ``verbosity`` are hints without effect;
    ``safety_identifier`` is the newer name of ``user``.

    ``chat_template`` (Jinja) replaces the model's own, if the setting
    ``gateway.trust_request_chat_template`` allows it. ``chat_template_kwargs`` are variables of the
    model's chat template; ``enable_thinking`` and ``reasoning_effort`` are two of them. After
    ``thinking_token_budget`` tokens of thoughts the model is forced to answer. If
    ``add_generation_prompt`` is false, the prompt does not end with the start of an answer. With
    ``continue_final_message`` the answer continues the last message, which must be the assistant's.
    Thoughts are returned unless ``include_reasoning`` is false.
    """

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: tuple[msgspec.Raw, ...] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    server_tools: tuple[str, ...] | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Prediction | None = None
    web_search_options: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool | None = None
    separate_reasoning: Any = None
    stream_reasoning: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    documents: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    verbosity: str | None = None


class ChatCompletionRequest(ChatFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/chat/completions``. With ``return_token_ids`` the answer has the token ids
    of the answer and the prompt."""

    messages: tuple[Message, ...]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/completions``. ``prompt`` is text, token ids, or a list of these: each
    prompt gets ``n`` choices. ``logprobs`` is the number of alternatives per token.

    ``max_tokens`` defaults to 16, as in OpenAI's API. 0 is allowed only with ``echo``: the answer
    is then the prompt alone, although one token is computed. With ``return_token_ids``, choices
    have the token ids of their text and prompt.
    """

    prompt: Any
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: Any = None
    return_token_ids: bool | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Number of tokens of thoughts, and of proposed tokens (speculative decoding): from a
    prediction, from the text so far, or from a grammar."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class UsageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one generation, from the worker. ``completion_tokens_details`` is present
    only if there are thoughts or proposed tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """An alternative to a token. A token that is not whole characters shows as ``bytes:`` and its
    bytes with escapes, such as ``bytes:\\xf0\\x9f``; ``bytes`` has the bytes of every token."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class LogprobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Token of the completion with its natural-log probability. ``top_logprobs`` are the requested
    number of likeliest tokens. The token itself follows if it is not among them because a grammar,
    a bias or chance chose it. Texts of tokens are as in ``TopLogprob``."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...] = ()


class PromptTokenInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Token of the prompt, or an alternative at its place, with its natural-log probability.
    ``rank`` is 1 plus the number of likelier tokens; null for a token outside the likeliest of an
    engine that does not count."""

    logprob: float
    rank: int | None
    decoded_token: str


# None: the completion was too large to be stored with its token ids.
TokenIds = tuple[int, ...] | None
# Alternatives at each place of the prompt, by token id; null at the first place.
PromptTokens = tuple[dict[int, PromptTokenInfo] | None, ...]


class ChoiceLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a chat choice."""

    content: tuple[LogprobInfo, ...]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a text choice, one entry for each token; those of the echoed prompt's
    first token are null. ``top_logprobs`` are the likeliest tokens and the token itself. A token
    that is not whole characters shows as ``bytes:`` and its bytes with escapes, such as
    ``bytes:\\xf0\\x9f``. ``text_offset`` counts the characters of ``text`` before the token: those
    of one character begin where it does."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float | None, ...]
    top_logprobs: tuple[dict[str, float] | None, ...]
    text_offset: tuple[int, ...]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Choice of a completion. ``stop_reason`` is the stop string or the id of the stop token that
    ended it, if any. ``prompt_logprobs`` of its prompt, and the token ids of prompt and choice, are
    present if requested."""

    text: str
    finish_reason: str
    stop_reason: str | int | None = None
    index: int = 0
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptTokens | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    token_ids: TokenIds | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a completion that is not streamed."""

    id: str
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    usage: UsageInfo
    object: Literal["text_completion"] = "text_completion"
    notices: Notices | msgspec.UnsetType = msgspec.field(name=NOTICE_NAME, default=msgspec.UNSET)


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Error of a request. ``code`` is stable; ``param`` names the field at fault, if any."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorInfo

"""Constraints that the request types leave open and the OpenAPI document states: ranges, names, and
fields that are known but not honoured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_args

from millrace.gateway.api.kept.conversations import MAX_NEW_ITEMS
from millrace.gateway.responses import input as responses_input
from millrace.registry.requests import grammar_fields
from millrace.schemas.anthropic.blocks import ServerResult
from millrace.schemas.anthropic.requests import OF_PROVIDER_TOOLS
from millrace.schemas.chat.tools import ChatTool
from millrace.schemas.embeddings import MAX_INPUTS
from millrace.schemas.jobs import MAX_LABEL_CHARACTERS, MAX_PRIORITY, MIN_PRIORITY, Tier
from millrace.schemas.json_schema import REF, Schema
from millrace.schemas.responses.call_items import OtherItem
from millrace.schemas.responses.items import GivenItem
from millrace.schemas.responses.tools import FlatCustomTool, FlatFunctionTool, ResponseTool
from millrace.schemas.sampling import (
    MAX_BAD_WORDS,
    MAX_GRAMMAR_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_MIN_TOKENS,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_TOP_K,
    SAMPLING_FIELDS,
)
from millrace.schemas.tools import MAX_TOOLS

# A field that is known but not honoured has the type Any, and null if it is absent. The document
# leaves it out.
_UNHONOURED: Schema = {"default": None}
_STRING: Schema = {"type": "string"}
_NULL: Schema = {"type": "null"}
_REFUSAL: Schema = {"anyOf": [_STRING, _NULL]}
_LIST_OR_NULL: Schema = {"anyOf": [{"type": "array", "items": {"type": "object"}}, _NULL]}
_JSON_SCHEMA: Schema = {"type": "object", "description": "A JSON Schema."}
_JSON_SCHEMA_OR_TEXT: Schema = {"anyOf": [_JSON_SCHEMA, _STRING]}
_TOKEN_IDS: Schema = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT: list[Schema] = [_STRING, _TOKEN_IDS]
_ITEMS: list[Schema] = [{"$ref": REF.format(name=kind.__name__)} for kind in get_args(GivenItem)]
_METADATA: Schema = {"maxProperties": 16}
_LABEL: Schema = {"maxLength": MAX_LABEL_CHARACTERS}
_LOGPROBS: Schema = {"minimum": 0, "maximum": MAX_LOGPROBS}
_FUNCTION_NAME: Schema = {"pattern": "^[A-Za-z0-9_-]{1,64}$"}


def closed_object(properties: dict[str, Schema], *required: str) -> Schema:
    """Return an object schema with these properties and no others. Without ``required``, all are
    required.
    """
    return {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
        "additionalProperties": False,
    }


def _tools(kinds: tuple[Any, ...]) -> Schema:
    """Return the schema of tools of ``kinds``. Other tools, which are ignored in requests, are not
    in the document.
    """
    told = [{"$ref": REF.format(name=kind.__name__)} for kind in kinds]
    return {"maxItems": MAX_TOOLS, "items": {"anyOf": told}}


def _tool_choice(named: Schema, allowed: Callable[[Schema], Schema]) -> Schema:
    """Return the schema of a tool choice: a word, an object that names a tool, or several of
    these.
    """
    some = closed_object(
        {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": named}}
    )
    return {"anyOf": [{"enum": ["auto", "none", "required", None]}, named, allowed(some)]}


def _allowed_in_chat(some: Schema) -> Schema:
    return closed_object({"type": {"enum": ["allowed_tools"]}, "allowed_tools": some})


def _allowed_in_responses(some: Schema) -> Schema:
    return closed_object({"type": {"enum": ["allowed_tools"]}, **some["properties"]})


_OF_LEFT_OUT = "Belongs to tools that are ignored; has no effect here."
_CHOSEN: Schema = {"title": "ChosenName"} | closed_object({"name": _STRING})
_IN_CHAT: Schema = {
    "title": "ChosenTool",
    "anyOf": [
        {"title": f"Chosen{kind.capitalize()}"}
        | closed_object({"type": {"enum": [kind]}, kind: _CHOSEN})
        for kind in ("function", "custom")
    ],
}
_IN_RESPONSES: Schema = {"title": "ChosenResponseTool"} | closed_object(
    dict.fromkeys(("type", "name", "namespace", "server_label"), _STRING), "type"
)


_CHOICE: Schema = {"minItems": 1, "maxItems": MAX_GRAMMAR_CHOICES}
_PATTERN: Schema = {"minLength": 1, "maxLength": grammar_fields.MAX_PATTERN_CHARACTERS}
_NUM_KEPT: Schema = {"minimum": -1}
_PRIORITY: Schema = {"minimum": MIN_PRIORITY, "maximum": MAX_PRIORITY}
# Type of value that each keyword constrains.
SAMPLING: dict[str, Schema] = {
    name: {"minimum": traits.low, "maximum": traits.high}
    for name, traits in SAMPLING_FIELDS.items()
    if traits.low is not None and not name.endswith("logprobs")
} | {
    # Requests take more of these numbers, or fewer, than engines do.
    "max_tokens": {"minimum": 1},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "typical_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": MAX_TOP_K},
    "seed": {"minimum": -MAX_SEED, "maximum": MAX_SEED},
    "min_tokens": {"minimum": 0, "maximum": MAX_MIN_TOKENS},
}
_GENERATION: dict[str, Schema] = SAMPLING | {
    "user": _LABEL,
    "session_id": _LABEL,
    "session_keep": {"minimum": 0},
    "service_tier": {"enum": ["auto", "default", "flex", "priority", *Tier, None]},
    "stop": {"maxItems": MAX_STOP_STRINGS},
    "bad_words": {"maxItems": MAX_BAD_WORDS},
    "metadata": _METADATA,
    "logit_bias": {"maxProperties": MAX_LOGIT_BIASES, "propertyNames": {"pattern": "^[0-9]+$"}},
    "guided_json": {"anyOf": [_JSON_SCHEMA, _STRING, _NULL]},
    "guided_choice": _CHOICE,
    "guided_whitespace_pattern": _PATTERN,
    "prompt_logprobs": _LOGPROBS,
    "truncate_prompt_tokens": _NUM_KEPT,
    "priority": _PRIORITY,
}
_CHAT: dict[str, Schema] = _GENERATION | {
    "max_completion_tokens": {"minimum": 1},
    "safety_identifier": _LABEL,
    "thinking_token_budget": {"minimum": 0},
    "top_logprobs": _LOGPROBS,
    "messages": {"minItems": 1},
    "tools": _tools(get_args(ChatTool)),
    "tool_choice": _tool_choice(_IN_CHAT, _allowed_in_chat),
}
_INPUTS: Schema = {"maxItems": MAX_INPUTS, "minItems": 1, "minLength": 1}
_POOLED: dict[str, Schema] = {
    "truncate_prompt_tokens": _NUM_KEPT,
    "user": _LABEL,
    "metadata": _METADATA,
    "priority": _PRIORITY,
}
_SCORING: dict[str, Schema] = _POOLED | {
    name: {"minimum": 1} for name in ("max_tokens_per_doc", "max_doc_length", "max_query_length")
}
_EMBEDDING: dict[str, Schema] = _POOLED | {"dimensions": {"minimum": 1}, "input": _INPUTS}
_VECTOR: Schema = {
    "anyOf": [
        {"type": "array", "items": {"type": "number"}},
        _STRING | {"contentEncoding": "base64"},
    ]
}
_NEW_ITEMS: Schema = {"maxItems": MAX_NEW_ITEMS, "items": {"anyOf": _ITEMS}}
_READ: Mapping[str, Schema] = {
    "refusal": {"description": "Used as text if the message has neither text nor calls."},
    "audio": {"description": "Refused if the message has neither text nor calls."},
    "function_call": {"description": "Refused if the message has neither text nor calls."},
    "reasoning": {"description": "The thoughts of the message, if they are text."},
    "reasoning_content": {"description": "The thoughts of the message, if they are text."},
}
# Keyed by component, then by property.
FIELDS: Mapping[str, Mapping[str, Schema]] = {
    "ChatCompletionRequest": _CHAT,
    "Generate": _CHAT | {"prompt": {"anyOf": [*_PROMPT, _NULL]}},
    "CompletionRequest": _GENERATION
    | {
        "max_tokens": {"minimum": 0},  # with echo
        "logprobs": _LOGPROBS,
        "prompt": {
            "anyOf": [*_PROMPT, {"type": "array", "minItems": 1, "items": {"anyOf": _PROMPT}}]
        },
    },
    "ResponsesRequest": _GENERATION
    | {
        "max_output_tokens": {"minimum": 1},
        "top_logprobs": _LOGPROBS,
        "safety_identifier": _LABEL,
        "thinking_token_budget": {"minimum": 0},
        "input": {"anyOf": [_STRING, {"type": "array", "minItems": 1, "items": {"anyOf": _ITEMS}}]},
        "include": {"items": {"enum": list(responses_input.INCLUDABLE)}},
        "tools": _tools(get_args(ResponseTool)),
        "tool_choice": _tool_choice(_IN_RESPONSES, _allowed_in_responses),
    },
    "MessagesRequest": {name: SAMPLING[name] for name in ("temperature", "top_k", "top_p")}
    | {
        "max_tokens": {"minimum": 1},
        "messages": {"minItems": 1},
        "stop_sequences": {"maxItems": MAX_STOP_STRINGS},
        "tools": {"maxItems": MAX_TOOLS},
    },
    "MessagesTool": {
        # A toolset has none.
        "name": {"description": "The name of the tool for the model.", "default": ""},
        **{name: {"description": _OF_LEFT_OUT} for name in OF_PROVIDER_TOOLS},
    },
    "EchoedMessage": _READ,
    # Always null here; the types are OpenAI's and Anthropic's.
    "AssistantMessage": {"refusal": _REFUSAL},
    "ChoiceLogprobs": {"refusal": _LIST_OR_NULL},
    "Text": {"citations": _LIST_OR_NULL},
    **{
        result.__name__: {"content": {"description": "Text, or the output of the tool."}}
        for result in get_args(ServerResult)
    },
    "Metadata": {"user_id": _LABEL},
    "Thinking": {"budget_tokens": {"minimum": 0}},
    "ConversationRequest": {"items": _NEW_ITEMS, "metadata": _METADATA},
    "ConversationUpdate": {"metadata": _METADATA},
    "NewItems": {"items": _NEW_ITEMS | {"minItems": 1}},
    "StructuredOutputs": {
        "json": {"anyOf": [_JSON_SCHEMA, _STRING, _NULL]},
        "choice": _CHOICE,
        "whitespace_pattern": _PATTERN,
    },
    "FunctionFields": {"name": _FUNCTION_NAME},
    "FlatFunctionTool": {
        "name": _FUNCTION_NAME,
        "parameters": {"anyOf": [_JSON_SCHEMA, _NULL]},
    },
    "ToolSearchTool": {"parameters": {"anyOf": [_JSON_SCHEMA, _NULL]}},
    "NamespaceTool": {"tools": _tools((FlatFunctionTool, FlatCustomTool))},
    "TokenizeRequest": {"tools": _tools(get_args(ChatTool))},
    "JsonSchema": {"schema": _JSON_SCHEMA_OR_TEXT},
    "SchemaFormat": {"schema": _JSON_SCHEMA_OR_TEXT},
    "EmbeddingRequest": _EMBEDDING,
    "PoolingRequest": _EMBEDDING,
    "ClassifyRequest": _POOLED | {"input": _INPUTS},
    "ScoreRequest": _SCORING | dict.fromkeys(("text_1", "text_2", "queries", "documents"), _INPUTS),
    "RerankRequest": _SCORING
    | {
        "query": {"minLength": 1},
        "documents": _INPUTS,
        "top_n": {"minimum": 0},
        "max_chunks_per_doc": {"minimum": 1},
        "rank_fields": {"minItems": 1},
    },
    "EmbeddingObject": {"embedding": _VECTOR},
    "PoolingObject": {"data": _VECTOR},
    "ResponseAnswer": {"tool_choice": {"description": "The value of the request."}},
}

# Items that may be sent back with null for fields they lack.
_GIVEN_BACK = frozenset(kind.__name__ for kind in get_args(OtherItem))
_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum"}
_KEYWORDS_OF = {
    "integer": _OF_NUMBERS,
    "number": _OF_NUMBERS,
    "string": {"minLength", "maxLength", "pattern"},
    "array": {"minItems", "maxItems", "items"},
    "object": {"maxProperties", "propertyNames"},
}
_KEYWORDS = set().union(*_KEYWORDS_OF.values())


def refine(name: str, component: Schema) -> Schema:
    """Return a component with its fields' values constrained as exactly as JSON Schema can, and its
    description without the source's indentation.
    """
    refined = dict(component)
    if "description" in refined:
        refined["description"] = inspect.cleandoc(refined["description"])
    if "properties" in refined:
        known = FIELDS.get(name, {})
        refined["properties"] = {
            field: _refined(schema, known.get(field))
            for field, schema in refined["properties"].items()
            if field in known or schema != _UNHONOURED
        }
        if name in _GIVEN_BACK:
            for field in refined["properties"].keys() - {"type", *refined.get("required", ())}:
                refined["properties"][field] = _nullable(refined["properties"][field])
    return refined


def _refined(schema: Schema, more: Schema | None) -> Schema:
    if more is None:
        return schema
    if not more.keys() & _KEYWORDS:
        return {**more, **{key: schema[key] for key in ("default",) if key in schema}}
    if "anyOf" in schema:
        return {**schema, "anyOf": [_bounded(one, more) for one in schema["anyOf"]]}
    return _bounded(schema, more)


def _nullable(schema: Schema) -> Schema:
    value = {key: part for key, part in schema.items() if key != "default"}
    default = {key: part for key, part in schema.items() if key == "default"}
    options = value["anyOf"] if value.keys() == {"anyOf"} else [value]
    return {"anyOf": [*options, _NULL], **default}


def _bounded(schema: Schema, more: Schema) -> Schema:
    """Return the schema with the keywords that apply to its type."""
    keywords = _KEYWORDS_OF.get(schema.get("type", ""), set())
    return {**schema, **{key: value for key, value in more.items() if key in keywords}}

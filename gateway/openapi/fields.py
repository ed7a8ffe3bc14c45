"""What the types of requests leave open and the OpenAPI document says: ranges, names, and fields
that are known but not honoured."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from runtime.json_schema import Schema
from schemas.embeddings import MAX_INPUTS
from schemas.jobs import MAX_LABEL_CHARACTERS, Tier
from schemas.sampling import (
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_MIN_TOKENS,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_TOP_K,
)
from schemas.tools import MAX_TOOLS

REF = "#/components/schemas/{name}"

_UNHONOURED = "Known, but not honoured: leave it out, or give a value that asks for nothing."
# Of fields that are known but not honoured: the values that ask for nothing, beside null.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([], {}),
    "background": (False,),
    "context_management": ([],),
    "function_call": ("none", "auto"),
    "functions": ([], {}),
    "include_obfuscation": (False,),
    "modalities": ([], ["text"]),
    "reasoning": ({},),
    "store": (False,),
    "suffix": ("",),
}
_TOKEN_IDS: Schema = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_ONE_PROMPT: list[Schema] = [{"type": "string"}, _TOKEN_IDS]
_JSON_SCHEMA: Schema = {"type": "object", "description": "A JSON Schema."}

# By the keyword that a number, text, array or object in the field takes on.
SAMPLING: dict[str, Schema] = {
    "max_tokens": {"minimum": 1},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "typical_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": MAX_TOP_K},
    "min_p": {"minimum": 0, "maximum": 1},
    "seed": {"minimum": 0, "maximum": MAX_SEED},
    "min_tokens": {"minimum": 0, "maximum": MAX_MIN_TOKENS},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
}
_GENERATION: dict[str, Schema] = SAMPLING | {
    "user": {"maxLength": MAX_LABEL_CHARACTERS},
    "session_id": {"maxLength": MAX_LABEL_CHARACTERS},
    "session_keep": {"minimum": 0},
    "service_tier": {"enum": ["auto", "default", "flex", "priority", *Tier, None]},
    "stop": {"maxItems": MAX_STOP_STRINGS},
    "bad_words": {"maxItems": MAX_BAD_WORDS},
    "metadata": {"maxProperties": 16},
    "logit_bias": {"maxProperties": MAX_LOGIT_BIASES, "propertyNames": {"pattern": "^[0-9]+$"}},
    "guided_json": {"anyOf": [_JSON_SCHEMA, {"type": "string"}, {"type": "null"}]},
}
_CHAT: dict[str, Schema] = _GENERATION | {
    "max_completion_tokens": {"minimum": 1},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "messages": {"minItems": 1},
    "tools": {"maxItems": MAX_TOOLS},
    "tool_choice": {
        "anyOf": [
            {"enum": ["auto", "none", "required", None]},
            {
                "type": "object",
                "properties": {
                    "type": {"enum": ["function"]},
                    "function": {
                        "type": "object",
                        "properties": {"name": {"type": "string"}},
                        "required": ["name"],
                        "additionalProperties": False,
                    },
                },
                "required": ["function"],
                "additionalProperties": False,
            },
        ]
    },
}
# By component, then by property.
FIELDS: Mapping[str, Mapping[str, Schema]] = {
    "ChatCompletionRequest": _CHAT,
    "Generate": _CHAT | {"prompt": {"anyOf": [*_ONE_PROMPT, {"type": "null"}]}},
    "CompletionRequest": _GENERATION
    | {
        "logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
        "prompt": {
            "anyOf": [
                *_ONE_PROMPT,
                {"type": "array", "minItems": 1, "items": {"anyOf": _ONE_PROMPT}},
            ]
        },
    },
    "ResponsesRequest": _GENERATION
    | {
        "max_output_tokens": {"minimum": 1},
        "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
        "safety_identifier": {"maxLength": MAX_LABEL_CHARACTERS},
        "input": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "anyOf": [
                            {"$ref": REF.format(name=name)}
                            for name in ("GivenMessage", "GivenCall", "GivenCallOutput")
                        ]
                    },
                },
            ]
        },
        "include": {"items": {"enum": ["message.output_text.logprobs"]}},
        "tool_choice": {
            "anyOf": [
                {"enum": ["auto", "none", "required", None]},
                {
                    "type": "object",
                    "properties": {"type": {"enum": ["function"]}, "name": {"type": "string"}},
                    "required": ["type", "name"],
                    "additionalProperties": False,
                },
            ]
        },
    },
    "Message": {"role": {"enum": ["system", "developer", "user", "assistant", "tool"]}},
    "GivenMessage": {"role": {"enum": ["system", "developer", "user", "assistant"]}},
    "FunctionFields": {"name": {"pattern": "^[A-Za-z0-9_-]{1,64}$"}},
    "FlatFunctionTool": {
        "name": {"pattern": "^[A-Za-z0-9_-]{1,64}$"},
        "parameters": {"anyOf": [_JSON_SCHEMA, {"type": "null"}]},
    },
    "JsonSchema": {"schema": {"anyOf": [_JSON_SCHEMA, {"type": "string"}]}},
    "SchemaFormat": {"schema": {"anyOf": [_JSON_SCHEMA, {"type": "string"}]}},
    "EmbeddingRequest": {
        "dimensions": {"minimum": 1},
        "user": {"maxLength": MAX_LABEL_CHARACTERS},
        "input": {"maxItems": MAX_INPUTS, "minItems": 1, "minLength": 1},
    },
    "EmbeddingObject": {
        "embedding": {
            "anyOf": [
                {"type": "array", "items": {"type": "number"}},
                {"type": "string", "contentEncoding": "base64"},
            ]
        }
    },
    "Response": {"tool_choice": {"description": "As it was asked for."}},
}

_KEYWORDS = {
    "minimum": ("integer", "number"),
    "maximum": ("integer", "number"),
    "exclusiveMinimum": ("integer", "number"),
    "minLength": ("string",),
    "maxLength": ("string",),
    "pattern": ("string",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "items": ("array",),
    "maxProperties": ("object",),
    "propertyNames": ("object",),
}


def refine(name: str, component: Schema) -> Schema:
    """A component with what its fields take said as exactly as JSON Schema can, and its description
    without the source's indentation."""
    refined = dict(component)
    if "description" in refined:
        refined["description"] = inspect.cleandoc(refined["description"])
    if "properties" in refined:
        known = FIELDS.get(name, {})
        refined["properties"] = {
            field: _refined(field, schema, known.get(field))
            for field, schema in refined["properties"].items()
        }
    return refined


def _refined(field: str, schema: Schema, more: Schema | None) -> Schema:
    if more is None and schema == {"default": None}:
        return {"enum": [None, *NEUTRAL.get(field, ())], "description": _UNHONOURED, **schema}
    if more is None:
        return schema
    if not more.keys() & _KEYWORDS.keys():
        return {**more, **{key: schema[key] for key in ("default",) if key in schema}}
    if "anyOf" in schema:
        return {**schema, "anyOf": [_bounded(one, more) for one in schema["anyOf"]]}
    return _bounded(schema, more)


def _bounded(schema: Schema, more: Schema) -> Schema:
    """With those keywords that mean something for a value of the schema's type."""
    kind = schema.get("type")
    return {**schema, **{key: value for key, value in more.items() if kind in _KEYWORDS[key]}}

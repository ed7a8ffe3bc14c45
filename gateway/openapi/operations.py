"""What the gateway serves over HTTP, one entry for each method of each path."""

from __future__ import annotations

from gateway.api.limits import CallerLimits
from gateway.openapi.operation import Operation, Query, Schema
from gateway.openapi.shapes import (
    ChatCompletionChunk,
    CompletionChunk,
    Health,
    ServerToolList,
    SessionDeleted,
)
from schemas.batches import Batch, BatchList, BatchRequest
from schemas.embeddings import EmbeddingList, EmbeddingRequest
from schemas.files import FileDeleted, FileList, FileObject
from schemas.openai import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from schemas.response_events import ResponseEvent
from schemas.responses import ItemList, Response, ResponseDeleted, ResponsesRequest
from schemas.sessions import SessionHistory

_OBJECT: Schema = {"type": "object"}
_LIMIT = "At most so many entries."
_AFTER = "The id of the last entry of the page before."


def _page(most: int, *more: Query) -> tuple[Query, ...]:
    limit = {"type": "integer", "minimum": 1, "maximum": most}
    return (
        Query(name="limit", schema=limit, description=_LIMIT),
        Query(name="after", schema={"type": "string"}, description=_AFTER),
        *more,
    )


_ORDER = Query(
    name="order",
    schema={"enum": ["asc", "desc"], "default": "desc"},
    description="asc: the oldest first; desc: the newest first.",
)

_UPLOAD: Schema = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": ["batch"]},
    },
    "required": ["file", "purpose"],
    "additionalProperties": False,
}
_HELLO = [{"role": "user", "content": "Hello!"}]

_BODY = (400, 408, 413)
_GENERATION = (*_BODY, 404, 409, 429, 500, 504)

OPERATIONS = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        name="createChatCompletion",
        tag="generation",
        summary="Continue a conversation",
        body=ChatCompletionRequest,
        example={"model": "demo", "messages": _HELLO, "max_tokens": 32},
        answer=ChatCompletion,
        event=ChatCompletionChunk,
        errors=_GENERATION,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        name="createCompletion",
        tag="generation",
        summary="Continue a text, token ids, or several of these",
        body=CompletionRequest,
        example={"model": "demo", "prompt": "Once upon a time", "max_tokens": 32},
        answer=Completion,
        event=CompletionChunk,
        errors=_GENERATION,
    ),
    Operation(
        method="post",
        path="/v1/responses",
        name="createResponse",
        tag="generation",
        summary="Answer in the shape of OpenAI's Responses API",
        description="An answer is kept, for a later previous_response_id, unless store is false.",
        body=ResponsesRequest,
        example={"model": "demo", "input": "Hello!", "max_output_tokens": 32},
        answer=Response,
        event=ResponseEvent,
        errors=_GENERATION,
    ),
    Operation(
        method="get",
        path="/v1/responses/{response_id}",
        name="getResponse",
        tag="responses",
        summary="An answer that was kept",
        answer=Response,
        errors=(400, 404),
    ),
    Operation(
        method="delete",
        path="/v1/responses/{response_id}",
        name="deleteResponse",
        tag="responses",
        summary="Forget an answer",
        answer=ResponseDeleted,
        errors=(404,),
    ),
    Operation(
        method="get",
        path="/v1/responses/{response_id}/input_items",
        name="listInputItems",
        tag="responses",
        summary="The items before an answer, in pages",
        query=_page(100, _ORDER),
        answer=ItemList,
        errors=(400, 404),
    ),
    Operation(
        method="post",
        path="/v1/embeddings",
        name="createEmbeddings",
        tag="embeddings",
        summary="Embed texts",
        body=EmbeddingRequest,
        example={"model": "demo", "input": ["Hello!", "Good morning."]},
        answer=EmbeddingList,
        errors=(*_BODY, 404, 409, 429, 500, 504),
    ),
    Operation(
        method="get",
        path="/v1/models",
        name="listModels",
        tag="models",
        summary="The models that may be asked for",
        answer=ModelList,
    ),
    Operation(
        method="get",
        path="/v1/models/{name}",
        name="getModel",
        tag="models",
        summary="One model",
        answer=ModelCard,
        errors=(404,),
    ),
    Operation(
        method="post",
        path="/v1/tokenize",
        name="tokenize",
        tag="models",
        summary="The token ids of a prompt, or of messages as the chat template renders them",
        body=TokenizeRequest,
        example={"model": "demo", "prompt": "Hello!"},
        answer=TokenizeResponse,
        errors=(*_BODY, 404, 500),
    ),
    Operation(
        method="post",
        path="/v1/detokenize",
        name="detokenize",
        tag="models",
        summary="The text of token ids",
        body=DetokenizeRequest,
        example={"model": "demo", "tokens": [72, 105]},
        answer=DetokenizeResponse,
        errors=(*_BODY, 404, 500),
    ),
    Operation(
        method="post",
        path="/v1/files",
        name="uploadFile",
        tag="files",
        summary="Upload the requests of a batch, one in a line",
        body=_UPLOAD,
        body_type="multipart/form-data",
        answer=FileObject,
        errors=_BODY,
    ),
    Operation(
        method="get",
        path="/v1/files",
        name="listFiles",
        tag="files",
        summary="The caller's files, in pages",
        query=_page(
            10_000,
            _ORDER,
            Query(
                name="purpose",
                schema={"type": "string"},
                description="Only files for this: batch, batch_output.",
            ),
        ),
        answer=FileList,
        errors=(400,),
    ),
    Operation(
        method="get",
        path="/v1/files/{file_id}",
        name="getFile",
        tag="files",
        summary="One file's entry",
        answer=FileObject,
        errors=(404,),
    ),
    Operation(
        method="delete",
        path="/v1/files/{file_id}",
        name="deleteFile",
        tag="files",
        summary="Delete a file that no batch reads",
        answer=FileDeleted,
        errors=(404, 409),
    ),
    Operation(
        method="get",
        path="/v1/files/{file_id}/content",
        name="getFileContent",
        tag="files",
        summary="The bytes of a file",
        answer={"type": "string", "format": "binary"},
        answer_type="application/octet-stream",
        errors=(404,),
    ),
    Operation(
        method="post",
        path="/v1/batches",
        name="createBatch",
        tag="batches",
        summary="Have the requests of a file answered within a day",
        body=BatchRequest,
        example={
            "input_file_id": "file-0190f3c1a2b3c4d5e6f70819",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        },
        answer=Batch,
        errors=(*_BODY, 429),
    ),
    Operation(
        method="get",
        path="/v1/batches",
        name="listBatches",
        tag="batches",
        summary="The caller's batches, in pages",
        query=_page(100),
        answer=BatchList,
        errors=(400,),
    ),
    Operation(
        method="get",
        path="/v1/batches/{batch_id}",
        name="getBatch",
        tag="batches",
        summary="A batch as it stands",
        answer=Batch,
        errors=(404,),
    ),
    Operation(
        method="post",
        path="/v1/batches/{batch_id}/cancel",
        name="cancelBatch",
        tag="batches",
        summary="Stop a batch; what is done by then is kept",
        answer=Batch,
        errors=(404, 409),
    ),
    Operation(
        method="get",
        path="/v1/sessions/{session_id}",
        name="getSession",
        tag="sessions",
        summary="The turns of a conversation that is kept",
        answer=SessionHistory,
        errors=(404,),
    ),
    Operation(
        method="delete",
        path="/v1/sessions/{session_id}",
        name="deleteSession",
        tag="sessions",
        summary="Forget a conversation",
        answer=SessionDeleted,
        errors=(404,),
    ),
    Operation(
        method="get",
        path="/v1/tools",
        name="listTools",
        tag="tools",
        summary="The tools that the gateway runs itself",
        answer=ServerToolList,
    ),
    Operation(
        method="get",
        path="/v1/limits",
        name="getLimits",
        tag="limits",
        summary="What the caller may use, and what is left of it",
        query=(
            Query(
                name="tenant",
                schema={"type": "string"},
                description="Another tenant, for administrators.",
            ),
        ),
        answer=CallerLimits,
        errors=(400,),
    ),
    Operation(
        method="get",
        path="/healthz",
        name="getHealth",
        tag="operations",
        summary="Whether requests can be accepted",
        description="200 while they can, 503 while they cannot; the body is the same.",
        answer=Health,
        is_open=True,
    ),
    Operation(
        method="get",
        path="/metrics",
        name="getMetrics",
        tag="operations",
        summary="Figures for Prometheus",
        description="Where other machines can ask, for who sends metrics.token or the key of an "
        "administrator, unless metrics.public is set.",
        answer={"type": "string"},
        answer_type="text/plain",
        is_open=True,
    ),
    Operation(
        method="get",
        path="/ops/api/{query}",
        name="runQuery",
        tag="operations",
        summary="Rows of a saved query over the records of all requests, for administrators",
        description=(
            "The query's parameters are the fields of the query string. With .csv after its name, "
            "or for an Accept header of text/csv, the rows come as CSV (RFC 4180). requests.csv is "
            "every request of a range, row by row, up to 100,000 of them."
        ),
        answer={"type": "array", "items": _OBJECT},
        errors=(400, 404),
    ),
    Operation(
        method="get",
        path="/openapi.json",
        name="getOpenApi",
        tag="contracts",
        summary="This document",
        answer=_OBJECT,
        is_open=True,
    ),
    Operation(
        method="get",
        path="/v1/ws/schema.json",
        name="getWebSocketSchema",
        tag="contracts",
        summary="The JSON Schema of the messages of /v1/ws",
        answer=_OBJECT,
        is_open=True,
    ),
)

"""Operations that the gateway serves over HTTP: one entry for each method of each path."""

from __future__ import annotations

from functools import partial
from itertools import chain

from millrace.gateway.api.administration import RESET_PATHS, PrefixCacheReset
from millrace.gateway.api.kept.chats import MAX_PAGE_CHATS, SessionDeleted
from millrace.gateway.api.messages import COUNT_TOKENS
from millrace.gateway.api.pooled.embeddings import CLASSIFY_ROUTE, POOLING_ROUTE
from millrace.gateway.api.pooled.scores import RERANK_PATHS, SCORE_PATHS
from millrace.gateway.api.system import (
    DETOKENIZE_PATHS,
    HEALTH_PATHS,
    TOKENIZE_PATHS,
    CallerLimits,
    Health,
    ServerToolList,
    Version,
)
from millrace.gateway.openapi.fields import closed_object
from millrace.gateway.openapi.operation import (
    JSON,
    ORDER,
    TEXT,
    Media,
    Operation,
    Query,
    delete,
    generate,
    get,
    page,
    post,
)
from millrace.gateway.openapi.shapes import ChatCompletionChunk, CompletionChunk
from millrace.schemas.anthropic.answers import (
    MessageAnswer,
    MessageEvent,
    MessagesError,
    TokenCount,
)
from millrace.schemas.anthropic.requests import MessagesRequest
from millrace.schemas.batches.batches import (
    Batch,
    BatchList,
    BatchRequest,
    FileDeleted,
    FileList,
    FileObject,
)
from millrace.schemas.chat.chats import (
    Chat,
    ChatDeleted,
    ChatInfo,
    ChatList,
    ChatUpdate,
    Conversation,
    ConversationDeleted,
    ConversationRequest,
    ConversationUpdate,
    NewItems,
)
from millrace.schemas.chat.completions import (
    ChatCompletion,
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from millrace.schemas.embeddings import (
    ClassifyList,
    ClassifyRequest,
    EmbeddingList,
    EmbeddingRequest,
    PoolingList,
    PoolingRequest,
    RerankList,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from millrace.schemas.models.adapters import (
    AdapterList,
    LoadLoraAdapterRequest,
    UnloadLoraAdapterRequest,
)
from millrace.schemas.models.cards import ModelCard, ModelList
from millrace.schemas.models.rollouts import RolloutList, RolloutReport, StartRolloutRequest
from millrace.schemas.openai import (
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
)
from millrace.schemas.responses.events import ResponseEvent
from millrace.schemas.responses.items import (
    InputTokens,
    Item,
    ItemList,
    ResponseAnswer,
    ResponseDeleted,
    ResponsesRequest,
)
from millrace.schemas.sessions import SessionHistory

_PURPOSE = Query("purpose", {"type": "string"}, "Only files for this: batch, batch_output.")
_MODEL = Query("model", {"type": "string"}, "Only of the workers of this model.")
_TENANT = Query("tenant", {"type": "string"}, "Another tenant, for administrators.")

_OBJECT = Media(JSON, {"type": "object"})
_FLAG = {"type": "boolean", "default": False}
_CURSOR = {"type": "integer", "minimum": 0}
_ROWS = Media(JSON, {"type": "array", "items": {"type": "object"}})
_BYTES = Media("application/octet-stream", {"type": "string", "format": "binary"})
_FILE = {"file": _BYTES.schema, "purpose": {"enum": ["batch"]}}
_UPLOAD = Media("multipart/form-data", closed_object(_FILE))
_models = partial(get, description="With the header anthropic-version in Anthropic's form.")
ADAPTERS = (
    get(
        "/v1/adapters",
        "listAdapters",
        "All LoRA adapters, for administrators",
        AdapterList,
    ),
    post(
        "/v1/load_lora_adapter",
        "loadLoraAdapter",
        "Offer a LoRA adapter, for administrators",
        TEXT,
        body=LoadLoraAdapterRequest,
        example={"lora_name": "sql", "lora_path": "/srv/adapters/sql"},
        own_errors=(404, 409, 500),
    ),
    post(
        "/v1/unload_lora_adapter",
        "unloadLoraAdapter",
        "Offer a LoRA adapter no more, for administrators; what runs with it goes on",
        TEXT,
        body=UnloadLoraAdapterRequest,
        example={"lora_name": "sql"},
        own_errors=(404,),
    ),
)
ROLLOUTS = (
    get(
        "/v1/rollouts",
        "listRollouts",
        "The latest rollout of each model, for administrators",
        RolloutList,
    ),
    post(
        "/v1/rollouts",
        "startRollout",
        "Move the traffic of a model to another version of it, for administrators",
        RolloutReport,
        body=StartRolloutRequest,
        example={
            "version": "chat@v2",
            "canary_percent": 10,
            "step_percent": 20,
            "interval_s": 300,
            "abort_if": "error_rate>0.01 or ttft_p95>1.5x",
        },
        own_errors=(404, 409),
    ),
    get(
        "/v1/rollouts/{model}",
        "getRollout",
        "The latest rollout of a model, for administrators",
        RolloutReport,
    ),
    post(
        "/v1/rollouts/{model}/rollback",
        "rollBack",
        "Give the traffic of a model back to the version that had it, for administrators",
        RolloutReport,
        own_errors=(409,),
    ),
)
_ONE = "/v1/conversations/{conversation_id}"
_HELLO_ITEM = {"type": "message", "role": "user", "content": "Hello!"}

CONVERSATIONS = (
    post(
        "/v1/conversations",
        "createConversation",
        "Begin a conversation that answers are added to",
        Conversation,
        body=ConversationRequest,
        example={"items": [_HELLO_ITEM], "metadata": {"topic": "mills"}},
        own_errors=(404,),
    ),
    get(_ONE, "getConversation", "A conversation without its items", Conversation),
    post(
        _ONE,
        "updateConversation",
        "Give a conversation other metadata",
        Conversation,
        body=ConversationUpdate,
        example={"metadata": {"topic": "rivers"}},
    ),
    delete(_ONE, "deleteConversation", "Forget a conversation", ConversationDeleted),
    get(
        f"{_ONE}/items",
        "listConversationItems",
        "The items of a conversation, in pages",
        ItemList,
        query=page(100, ORDER),
    ),
    post(
        f"{_ONE}/items",
        "createConversationItems",
        "Add items to a conversation",
        ItemList,
        body=NewItems,
        example={"items": [_HELLO_ITEM]},
    ),
    get(
        f"{_ONE}/items/{{item_id}}",
        "getConversationItem",
        "An item of a conversation",
        Item,
    ),
    delete(
        f"{_ONE}/items/{{item_id}}",
        "deleteConversationItem",
        "Forget an item of a conversation",
        Conversation,
    ),
)

_CHAT = "/v1/chats/{chat_id}"

CHATS = (
    get(
        "/v1/chats",
        "listChats",
        "The tenant's chats, the last changed first, in pages",
        ChatList,
        query=page(MAX_PAGE_CHATS),
    ),
    get(_CHAT, "getChat", "A chat with its document", Chat),
    post(
        _CHAT,
        "putChat",
        "Keep a new chat, or another revision of it",
        ChatInfo,
        body=ChatUpdate,
        example={"revision": 0, "title": "Mills", "document": {"turns": []}},
        own_errors=(409,),
    ),
    delete(_CHAT, "deleteChat", "Forget a chat", ChatDeleted),
)


_tokenize = partial(
    post,
    summary="The token ids of a prompt, or of messages as the chat template renders them",
    answer=TokenizeAnswer,
    body=TokenizeRequest,
    example={"model": "demo", "prompt": "Hello!"},
    own_errors=(404, 500),
)


_rerank = partial(
    generate,
    summary="The documents that are most like a query, by their embeddings",
    answer=RerankList,
    body=RerankRequest,
    description="A body with texts in place of documents has the form of Text Embeddings "
    "Inference, and its answer is a list of index and score: see docs/embeddings.md.",
    example={"model": "demo", "query": "Hello!", "documents": ["Good day!", "A mill."]},
)


_reset_prefixes = partial(
    post,
    summary="Empty the prefix caches of all workers, for administrators",
    answer=PrefixCacheReset,
    query=(_MODEL,),
    own_errors=(404, 409),
)


_score = partial(
    generate,
    summary="How like one another texts are, by their embeddings",
    answer=ScoreList,
    body=ScoreRequest,
    example={"model": "demo", "text_1": "Hello!", "text_2": ["Good day!", "A mill."]},
)


_detokenize = partial(
    post,
    summary="The text of token ids",
    answer=DetokenizeAnswer,
    body=DetokenizeRequest,
    example={"model": "demo", "tokens": [72, 105]},
    own_errors=(404, 500),
)


def _health(path: str, name: str, method: str = "get") -> Operation:
    return Operation(
        method,
        path,
        name,
        "Whether requests can be accepted",
        Health,
        description="200 while they can, 503 while they cannot; the body is the same.",
        is_open=True,
    )


_HELLO = [{"role": "user", "content": "Hello!"}]

BY_TAG: dict[str, tuple[Operation, ...]] = {
    "generation": (
        generate(
            "/v1/chat/completions",
            "createChatCompletion",
            "Continue a conversation",
            ChatCompletion,
            body=ChatCompletionRequest,
            example={"model": "demo", "messages": _HELLO, "max_tokens": 32},
            event=ChatCompletionChunk,
        ),
        generate(
            "/v1/completions",
            "createCompletion",
            "Continue a text, token ids, or several of these",
            Completion,
            body=CompletionRequest,
            example={"model": "demo", "prompt": "Once upon a time", "max_tokens": 32},
            event=CompletionChunk,
        ),
        generate(
            "/v1/responses",
            "createResponse",
            "Answer in the shape of OpenAI's Responses API",
            ResponseAnswer,
            body=ResponsesRequest,
            example={"model": "demo", "input": "Hello!", "max_output_tokens": 32},
            event=ResponseEvent,
            description="An answer is kept, for a later previous_response_id, unless store is "
            "false. With background it is told of at once and made whether or not anybody waits.",
        ),
        generate(
            "/v1/messages",
            "createMessage",
            "Answer in the shape of Anthropic's Messages API",
            MessageAnswer,
            body=MessagesRequest,
            example={"model": "demo", "messages": _HELLO, "max_tokens": 32},
            event=MessageEvent,
            refused=MessagesError,
        ),
    ),
    "messages": (
        post(
            COUNT_TOKENS,
            "countMessageTokens",
            "How many tokens the prompt of a request would have",
            TokenCount,
            body=MessagesRequest,
            example={"model": "demo", "messages": _HELLO},
            own_errors=(404, 429, 500),
            refused=MessagesError,
        ),
    ),
    "responses": (
        get(
            "/v1/responses/{response_id}",
            "getResponse",
            "An answer that was kept, or is made in the background",
            ResponseAnswer,
            query=(
                Query("stream", _FLAG, "Its events; only of an answer in the background."),
                Query("starting_after", _CURSOR, "With stream: events after this sequence_number."),
            ),
            event=ResponseEvent,
            description="With stream=true it is a stream of events, as of createResponse.",
        ),
        post(
            "/v1/responses/input_tokens",
            "countInputTokens",
            "How many tokens the prompt of a request would have",
            InputTokens,
            body=ResponsesRequest,
            example={"model": "demo", "input": "Hello!"},
            own_errors=(404, 429, 500),
        ),
        post(
            "/v1/responses/{response_id}/cancel",
            "cancelResponse",
            "Have an answer in the background end",
            ResponseAnswer,
            own_errors=(400,),
        ),
        delete(
            "/v1/responses/{response_id}", "deleteResponse", "Forget an answer", ResponseDeleted
        ),
        get(
            "/v1/responses/{response_id}/input_items",
            "listInputItems",
            "The items before an answer, in pages",
            ItemList,
            query=page(100, ORDER),
        ),
    ),
    "conversations": CONVERSATIONS,
    "chats": CHATS,
    "embeddings": (
        generate(
            "/v1/embeddings",
            "createEmbeddings",
            "Embed texts",
            EmbeddingList,
            body=EmbeddingRequest,
            example={"model": "demo", "input": ["Hello!", "Good morning."]},
        ),
        generate(
            POOLING_ROUTE,
            "createPooling",
            "Embed or classify texts, as vLLM's servers tell of it",
            PoolingList,
            body=PoolingRequest,
            example={"model": "demo", "input": ["Hello!", "Good morning."]},
        ),
        generate(
            CLASSIFY_ROUTE,
            "classify",
            "The labels of texts",
            ClassifyList,
            body=ClassifyRequest,
            example={"model": "sentiment", "input": ["Well done!"]},
        ),
        *map(_rerank, RERANK_PATHS, ("rerank", "rerankAsCohere", "rerankAtRoot")),
        *map(_score, SCORE_PATHS, ("score", "scoreAtRoot")),
    ),
    "models": (
        _models("/v1/models", "listModels", "The models that may be asked for", ModelList),
        _models("/v1/models/{name}", "getModel", "One model", ModelCard),
        *map(_tokenize, TOKENIZE_PATHS, ("tokenize", "tokenizeAtRoot")),
        *map(_detokenize, DETOKENIZE_PATHS, ("detokenize", "detokenizeAtRoot")),
    ),
    "files": (
        post(
            "/v1/files",
            "uploadFile",
            "Upload the requests of a batch, one in a line",
            FileObject,
            body=_UPLOAD,
        ),
        get(
            "/v1/files",
            "listFiles",
            "The caller's files, in pages",
            FileList,
            query=page(10_000, ORDER, _PURPOSE),
        ),
        get("/v1/files/{file_id}", "getFile", "One file's entry", FileObject),
        delete(
            "/v1/files/{file_id}",
            "deleteFile",
            "Delete a file that no batch reads",
            FileDeleted,
            own_errors=(409,),
        ),
        get("/v1/files/{file_id}/content", "getFileContent", "The bytes of a file", _BYTES),
    ),
    "batches": (
        post(
            "/v1/batches",
            "createBatch",
            "Have the requests of a file answered within a day",
            Batch,
            body=BatchRequest,
            example={
                "input_file_id": "file-0190f3c1a2b3c4d5e6f70819",
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            },
            own_errors=(429,),
        ),
        get(
            "/v1/batches",
            "listBatches",
            "The caller's batches, in pages",
            BatchList,
            query=page(100),
        ),
        get("/v1/batches/{batch_id}", "getBatch", "A batch as it stands", Batch),
        post(
            "/v1/batches/{batch_id}/cancel",
            "cancelBatch",
            "Stop a batch; what is done by then is kept",
            Batch,
            own_errors=(409,),
        ),
    ),
    "sessions": (
        get(
            "/v1/sessions/{session_id}",
            "getSession",
            "The turns of a conversation that is kept",
            SessionHistory,
        ),
        delete(
            "/v1/sessions/{session_id}", "deleteSession", "Forget a conversation", SessionDeleted
        ),
    ),
    "tools": (
        get("/v1/tools", "listTools", "The tools that the gateway runs itself", ServerToolList),
    ),
    "adapters": ADAPTERS,
    "rollouts": ROLLOUTS,
    "limits": (
        get(
            "/v1/limits",
            "getLimits",
            "What the caller may use, and what is left of it",
            CallerLimits,
            query=(_TENANT,),
        ),
    ),
    "operations": (
        *map(_reset_prefixes, RESET_PATHS, ("resetPrefixCache", "flushCache")),
        *map(_health, HEALTH_PATHS, ("getHealth", "getHealthAsVllm", "ping")),
        _health("/ping", "postPing", method="post"),
        get("/version", "getVersion", "The version that the gateway is of", Version, is_open=True),
        get(
            "/metrics",
            "getMetrics",
            "Figures for Prometheus",
            TEXT,
            description="Where other machines can ask, for who sends metrics.token or the key of "
            "an administrator, unless metrics.public is set. In OpenMetrics, with exemplars, for "
            "an Accept header of application/openmetrics-text; compressed with gzip or zstd for "
            "an Accept-Encoding header that names one.",
            is_open=True,
        ),
        get(
            "/ops/api/{query}",
            "runQuery",
            "Rows of a saved query over the records of all requests, for administrators",
            _ROWS,
            description="The query's parameters are the fields of the query string. With .csv "
            "after its name, or for an Accept header of text/csv, the rows come as CSV (RFC 4180). "
            "requests.csv is every request of a range, row by row, up to 100,000 of them. In JSON "
            "64-bit integers are strings.",
            own_errors=(400,),
        ),
    ),
    "contracts": (
        get("/openapi.json", "getOpenApi", "This document", _OBJECT, is_open=True),
        get(
            "/asyncapi.json",
            "getAsyncApi",
            "The AsyncAPI document of the message bus, for services that publish jobs",
            _OBJECT,
            is_open=True,
        ),
        get(
            "/v1/ws/schema.json",
            "getWebSocketSchema",
            "The JSON Schema of the messages of /v1/ws",
            _OBJECT,
            is_open=True,
        ),
    ),
}
OPERATIONS = tuple(chain.from_iterable(BY_TAG.values()))

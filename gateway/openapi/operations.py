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

_PURPOSE = Query(
    "purpose", {"type": "string"}, "Only files with this purpose: batch, batch_output."
)
_MODEL = Query("model", {"type": "string"}, "Only of the workers of this model.")
_TENANT = Query("tenant", {"type": "string"}, "Another tenant, for administrators.")

_OBJECT = Media(JSON, {"type": "object"})
_FLAG = {"type": "boolean", "default": False}
_CURSOR = {"type": "integer", "minimum": 0}
_ROWS = Media(JSON, {"type": "array", "items": {"type": "object"}})
_BYTES = Media("application/octet-stream", {"type": "string", "format": "binary"})
_FILE = {"file": _BYTES.schema, "purpose": {"enum": ["batch"]}}
_UPLOAD = Media("multipart/form-data", closed_object(_FILE))
_models = partial(get, description="In Anthropic's shape with the header anthropic-version.")
ADAPTERS = (
    get(
        "/v1/adapters",
        "listAdapters",
        "List all LoRA adapters, for administrators",
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
        "Withdraw a LoRA adapter, for administrators; running requests continue",
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
        "List the latest rollout of each model, for administrators",
        RolloutList,
    ),
    post(
        "/v1/rollouts",
        "startRollout",
        "Move the traffic of a model to another version, for administrators",
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
        "Get the latest rollout of a model, for administrators",
        RolloutReport,
    ),
    post(
        "/v1/rollouts/{model}/rollback",
        "rollBack",
        "Give all traffic of a model back to its previous version, for administrators",
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
        "Create a conversation to which answers are added",
        Conversation,
        body=ConversationRequest,
        example={"items": [_HELLO_ITEM], "metadata": {"topic": "mills"}},
        own_errors=(404,),
    ),
    get(_ONE, "getConversation", "A conversation without its items", Conversation),
    post(
        _ONE,
        "updateConversation",
        "Replace the metadata of a conversation",
        Conversation,
        body=ConversationUpdate,
        example={"metadata": {"topic": "rivers"}},
    ),
    delete(_ONE, "deleteConversation", "Forget a conversation", ConversationDeleted),
    get(
        f"{_ONE}/items",
        "listConversationItems",
        "List the items of a conversation, in pages",
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
        "Get an item of a conversation",
        Item,
    ),
    delete(
        f"{_ONE}/items/{{item_id}}",
        "deleteConversationItem",
        "Delete an item of a conversation",
        Conversation,
    ),
)

_CHAT = "/v1/chats/{chat_id}"

CHATS = (
    get(
        "/v1/chats",
        "listChats",
        "List the tenant's chats in pages, the last changed first",
        ChatList,
        query=page(MAX_PAGE_CHATS),
    ),
    get(_CHAT, "getChat", "A chat with its document", Chat),
    post(
        _CHAT,
        "putChat",
        "Store a new chat, or a new revision of it",
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
    summary="Rank documents by their similarity to a query",
    answer=RerankList,
    body=RerankRequest,
    description="A body with texts in place of documents has the shape of Text Embeddings "
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
    summary="Score the similarity of texts",
    answer=ScoreList,
    body=ScoreRequest,
    example={"model": "demo", "text_1": "Hello!", "text_2": ["Good day!", "A mill."]},
)


_detokenize = partial(
    post,
    summary="Decode token ids to text",
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
        "Tell whether requests can be accepted",
        Health,
        description="200 while they can, 503 while they cannot, with the same body.",
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
            description="The answer is stored, for a later previous_response_id, unless store is "
            "false. With background it is returned at once as queued, and made without a client.",
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
            "Count the tokens of a request's prompt",
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
            "Get a stored answer, or an answer in the background",
            ResponseAnswer,
            query=(
                Query("stream", _FLAG, "Stream the events of an answer in the background."),
                Query("starting_after", _CURSOR, "With stream: events after this sequence_number."),
            ),
            event=ResponseEvent,
            description="With stream=true a stream of events, as from createResponse.",
        ),
        post(
            "/v1/responses/input_tokens",
            "countInputTokens",
            "Count the tokens of a request's prompt",
            InputTokens,
            body=ResponsesRequest,
            example={"model": "demo", "input": "Hello!"},
            own_errors=(404, 429, 500),
        ),
        post(
            "/v1/responses/{response_id}/cancel",
            "cancelResponse",
            "Cancel an answer in the background",
            ResponseAnswer,
            own_errors=(400,),
        ),
        delete(
            "/v1/responses/{response_id}", "deleteResponse", "Forget an answer", ResponseDeleted
        ),
        get(
            "/v1/responses/{response_id}/input_items",
            "listInputItems",
            "List the input items of an answer, in pages",
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
            "Embed or classify texts, in vLLM's shape",
            PoolingList,
            body=PoolingRequest,
            example={"model": "demo", "input": ["Hello!", "Good morning."]},
        ),
        generate(
            CLASSIFY_ROUTE,
            "classify",
            "Classify texts",
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
            "Upload the requests of a batch, one per line",
            FileObject,
            body=_UPLOAD,
        ),
        get(
            "/v1/files",
            "listFiles",
            "List the caller's files, in pages",
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
            "Create a batch: the requests of a file, answered within a day",
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
            "List the caller's batches, in pages",
            BatchList,
            query=page(100),
        ),
        get("/v1/batches/{batch_id}", "getBatch", "A batch as it stands", Batch),
        post(
            "/v1/batches/{batch_id}/cancel",
            "cancelBatch",
            "Cancel a batch; finished answers stay",
            Batch,
            own_errors=(409,),
        ),
    ),
    "sessions": (
        get(
            "/v1/sessions/{session_id}",
            "getSession",
            "Get the turns of a session",
            SessionHistory,
        ),
        delete(
            "/v1/sessions/{session_id}", "deleteSession", "Forget a conversation", SessionDeleted
        ),
    ),
    "tools": (
        get(
            "/v1/tools", "listTools", "List the tools that the gateway runs itself", ServerToolList
        ),
    ),
    "adapters": ADAPTERS,
    "rollouts": ROLLOUTS,
    "limits": (
        get(
            "/v1/limits",
            "getLimits",
            "Get the caller's limits and remaining amounts",
            CallerLimits,
            query=(_TENANT,),
        ),
    ),
    "operations": (
        *map(_reset_prefixes, RESET_PATHS, ("resetPrefixCache", "flushCache")),
        *map(_health, HEALTH_PATHS, ("getHealth", "getHealthAsVllm", "ping")),
        _health("/ping", "postPing", method="post"),
        get("/version", "getVersion", "Get the version of the gateway", Version, is_open=True),
        get(
            "/metrics",
            "getMetrics",
            "Get metrics for Prometheus",
            TEXT,
            description="From other machines, metrics.token or an administrator's key is needed, "
            "unless metrics.public is set. In OpenMetrics, with exemplars, for an Accept header "
            "of application/openmetrics-text. Compressed with gzip or zstd for an Accept-Encoding "
            "header that names one.",
            is_open=True,
        ),
        get(
            "/ops/api/{query}",
            "runQuery",
            "Run a saved query over the records of all requests, for administrators",
            _ROWS,
            description="The query's parameters are the fields of the query string. With .csv "
            "after its name, or for an Accept header of text/csv, the rows come as CSV (RFC 4180). "
            "requests.csv has each request of a range as a row, up to 100,000 rows. In JSON "
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

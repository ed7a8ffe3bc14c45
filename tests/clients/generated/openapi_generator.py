"""Calls the API with the Python client of openapi-generator."""

from __future__ import annotations

import json
import sys

from openapi_client import (
    ApiClient,
    ApiException,
    BatchesApi,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionRequestMessagesItem,
    ChatCompletionRequestStop,
    ChatCompletionRequestToolsItem,
    Configuration,
    EmbeddingRequest,
    EmbeddingRequestInput,
    EmbeddingRequestInputListItem,
    EmbeddingsApi,
    FilesApi,
    FunctionFields,
    FunctionTool,
    GenerationApi,
    GivenMessage,
    GivenMessageContent,
    GivenUserMessage,
    GivenUserMessageContent,
    MessagesRequest,
    ModelsApi,
    ResponsesRequest,
    ResponsesRequestInput,
    ResponsesRequestInputListItem,
    TokenizeRequest,
    UserMessage,
    UserMessageContent,
)

client = ApiClient(Configuration(host=sys.argv[1], access_token="none"))
generation = GenerationApi(client)
model = "echo"
user = UserMessage(role="user", content=UserMessageContent("Hello there"))
messages = [ChatCompletionRequestMessagesItem(user)]

whole = generation.create_chat_completion(ChatCompletionRequest(model=model, messages=messages))
answer = generation.create_chat_completion_without_preload_content(
    ChatCompletionRequest(model=model, messages=messages, stream=True)
)
streamed = ""
for line in answer.read().decode().splitlines():
    if line.startswith("data: {"):
        chunk = ChatCompletionChunk.from_json(line[6:])
        streamed += "".join(choice.delta.content or "" for choice in chunk.choices)

tool = FunctionTool(function=FunctionFields(name="look", parameters={"type": "object"}))
generation.create_chat_completion(
    ChatCompletionRequest(
        model=model,
        messages=messages,
        tools=[ChatCompletionRequestToolsItem(tool)],
        stop=ChatCompletionRequestStop("!"),
        temperature=0.5,
    )
)
models = ModelsApi(client).list_models()
texts = EmbeddingRequestInput([EmbeddingRequestInputListItem(text) for text in "ab"])
vectors = EmbeddingsApi(client).create_embeddings(EmbeddingRequest(model=model, input=texts))
tokens = ModelsApi(client).tokenize_at_root(TokenizeRequest(model=model, prompt="abc"))
file = FilesApi(client).upload_file(("requests.jsonl", b"{}"), "batch")
turn = GivenUserMessage(role="user", content=GivenUserMessageContent("Hello there"))
response = generation.create_response(
    ResponsesRequest(
        model=model, input=ResponsesRequestInput([ResponsesRequestInputListItem(turn)])
    )
)
message = generation.create_message(
    MessagesRequest(
        model=model,
        max_tokens=20,
        messages=[GivenMessage(role="user", content=GivenMessageContent("Hello there"))],
    )
)
batches = BatchesApi(client).list_batches(limit=5)
try:
    generation.create_chat_completion(ChatCompletionRequest(model="absent", messages=messages))
except ApiException as error:
    refused = error.data.error.code

print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "streamed": streamed,
            "models": [card.id for card in models.data],
            "embeddings": len(vectors.data),
            "tokens": tokens.count,
            "file": file.bytes,
            "response": response.output[0].actual_instance.content[0].actual_instance.text,
            "message": message.content[0].actual_instance.text,
            "batches": len(batches.data),
            "refused": refused,
        }
    )
)

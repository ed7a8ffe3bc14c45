"""Calls the API with the client that openapi-python-client generates."""

from __future__ import annotations

import io
import json
import sys

from millrace_client import AuthenticatedClient
from millrace_client.api.batches import list_batches
from millrace_client.api.embeddings import create_embeddings
from millrace_client.api.files import upload_file
from millrace_client.api.generation import (
    create_chat_completion,
    create_message,
    create_response,
)
from millrace_client.api.models import list_models, tokenize_at_root
from millrace_client.models import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    EmbeddingRequest,
    FunctionFields,
    FunctionTool,
    GivenMessage,
    GivenMessageRole,
    GivenUserMessage,
    MessagesRequest,
    ResponsesRequest,
    TokenizeRequest,
    UploadFileForm,
    UserMessage,
)
from millrace_client.types import File

client = AuthenticatedClient(base_url=sys.argv[1], token="none")
model = "echo"
messages = [UserMessage(role="user", content="Hello there")]

whole = create_chat_completion.sync(
    client=client, body=ChatCompletionRequest(model=model, messages=messages)
)
asked = ChatCompletionRequest(model=model, messages=messages, stream=True)
streamed = ""
with client.get_httpx_client().stream(
    "POST", "/v1/chat/completions", json=asked.to_dict()
) as answer:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            chunk = ChatCompletionChunk.from_dict(json.loads(line[6:]))
            streamed += "".join(choice.delta.content or "" for choice in chunk.choices)

tool = FunctionTool(function=FunctionFields(name="look"))
with_tools = create_chat_completion.sync(
    client=client,
    body=ChatCompletionRequest(
        model=model, messages=messages, tools=[tool], stop="!", temperature=0.5
    ),
)
models = list_models.sync(client=client)
vectors = create_embeddings.sync(
    client=client, body=EmbeddingRequest(model=model, input_=["a", "b"])
)
tokens = tokenize_at_root.sync(client=client, body=TokenizeRequest(model=model, prompt="abc"))
upload = UploadFileForm(
    file=File(payload=io.BytesIO(b"{}"), file_name="requests.jsonl"), purpose="batch"
)
file = upload_file.sync(client=client, body=upload)
response = create_response.sync(
    client=client,
    body=ResponsesRequest(
        model=model, input_=[GivenUserMessage(role="user", content="Hello there")]
    ),
)
message = create_message.sync(
    client=client,
    body=MessagesRequest(
        model=model,
        max_tokens=20,
        messages=[GivenMessage(role=GivenMessageRole.USER, content="Hello there")],
    ),
)
batches = list_batches.sync(client=client, limit=5)
refused = create_chat_completion.sync(
    client=client, body=ChatCompletionRequest(model="absent", messages=messages)
)

print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "streamed": streamed,
            "models": [card.id for card in models.data],
            "embeddings": len(vectors.data),
            "tokens": tokens.count,
            "file": file.bytes_,
            "response": response.output[0].content[0].text,
            "message": message.content[0].text,
            "batches": len(batches.data),
            "refused": refused.error.code,
        }
    )
)

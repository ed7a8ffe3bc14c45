"""Calls the API with the models that datamodel-code-generator writes."""

from __future__ import annotations

import json
import sys
from typing import Any

import generated_models as api
import httpx
from pydantic import BaseModel

http = httpx.Client(base_url=sys.argv[1], headers={"Authorization": "Bearer none"})
model = "echo"
messages: list[Any] = [{"role": "user", "content": "Hello there"}]


def post(path: str, body: BaseModel) -> httpx.Response:
    text = body.model_dump_json(exclude_unset=True)
    return http.post(path, content=text, headers={"Content-Type": "application/json"})


chat = api.ChatCompletionRequest(model=model, messages=messages)
whole = api.ChatCompletion.model_validate_json(post("/v1/chat/completions", chat).content)
streamed = ""
asked = chat.model_copy(update={"stream": True}).model_dump(mode="json", exclude_unset=True)
with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            chunk = api.ChatCompletionChunk.model_validate_json(line[6:])
            streamed += "".join(choice.delta.content or "" for choice in chunk.choices)

tool: Any = {"function": {"name": "look", "parameters": {"type": "object"}}}
with_tools = api.ChatCompletionRequest(
    model=model, messages=messages, tools=[tool], tool_choice="auto", stop="!", temperature=0.5
)
assert post("/v1/chat/completions", with_tools).is_success
models = api.ModelList.model_validate_json(http.get("/v1/models").content)
embedding = api.EmbeddingRequest(model=model, input=["a", "b"])
vectors = api.EmbeddingList.model_validate_json(post("/v1/embeddings", embedding).content)
counted = post("/tokenize", api.TokenizeRequest(model=model, prompt="abc"))
tokens = api.TokenizeAnswer.model_validate_json(counted.content)
uploaded = http.post(
    "/v1/files", files={"file": ("requests.jsonl", b"{}")}, data={"purpose": "batch"}
)
file = api.FileObject.model_validate_json(uploaded.content)
turn = api.ResponsesRequest(model=model, input=messages)
response = api.ResponseAnswer.model_validate_json(post("/v1/responses", turn).content)
anthropic = api.MessagesRequest(model=model, max_tokens=20, messages=messages)
message = api.MessageAnswer.model_validate_json(post("/v1/messages", anthropic).content)
batches = api.BatchList.model_validate_json(http.get("/v1/batches?limit=5").content)
absent = post("/v1/chat/completions", chat.model_copy(update={"model": "absent"}))
refused = api.ErrorBody.model_validate_json(absent.content)

print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "streamed": streamed,
            "models": [card.id for card in models.data],
            "embeddings": len(vectors.data),
            "tokens": tokens.count,
            "file": file.bytes,
            "response": response.output[0].root.content[0].root.text,
            "message": message.content[0].root.text,
            "batches": len(batches.data),
            "refused": refused.error.code,
        }
    )
)

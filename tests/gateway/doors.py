"""Request bodies, without the model's name, for each API that takes one."""

from __future__ import annotations

from typing import Any

MESSAGES = [{"role": "user", "content": "abc"}]
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/completions": {"prompt": "abc", "max_tokens": 3},
    "/v1/responses": {"input": "abc", "max_output_tokens": 16, "store": False},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/embeddings": {"input": "abc"},
    "/pooling": {"input": "abc"},
    "/v1/score": {"text_1": "abc", "text_2": "abd"},
    "/v1/rerank": {"query": "abc", "documents": ["abd"]},
    "/v1/tokenize": {"prompt": "abc"},
    "/v1/detokenize": {"tokens": [97]},
}
WITHOUT_JOBS = {"/v1/messages/count_tokens", "/v1/tokenize", "/v1/detokenize"}

"""Any server that has /v1/completions of OpenAI's API: text in and text out.

It is the last resort, since the token ids are made anew from the server's text: where that has
other tokens than those that the model drew, a stream that goes on after a crash may take another
turn. The server is asked for nothing that this API does not have, and counts ``max_tokens`` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.engine.types import EngineRequest
from millrace.registry.served import ServedModel
from millrace.registry.tokenizers.incremental import IncrementalTokenizer
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError
from millrace.workers.servers.client import ServerClient
from millrace.workers.servers.dialect import (
    Call,
    Command,
    Dialect,
    Reader,
    ServerAddress,
    ServerFacts,
    ServerLoad,
)
from millrace.workers.servers.dialects.completions_probe import check_completions
from millrace.workers.servers.dialects.logit_bias import add_bias
from millrace.workers.servers.dialects.openai_answers import TextReader
from millrace.workers.servers.dialects.prompt_text import prompt_text
from millrace.workers.servers.dialects.same_model import chosen_model

_VERSION = "/v1"
# Some servers keep a seed in 32 bits, one of them for the sign.
_MAX_SEED = 2**31 - 1


class OpenAiDialect(Dialect):
    """See the module. The URL may end with /v1, as clients of OpenAI write it."""

    kind = EngineKind.OPENAI

    def __init__(self, model: ServedModel, config: EngineConfig, *, owned: bool) -> None:
        super().__init__(model, config, owned=owned)
        if owned:
            raise _no_url()
        is_versioned = config.url.rstrip("/").endswith(_VERSION)
        self._root = "" if is_versioned else _VERSION
        self._name = model.entry.name

    @property
    def health_path(self) -> str:
        """All of these servers have it."""
        return f"{self._root}/models"

    def command(self, program: Path, address: ServerAddress) -> Command:  # noqa: ARG002
        """Nobody knows how it is started."""
        raise _no_url()

    async def read_facts(self, client: ServerClient) -> ServerFacts:
        models = await client.get_json(self.health_path)
        model = chosen_model(models, self.config.served_name, "OpenAI-compatible")
        self._name = str(model["id"])
        path = f"{self._root}/completions"
        timeout_s = self.config.start_timeout_s
        await check_completions(client, path, self._name, self.model, timeout_s)
        window = model.get("max_model_len")
        return ServerFacts(
            model=self._name, context_window_tokens=window if isinstance(window, int) else None
        )

    async def read_load(self, client: ServerClient) -> ServerLoad:  # noqa: ARG002
        """Nothing that all of these servers tell."""
        return ServerLoad()

    # --- requests ---

    def call(self, request: EngineRequest, token_ids: Sequence[int]) -> Call:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._name,
            "prompt": prompt_text(self.model.tokenizer, request, token_ids),
            "max_tokens": self.num_new_tokens(request, len(token_ids)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed % _MAX_SEED
        add_bias(body, sampling.logit_bias)
        return Call(f"{self._root}/completions", body)

    def biased(self, call: Call, bias: dict[int, float]) -> Call:
        add_bias(call.body, bias)
        return call

    def reader(self, request: EngineRequest, token_ids: Sequence[int]) -> Reader:
        before = (*request.prompt_token_ids, *token_ids)
        return TextReader(IncrementalTokenizer(self.model.tokenizer, before))


def _no_url() -> ConfigError:
    return ConfigError(
        "An engine of the kind openai is a server that runs already: say where in "
        "worker.engine.url (--engine-url)."
    )

"""Engine as a library: completions, embeddings, labels and scores from a model in this process."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from millrace.engine.offline.batch import BatchSummary, EngineClosedError, OfflineBatch
from millrace.engine.offline.generated import Generated, OfflineRequest
from millrace.engine.offline.inputs import (
    AdapterNames,
    ChatOptions,
    Conversations,
    OfflineRequests,
    Prompts,
    Sampling,
    embedding_pooling,
    engine_settings,
    listed_prompts,
    listed_texts,
    load_served,
    prompt_fields,
    with_adapter_slots,
)
from millrace.engine.offline.outputs import (
    ClassificationOutput,
    DeltaReader,
    EmbeddingOutput,
    GenerationDelta,
    GenerationOutput,
    RequestFailedError,
    ScoreOutput,
    generation_output,
    unit_vector,
)
from millrace.engine.threads.choice import configure_threads
from millrace.engine.types import EngineStats
from millrace.registry.adapters import absolute_source, adapter_refs
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.checkpoints.classifier import activated
from millrace.registry.served import ServedModel
from millrace.registry.similarity import Vector, cosine
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError, ParameterError
from millrace.schemas.models.adapters import AdapterRef
from millrace.schemas.pooling import EmbeddingPooling, Pooling

if TYPE_CHECKING:
    from millrace.engine.step.engine import Engine


class LLM:
    """Model that is loaded into this process.

    The engine batches all open requests of all calls. An invalid request raises before any request
    of its call runs. If requests fail in the engine, RequestFailedError is raised once the others
    of their call have ended. Calls of several threads take turns, one step each. ``close`` frees
    the weights and the KV cache; so does leaving a ``with`` block.
    """

    def __init__(
        self,
        model: str | Path | ServedModel,
        *,
        tensor_parallel: int = 1,
        quantization: str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        catalogue: str | Path = "",
        config: EngineConfig | None = None,
        **settings: Any,
    ) -> None:
        """Load a model.

        Args:
            model: A folder in Hugging Face layout, a name in the catalogue, an address in an object
                store, or a hub id.
            tensor_parallel: Number of ranks that share each layer.
            quantization: ``int8``, ``fp8`` or ``int4``, to which wide weights are rounded. None:
                as in the catalogue, else as the checkpoint is.
            adapters: LoRA adapters, by the names that requests use.
            catalogue: The catalogue in which ``model`` is looked up.
            config: All settings of ``worker.engine``, in place of ``settings``.
            **settings: Other settings of ``worker.engine`` (docs/configuration.md), such as
                ``dtype``, ``device``, ``num_threads`` or ``kv_cache_bytes``.

        Raises ModelNotFoundError, ModelSourceError, CheckpointError, ConfigError, AdapterError or
        ParameterError.
        """
        if tensor_parallel != 1:
            settings["tensor_parallel"] = tensor_parallel
        if quantization is not None:
            settings["quantization"] = quantization
        if config is None:
            config = engine_settings(settings)
        elif settings:
            raise ConfigError(f"config has all settings; leave {next(iter(settings))} out.")
        served = model if isinstance(model, ServedModel) else load_served(model, catalogue)
        config = served.entry.described(config)
        # This must precede the import of torch, which reads its thread settings once.
        configure_threads(config, shared=False)
        self._served = served
        sources = {name: absolute_source(str(at)) for name, at in (adapters or {}).items()}
        known: dict[str, AdapterRef] = {}
        if sources:
            outline = read_model_config(served.path)
            known = adapter_refs(sources, outline, config.max_adapter_rank)
            config = with_adapter_slots(config, len(sources))
        self._requests = OfflineRequests(served, known)
        from millrace.engine.step.engine import Engine

        self._engine: Engine | None = Engine.load(served.path, config)
        most = self._engine.config.max_num_sequences
        self._batch = OfflineBatch(self._engine, served.tokenizer, most)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Sampling = None,
        *,
        adapter: AdapterNames = None,
    ) -> list[GenerationOutput]:
        """Continue each of the prompts.

        Args:
            prompts: One or several texts or lists of token ids.
            sampling_params: Parameters for all prompts, or a list with one entry for each. A
                missing field is neutral in SamplingParams; in SamplingOptions and without any
                parameters it is as the model recommends (``generation_config.json``).
            adapter: Name of the adapter for all prompts, or a list with one for each.

        Returns:
            One output for each prompt, in their order.

        Raises ParameterError, ContextLengthError, RequestFailedError or EngineClosedError.
        """
        return self._outputs(self._requests.completions(prompts, sampling_params, adapter))

    def stream(
        self,
        prompts: Prompts,
        sampling_params: Sampling = None,
        *,
        adapter: AdapterNames = None,
    ) -> Generator[GenerationDelta, None, None]:
        """Continue the prompts as ``generate`` does, and yield the new tokens of each step.

        Leaving the iteration cancels the other requests.
        """
        return self._deltas(self._requests.completions(prompts, sampling_params, adapter))

    def chat(
        self,
        messages: Conversations,
        sampling_params: Sampling = None,
        *,
        adapter: AdapterNames = None,
        **options: Unpack[ChatOptions],
    ) -> list[GenerationOutput]:
        """Answer one or several conversations, by the model's chat template.

        Messages are as in OpenAI's API. Everything else is as in ``generate``.
        """
        return self._outputs(self._requests.chats(messages, sampling_params, adapter, options))

    def stream_chat(
        self,
        messages: Conversations,
        sampling_params: Sampling = None,
        *,
        adapter: AdapterNames = None,
        **options: Unpack[ChatOptions],
    ) -> Generator[GenerationDelta, None, None]:
        """Answer the conversations as ``chat`` does, and yield the new tokens of each step.

        Leaving the iteration cancels the other requests.
        """
        return self._deltas(self._requests.chats(messages, sampling_params, adapter, options))

    def embed(
        self,
        texts: Prompts,
        *,
        pooling: EmbeddingPooling | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingOutput]:
        """Embed one or several texts.

        Args:
            texts: The texts, or lists of token ids.
            pooling: "last" or "mean". Default: as the catalogue or the checkpoint says, else the
                mean.
            normalize: Scale to length 1. Default: as the catalogue or the checkpoint says, else
                True.
            truncate_prompt_tokens: Keep only the last tokens of a text, this many; -1: as many as
                fit.

        Raises ParameterError for a model without embeddings, ContextLengthError, RequestFailedError
        or EngineClosedError.
        """
        prompts = [prompt_fields(text) for text in listed_prompts("texts", texts)]
        defaults = self._served.embedding_defaults
        how = defaults.pooling if pooling is None else embedding_pooling(pooling)
        answers = self._answers(
            self._requests.pooled("texts", prompts, how, truncate_prompt_tokens)
        )
        scaled = defaults.normalize if normalize is None else normalize
        return [
            EmbeddingOutput(
                embedding=unit_vector(answer.embedding) if scaled else answer.embedding,
                num_prompt_tokens=_num_prompt_tokens(answer),
            )
            for answer in answers
        ]

    def classify(
        self, texts: Prompts, *, truncate_prompt_tokens: int | None = None
    ) -> list[ClassificationOutput]:
        """Classify one or several texts: return the label of each.

        Raises ParameterError for a model without a classification head. Everything else is as in
        ``embed``.
        """
        prompts = [prompt_fields(text) for text in listed_prompts("texts", texts)]
        answers = self._answers(
            self._requests.pooled("texts", prompts, Pooling.CLASSIFY, truncate_prompt_tokens)
        )
        head = self._served.classifier
        assert head is not None, "a model without labels has refused these texts"
        made = [activated(answer.embedding, head.class_activation) for answer in answers]
        return [
            ClassificationOutput(
                label=head.labels[numbers.index(max(numbers))],
                probabilities=dict(zip(head.labels, numbers, strict=True)),
                num_prompt_tokens=_num_prompt_tokens(answer),
            )
            for answer, numbers in zip(answers, made, strict=True)
        ]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoreOutput]:
        """Score each document for the query, or for the query at the same position.

        A cross-encoder reads each pair. For another model, a score is the cosine of two embeddings.
        Raises ParameterError for a model that classifies into several labels. Everything else is as
        in ``embed``.
        """
        second = listed_texts("documents", documents)
        first = listed_texts("queries", queries)
        if len(first) not in (1, len(second)):
            raise ParameterError(
                "queries",
                f"queries must be one text or as many as documents, got {len(first)} and "
                f"{len(second)}",
            )
        head = self._served.classifier
        if head is None:
            return self._similarities(first, second, truncate_prompt_tokens)
        if not head.scores_pairs:
            raise ParameterError(
                "queries",
                f"The model {self._served.entry.name} classifies texts into {len(head.labels)} "
                "labels and cannot score pairs; use classify.",
            )
        many = first * len(second) if len(first) == 1 else first
        pairs = [
            {"prompt": one, "text_pair": other} for one, other in zip(many, second, strict=True)
        ]
        answers = self._answers(
            self._requests.pooled("documents", pairs, Pooling.CLASSIFY, truncate_prompt_tokens)
        )
        return [
            ScoreOutput(
                score=activated(answer.embedding, head.score_activation)[0],
                num_prompt_tokens=_num_prompt_tokens(answer),
            )
            for answer in answers
        ]

    @property
    def tokenizer(self) -> Tokenizer:
        return self._served.tokenizer

    @property
    def served(self) -> ServedModel:
        """Description of the model: everything but its weights."""
        return self._served

    @property
    def engine(self) -> Engine:
        """Engine below, with ``add``, ``step`` and ``cancel``. Raises EngineClosedError."""
        if self._engine is None:
            raise EngineClosedError
        return self._engine

    @property
    def num_tokens(self) -> int:
        """Number of tokens made so far."""
        return self._batch.num_tokens

    def stats(self) -> EngineStats:
        """Return the engine's gauges and counters."""
        return self._batch.stats()

    def summary(self, num_refused: int = 0) -> BatchSummary:
        """Return throughput, TTFT and TPOT of all requests so far; see ``OfflineBatch``."""
        return self._batch.summary(num_refused)

    def run(self, requests: Iterable[OfflineRequest]) -> Iterator[Generated]:
        """Yield the answers to prepared requests, each when it ends. Ids must differ."""
        self.engine  # noqa: B018 (raises at once, not with the first answer)
        return self._batch.run(requests)

    def close(self) -> None:
        """Free the weights and the KV cache, and end the processes of other ranks.

        Later calls raise EngineClosedError, and so do open streams.
        """
        if self._engine is None:
            return
        self._batch.close()
        self._engine.close()
        self._engine = None
        # Threads and memory are freed with their objects, some of which are in reference cycles.
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _outputs(self, requests: Sequence[OfflineRequest]) -> list[GenerationOutput]:
        return [generation_output(answer) for answer in self._answers(requests)]

    def _answers(self, requests: Sequence[OfflineRequest]) -> list[Generated]:
        """Return the answers in the order of the requests. Raises RequestFailedError."""
        by_id = {answer.request.id: answer for answer in self.run(requests)}
        answers = [by_id[request.id] for request in requests]
        if any(answer.error is not None for answer in answers):
            raise RequestFailedError(answers)
        return answers

    def _deltas(self, requests: Sequence[OfflineRequest]) -> Generator[GenerationDelta, None, None]:
        self.engine  # noqa: B018 (raises before the iteration begins)
        return self._iterate_deltas(requests)

    def _iterate_deltas(
        self, requests: Sequence[OfflineRequest]
    ) -> Generator[GenerationDelta, None, None]:
        readers = {request.id: DeltaReader(i) for i, request in enumerate(requests)}
        answers = {}
        for live in self._batch.steps(requests):
            for answer in live:
                yield from readers[answer.request.id].read(answer)
                answers[answer.request.id] = answer
        if any(answer.error is not None for answer in answers.values()):
            raise RequestFailedError([answers[request.id] for request in requests])

    def _similarities(
        self, first: list[str], second: list[str], truncate_prompt_tokens: int | None
    ) -> list[ScoreOutput]:
        pooling = self._served.embedding_defaults.pooling
        queries, answers = (
            self._answers(
                self._requests.pooled(
                    name, [{"prompt": text} for text in texts], pooling, truncate_prompt_tokens
                )
            )
            for name, texts in (("queries", first), ("documents", second))
        )
        many = queries * len(answers) if len(queries) == 1 else queries
        return [
            ScoreOutput(
                score=cosine(_vector(one), _vector(other)),
                num_prompt_tokens=_num_prompt_tokens(other),
            )
            for one, other in zip(many, answers, strict=True)
        ]


def _vector(answer: Generated) -> Vector:
    return Vector(answer.embedding, math.hypot(*answer.embedding))


def _num_prompt_tokens(answer: Generated) -> int:
    return len(answer.request.job.prompt_token_ids or ())

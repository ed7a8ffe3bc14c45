"""Types at the engine's edge: requests, outputs and statistics. They cross a process boundary."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import FinishReason, TokenLogprob
from millrace.schemas.models.adapters import AdapterRef, LoadedAdapter
from millrace.schemas.pooling import Pooling
from millrace.schemas.sampling import SamplingParams
from millrace.schemas.transfer import KvSource


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Request to the engine: a prompt to continue, or to embed.

    Attributes:
        output_token_ids: Tokens that were delivered before. They are prefilled after the prompt,
            and the next token has index ``len(output_token_ids)``. They count towards
            ``sampling.max_tokens``. Allowed for one choice only, and not for a beam search.
        sampling: ``n`` completions, the request's choices, are made. ``seed`` None: the engine
            draws one.
        priority: Requests of a higher priority are admitted earlier and preempted later; among
            equals the earlier request is first.
        cache_salt: Requests of the same salt share blocks of the KV cache. It names the adapter,
            too.
        pooling: If set, the request returns the prompt's embedding, or the numbers of its labels,
            instead of tokens.
        watched: The client may end the request at any of its tokens.
        adapter: The request waits until the adapter is loaded, while others run.
        prediction_token_ids: Expected completion. It changes no token, and may save time.
        kv_source: Worker with the leading blocks of the request's tokens. Missing blocks are pulled
            from there before admission, if that is predicted to be faster than computing them.
        warms: The request ends, without a token, once the blocks are pulled; another request will
            continue from there.
        tenant: Grammars are compiled within this tenant's share of the time.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    eos_token_ids: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    pooling: Pooling | None = None
    watched: bool = False
    adapter: AdapterRef | None = None
    prediction_token_ids: tuple[int, ...] = ()
    kv_source: KvSource | None = None
    warms: bool = False
    tenant: str = ""


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Output of one step for one choice of a request.

    A request is over when each of its choices 0 … n - 1 has had its last output, or with one error
    of choice 0 if it was refused. A cancelled request has no last output, only a ``DeviceTime``.
    The choices of a beam search have one output each, all in the same step, the best first, with
    all tokens and their ``cumulative_logprob``. Before that, an empty output reports that the
    search has chosen its first tokens. Its device time is that of choice 0.

    Attributes:
        token_ids: New tokens only, the stop token included.
        prompt_logprobs: Sent once if asked for, with the first token of choice 0: one entry for
            each token of the prompt, None for the first.
        started: True in the first output of a choice, which is sent when it is admitted into the
            batch.
        queued_s: In the first output, seconds that the choice waited in the engine before
            admission.
        num_cached_tokens: In the first output, tokens of the prompt that were found in the KV
            cache.
        num_pulled_tokens: Tokens of these that were pulled from another worker for this request.
        pulled_s: Seconds from the request's arrival at the engine to that of the last pulled block.
        finish_reason: Set in the last output of a choice, unless ``error`` is.
        error: (code, message), in the last output of a choice that failed.
        num_preemptions: In the last output, how often the choice was preempted.
        device_us: In the last output, the device time of the choice in microseconds.
        owes: True if a step of the choice is still in flight, so that a ``DeviceTime`` follows.
        embedding: In the last output of a request with ``pooling``, which makes no tokens.
            [hidden_size] in float32, as pooled; the caller scales it to length 1. For ``CLASSIFY``,
            [num_labels] before any activation.
        resampled: From here on other tokens are drawn than the seed would have given.
        num_proposed_tokens: Tokens that were computed as candidates for the next ones.
        num_accepted_tokens: Tokens of these that were accepted.
    """

    request_id: str
    choice: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    error: tuple[str, str] | None = None
    num_cached_tokens: int = 0
    num_pulled_tokens: int = 0
    pulled_s: float = 0.0
    started: bool = False
    queued_s: float = 0.0
    num_preemptions: int = 0
    embedding: tuple[float, ...] = ()
    device_us: float = 0.0
    owes: bool = False
    resampled: bool = False
    cumulative_logprob: float = 0.0
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class DeviceTime(msgspec.Struct, frozen=True, array_like=True):
    """Total device time of a choice of a request so far.

    With ``over`` it is final: the request was cancelled, or its last output had ``owes``.
    """

    request_id: str
    choice: int
    device_us: float
    over: bool = False


class PrefixChanges(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Changes of the prefix cache: concatenated prefixes of keys, ``REPORTED_BYTES`` each
    (``schemas.prefix``).

    ``added`` also has keys that were there before and were used again; the most recently used are
    last. With ``whole``, ``added`` is the whole contents.
    """

    added: bytes = b""
    removed: bytes = b""
    whole: bool = False


class RunnerFigures(NamedTuple):
    """Counters of a runner since its start.

    Attributes:
        num_exchanges: Exchanges of rank 0 of a group with the other ranks.
        num_exchanged_bytes: Bytes of these exchanges.
        exchange_wait_s: Seconds that rank 0 waited for the other ranks.
        expert_choices: How often each expert of a mixture was chosen for a row, over all layers of
            rank 0.
    """

    num_exchanges: int = 0
    num_exchanged_bytes: int = 0
    exchange_wait_s: float = 0.0
    expert_choices: tuple[int, ...] = ()


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of an engine, and counters since its start.

    Attributes:
        max_num_sequences: Maximum of sequences that run at a time.
        num_free_blocks: Blocks that can be allocated, idle ones included.
        num_idle_blocks: Free blocks that are cached.
        prefill_tokens, decode_tokens: Computed tokens. Recomputation after a preemption counts as
            prefill.
        proposed_tokens: Tokens that were computed as candidates for the next ones.
        accepted_tokens: Proposed tokens that were accepted; they count as decoded.
        busy_s: Time during which a step that runs the model was under way, from its launch until
            its results were handed over.
        charged_s: The part of ``busy_s`` that was charged to requests.
        outstanding_tokens: Work left if nothing stops early: for every live request, the tokens of
            prompt and longest completion whose keys and values are not computed yet.
        outstanding_prompt_tokens: The known tokens among these, which will be prefilled unless they
            are found in the cache. Tokens on their way from other workers, a disk or an object
            store are not included.
        outstanding_pull_tokens: Tokens on their way from other workers, a disk or an object store.
        prefill_tokens_per_s, decode_step_ms: Speed of the last steps; 0 before the first
            measurement.
        prefix_query_tokens: Tokens that admitted sequences looked up in the prefix cache.
        prefix_hit_tokens: Tokens that were found, on the device or in another tier.
        host_hit_tokens: Tokens found in host memory.
        disk_hit_tokens, object_hit_tokens, peer_hit_tokens: Tokens that came from a disk, an object
            store or another worker.
        num_evicted_blocks: Cached blocks that were evicted for their memory.
        num_host_blocks, num_used_host_blocks: Capacity of host memory, and blocks in use.
        num_offloaded_blocks, num_reloaded_blocks: Blocks copied to host memory and back.
        num_swaps: Preemptions that kept their work in host memory.
        num_disk_blocks, num_used_disk_blocks: Capacity of the file on disk, and blocks in use.
        num_written_blocks, num_read_blocks, num_unreadable_blocks: Blocks written to disk, read
            from it, and that could not be read.
        num_object_written_blocks, num_object_read_blocks: Blocks written to and read from an object
            store.
        num_absent_objects: Objects that the store did not have.
        num_object_failures: Requests to the store that failed or returned other contents.
        num_object_dropped_blocks: Blocks not written to the store after a failure or for lack of
            time.
        is_object_store_left_alone: True while the store is not used after a failure.
        num_pulled_blocks, num_pulled_bytes: Blocks pulled from other workers' engines, and their
            bytes.
        num_failed_pulls: Pulls that failed, whose tokens were computed instead.
        num_served_blocks: Blocks sent to other workers' engines.
        adapters: Loaded adapters, in the ``max_adapters`` slots.
        adapter_load_ms: Load time of the last adapters, as an EWMA.
        num_adapter_loads: Loads of adapters.
        num_adapter_evictions: Adapters evicted for others.

    The last fields are those of ``RunnerFigures``.
    """

    max_num_sequences: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_idle_blocks: int = 0
    num_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    num_preemptions: int = 0
    busy_s: float = 0.0
    charged_s: float = 0.0
    outstanding_tokens: int = 0
    outstanding_prompt_tokens: int = 0
    outstanding_pull_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_ms: float = 0.0
    max_tokens_per_request: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    object_hit_tokens: int = 0
    peer_hit_tokens: int = 0
    num_evicted_blocks: int = 0
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    num_offloaded_blocks: int = 0
    num_reloaded_blocks: int = 0
    num_disk_blocks: int = 0
    num_used_disk_blocks: int = 0
    num_written_blocks: int = 0
    num_read_blocks: int = 0
    num_unreadable_blocks: int = 0
    num_object_written_blocks: int = 0
    num_object_written_bytes: int = 0
    num_object_read_blocks: int = 0
    num_object_read_bytes: int = 0
    num_absent_objects: int = 0
    num_object_failures: int = 0
    num_object_dropped_blocks: int = 0
    is_object_store_left_alone: bool = False
    num_pulled_blocks: int = 0
    num_pulled_bytes: int = 0
    num_failed_pulls: int = 0
    num_served_blocks: int = 0
    num_swaps: int = 0
    adapters: tuple[LoadedAdapter, ...] = ()
    max_adapters: int = 0
    adapter_load_ms: float = 0.0
    num_adapter_loads: int = 0
    num_adapter_evictions: int = 0
    num_exchanges: int = 0
    num_exchanged_bytes: int = 0
    exchange_wait_s: float = 0.0
    expert_choices: tuple[int, ...] = ()


class NonFiniteLogitsError(MillraceError, code="non_finite_logits"):
    """Error of a sequence for which the model computed NaN or infinite logits."""

    def __init__(self, token_index: int) -> None:
        super().__init__(
            f"The model's logits for token {token_index} of the completion are not finite; the "
            f"checkpoint's weights or its dtype may be at fault."
        )
        self.token_index = token_index


class NonFiniteEmbeddingError(MillraceError, code="non_finite_embedding"):
    """Error of a sequence for which the model computed NaN or infinite hidden states."""

    def __init__(self) -> None:
        super().__init__(
            "The model's hidden states for this prompt are not finite; the checkpoint's weights or "
            "its dtype may be at fault."
        )


class DeviceLostError(BaseException):
    """Failure of the device, after which it completes no more work of this process.

    It is no error of one request: it ends the process, and another process takes its place.
    """

"""The engine's nouns at its edge: what goes in, what comes out. They cross a process boundary."""

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
    """One sequence to continue.

    ``output_token_ids`` were delivered before: they are prefilled behind the prompt, and the next
    token has index ``len(output_token_ids)``; they count towards ``sampling.max_tokens``. A higher
    ``priority`` is admitted earlier and preempted later; among equals the earlier request wins.
    ``sampling.seed`` None lets the engine draw one. ``sampling.n`` completions are made of it, its
    choices; ``output_token_ids`` are taken for one choice only, and not for a beam search. Blocks
    of the KV cache are shared between requests of the same ``cache_salt``. With ``pooling`` it asks
    for the prompt's embedding, or the numbers of its labels, instead of tokens. Whoever added a
    ``watched`` one may end it at any of its tokens. One with an ``adapter`` waits until that is
    loaded, while others go on; ``cache_salt`` says which one, too. ``prediction_token_ids`` are
    what its completions may be, for the most part: they change no token, and may save time.
    ``kv_source`` has the leading blocks of its tokens: those that are not here are pulled from
    there before it is admitted, if that is predicted to be faster than to compute them. One that
    ``warms`` ends then, without a token: another will go on from there. Grammars of a ``tenant``
    are compiled within its share of the time.
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
    """What one step made for one choice of a request.

    ``token_ids`` are new ones only, the stop token included. ``prompt_logprobs``, if asked for,
    come once, with the first token of choice 0: one entry a token of the prompt, None for its
    first. ``started`` is true in the first output of a choice, which comes when it is admitted
    into the batch; it also says for how long it waited in the engine before that, ``queued_s``,
    and how many tokens of the prompt were found
    in the KV cache, ``num_cached_tokens``, ``num_pulled_tokens`` of which came from another
    worker's for this request, the last of them ``pulled_s`` after the engine got it. The last
    output of a choice has either ``finish_reason`` or ``error`` as (code, message),
    ``num_preemptions``, and ``device_us``, what the choice took of the device; ``owes``: a step
    that it had a part in is not over yet, so a ``DeviceTime`` follows. A request is over when each
    of its choices 0 … n - 1 has had its last output, or with one error of choice 0 if it was
    refused; a cancelled request has no last output, only a ``DeviceTime``. The choices of a beam
    search have one output each, all of them with the same step, the best first, with all tokens and
    their ``cumulative_logprob``; an output without anything says before that that it has chosen its
    first tokens, and what it took of the device is that of choice 0. ``embedding`` ([hidden_size],
    in float32, as pooled: scaling it to length 1 is the caller's; [num_labels] before any
    activation, for ``CLASSIFY``) comes in the last output of a request with ``pooling``, which
    makes no tokens. ``resampled``: from here on other tokens are drawn than the seed would have
    given. ``num_proposed_tokens`` were computed beside these, in case they should be the next, of
    which ``num_accepted_tokens`` were.
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
    """What a choice of a request has taken of the device so far, in all. With ``over`` that is the
    last word: it was cancelled, or it owed this since its last output."""

    request_id: str
    choice: int
    device_us: float
    over: bool = False


class PrefixChanges(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What came into the prefix cache and what left it, as the first ``REPORTED_BYTES`` of keys
    (``schemas.prefix``), one behind the other.

    ``added`` also names keys that were there before and were used again; the most recently used
    come last. With ``whole`` it is all there is.
    """

    added: bytes = b""
    removed: bytes = b""
    whole: bool = False


class RunnerFigures(NamedTuple):
    """Counters of a runner since its start: how often rank 0 of a group met the other ranks, with
    how many bytes, and for how long it waited for them; and how often each expert of a mixture was
    chosen for a row, over all layers that rank 0 has."""

    num_exchanges: int = 0
    num_exchanged_bytes: int = 0
    exchange_wait_s: float = 0.0
    expert_choices: tuple[int, ...] = ()


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges, and counters since the start.

    ``outstanding_tokens`` is the work left if nothing stops early: for every live request, the
    tokens of prompt and longest completion whose keys and values are not computed yet;
    ``outstanding_prompt_tokens`` of them are known, and will be prefilled unless they are found in
    the cache; those that are on their way from other workers, a disk or an object store are not
    among these, but ``outstanding_pull_tokens``. ``prefill_tokens_per_s`` and ``decode_step_ms``
    are those of the last steps (0: nothing was measured yet).
    ``max_num_sequences`` can run at a time.
    ``prefill_tokens`` and ``decode_tokens`` count computed tokens; recomputation after a
    preemption counts as prefill. Of ``proposed_tokens`` that were computed besides, in case they
    should be the next, ``accepted_tokens`` were, and count as decoded. ``busy_s`` is the time
    during which a step that runs the model was under way, from its launch until what it made was
    handed over; ``charged_s`` of it has been shared among the requests.

    Free blocks are those that can be allocated; ``num_idle_blocks`` of them are cached. Of
    ``prefix_query_tokens`` that admitted sequences looked for in the cache, ``prefix_hit_tokens``
    were there: ``host_hit_tokens`` in host memory, ``disk_hit_tokens``, ``object_hit_tokens`` and
    ``peer_hit_tokens`` came from a disk, an object store or another worker for them, the others
    were on the device; ``num_evicted_blocks`` were cached until their memory was needed. Of
    ``num_host_blocks`` that fit host memory, ``num_used_host_blocks`` are in use;
    ``num_offloaded_blocks`` were copied there, ``num_reloaded_blocks`` back, and ``num_swaps`` of
    the preemptions kept their work so. Of ``num_disk_blocks`` that fit the file on disk,
    ``num_used_disk_blocks`` are in use; ``num_written_blocks`` were put there, ``num_read_blocks``
    came back and ``num_unreadable_blocks`` did not. In an object store
    ``num_object_written_blocks`` were put, and ``num_object_read_blocks`` came from it;
    ``num_absent_objects`` times there was nothing, ``num_object_failures`` times a request failed
    or brought something else, ``num_object_dropped_blocks`` were not written for that or for want
    of time, and it is left alone for a while after it failed. From other workers' engines
    ``num_pulled_blocks`` came, in ``num_pulled_bytes``, ``num_failed_pulls`` times what was asked
    for did not and was computed, and ``num_served_blocks`` went to them. ``adapters`` are in the
    ``max_adapters`` slots, and the last that were loaded took ``adapter_load_ms`` each;
    ``num_adapter_loads`` were, and ``num_adapter_evictions`` made room for others.
    ``num_exchanges`` and what follows are ``RunnerFigures``.
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
    """The model computed NaN or infinite logits for this sequence."""

    def __init__(self, token_index: int) -> None:
        super().__init__(
            f"The model's logits for token {token_index} of the completion are not finite; the "
            f"checkpoint's weights or its dtype may be at fault."
        )
        self.token_index = token_index


class NonFiniteEmbeddingError(MillraceError, code="non_finite_embedding"):
    """The model computed NaN or infinite hidden states for this sequence."""

    def __init__(self) -> None:
        super().__init__(
            "The model's hidden states for this prompt are not finite; the checkpoint's weights or "
            "its dtype may be at fault."
        )


class DeviceLostError(BaseException):
    """The device has failed, and nothing that this process asks of it will be done any more.

    No error of one request: it ends the process, in whose place another one is started.
    """

"""Engines that can run a model, and their capabilities."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import msgspec

from millrace.schemas.errors import ConfigError, ParameterError
from millrace.schemas.pooling import Pooling
from millrace.schemas.sampling import GrammarKind, SamplingOptions

# Formats to which weights can be quantized at load.
QUANTIZATIONS = ("int8", "int4", "fp8")
# Sources of proposed tokens. ``ngram``: earlier text, the grammar's forced tokens and the request's
# prediction. ``draft`` and ``eagle3`` add the checkpoint of a smaller model or an EAGLE-3 head at a
# path. ``off``: no speculation.
SPECULATIONS = ("ngram", "draft=PATH", "eagle3=PATH", "off")
DRAFT_PREFIX = "draft="
EAGLE3_PREFIX = "eagle3="
# Folder of the draft model inside a checkpoint that contains one.
DRAFT_FOLDER = "draft"
_ALLOWED = "allowed_token_ids"
_BEAMS = "use_beam_search"
_REASONS = {
    "n": "makes one completion per request",
    _BEAMS: "has no beam search",
    "grammar": "holds no answer to a schema, a pattern or a demanded tool call",
}


class EngineKind(StrEnum):
    """Engine of a worker. ``real`` is Millrace's own, ``simulated`` computes nothing, ``custom`` is
    a class written by the user; the other kinds drive a third-party server."""

    REAL = "real"
    SIMULATED = "simulated"
    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"
    OPENAI = "openai"
    TGI = "tgi"
    TRTLLM = "trtllm"
    CUSTOM = "custom"


# The start options of these engines decide their devices.
_WITHOUT_GROUPS = frozenset({EngineKind.LLAMACPP, EngineKind.OPENAI, EngineKind.CUSTOM})


class WorkerRole(StrEnum):
    """Preferred work of a worker. ``prefill`` workers compute long prompts, and the streams
    continue at ``decode`` workers. Each does the other's work if no other worker is available."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class CostMethod(StrEnum):
    """Method of measuring a request's device time. STEPS: each step is measured and shared by the
    work in it. TOKENS: the server's busy time is shared by the tokens that it computed meanwhile.
    """

    STEPS = "steps"
    TOKENS = "tokens"


class EnginePromises(msgspec.Struct, frozen=True, kw_only=True):
    """Guarantees of an engine for its streams.

    ``exact_token_ids``: token ids and their indexes are the engine's own; otherwise they are made
    by tokenizing its text, and the server counts ``max_tokens`` by its own tokens.
    ``takes_token_ids``: the engine takes token ids of prompts and earlier tokens; otherwise it gets
    their text. ``continues_sampling``: after the engine died, a sampled stream continues with the
    tokens that it would have had; otherwise with other tokens, at the same index.
    ``continues_grammars``: a stream with a grammar continues within its grammar.
    ``reasons_before_grammars``: a model's thoughts come before the text that the grammar
    constrains; otherwise a request with a grammar has no thoughts. ``bounds_reasoning``: the engine
    makes a model end its thoughts at a budget; otherwise a budget is not enforced, and no request
    is refused for it. ``unsupported`` are the fields of the sampling parameters, and ``pooling``,
    that the engine refuses; ``grammars`` are the kinds of grammar that it takes.
    """

    exact_token_ids: bool = True
    takes_token_ids: bool = True
    continues_sampling: bool = False
    continues_grammars: bool = False
    reasons_before_grammars: bool = False
    bounds_reasoning: bool = False
    cost_method: CostMethod = CostMethod.TOKENS
    unsupported: frozenset[str] = frozenset()
    grammars: frozenset[GrammarKind] = frozenset(GrammarKind)


# Only Millrace's own engine supports these. Log-probabilities of some servers are of texts, not
# ids.
_OWN = frozenset({"pooling", "n", _BEAMS})
_LOGPROBS = frozenset({"logprobs", "prompt_logprobs"})
# Unsupported by servers that take text: parameters given by token id, as their ids are not the
# engine's.
_BY_TOKEN_IDS = (
    *("grammar", "bad_words", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("skip_special_tokens", "top_k", "min_p", "typical_p", _ALLOWED),
)

PROMISES: dict[EngineKind, EnginePromises] = {
    EngineKind.REAL: EnginePromises(
        continues_sampling=True,
        continues_grammars=True,
        reasons_before_grammars=True,
        bounds_reasoning=True,
        cost_method=CostMethod.STEPS,
    ),
    EngineKind.SIMULATED: EnginePromises(
        continues_sampling=True,
        cost_method=CostMethod.STEPS,
        unsupported=_OWN | _LOGPROBS | {"grammar", "logit_bias", "bad_words", _ALLOWED},
        grammars=frozenset(),
    ),
    EngineKind.VLLM: EnginePromises(continues_grammars=True, unsupported=_OWN | {"typical_p"}),
    EngineKind.SGLANG: EnginePromises(
        continues_grammars=True,
        unsupported=_OWN | _LOGPROBS | {"typical_p", "bad_words", _ALLOWED},
    ),
    # Its presence and frequency penalties also count the prompt, which differs from the request's.
    EngineKind.LLAMACPP: EnginePromises(
        unsupported=_OWN
        | {"prompt_logprobs", "bad_words", "min_tokens", _ALLOWED}
        | {"presence_penalty", "frequency_penalty"},
        continues_grammars=True,
    ),
    EngineKind.OPENAI: EnginePromises(
        exact_token_ids=False,
        takes_token_ids=False,
        unsupported=_OWN | _LOGPROBS | {*_BY_TOKEN_IDS, "repetition_penalty"},
        grammars=frozenset(),
    ),
    # Its frequency penalty has another formula.
    EngineKind.TGI: EnginePromises(
        exact_token_ids=False,
        takes_token_ids=False,
        unsupported=_OWN
        | _LOGPROBS
        | {*_BY_TOKEN_IDS, "logit_bias", "presence_penalty", "frequency_penalty"},
        grammars=frozenset(),
    ),
    EngineKind.TRTLLM: EnginePromises(
        unsupported=_OWN
        | _LOGPROBS
        | {"grammar", "bad_words", "min_tokens", "typical_p", _ALLOWED}
        | {"repetition_penalty", "presence_penalty", "frequency_penalty"},
        grammars=frozenset(),
    ),
    # A custom engine refuses unsupported parameters itself, except answers that come all at once.
    EngineKind.CUSTOM: EnginePromises(unsupported=frozenset({_BEAMS})),
}


def can_hold_calls(kind: EngineKind) -> bool:
    """Return whether an engine of this kind holds tool calls to their schemas if the answer may
    also be text.

    Capabilities of custom engines are unknown, so they get a grammar only if the request demands
    one.
    """
    return kind is not EngineKind.CUSTOM and GrammarKind.EBNF in PROMISES[kind].grammars


def check_quantization(quantization: str | None, kind: EngineKind) -> None:
    """Raise ConfigError for a quantization that is unknown or unsupported by this kind of
    engine."""
    if quantization is None:
        return
    if quantization not in QUANTIZATIONS:
        raise ConfigError(
            f"quantization is {quantization!r:.80}; choose {', '.join(QUANTIZATIONS)}, or leave it "
            "out to take the weights as the checkpoint has them."
        )
    if kind is not EngineKind.REAL:
        raise ConfigError(
            f"quantization: {quantization} is for Millrace's own engine, and {kind} runs this "
            "model: leave it out, and quantize by that engine's own means, such as "
            "--engine-arguments."
        )


def draft_of(speculation: str | bool | None) -> str | None:
    """Return the path of the draft's checkpoint; None without a draft."""
    return _path_behind(DRAFT_PREFIX, speculation)


def eagle3_of(speculation: str | bool | None) -> str | None:
    """Return the path of the EAGLE-3 head's checkpoint; None without a head."""
    return _path_behind(EAGLE3_PREFIX, speculation)


def with_path(speculation: str, absolute: Callable[[str], str]) -> str:
    """Return ``speculation`` with its path, if any, replaced by ``absolute(path)``."""
    for prefix in (DRAFT_PREFIX, EAGLE3_PREFIX):
        path = _path_behind(prefix, speculation)
        if path is not None:
            return prefix + absolute(path)
    return speculation


def _path_behind(prefix: str, speculation: str | bool | None) -> str | None:
    if not isinstance(speculation, str) or not speculation.startswith(prefix):
        return None
    return speculation.removeprefix(prefix) or None


def _names_path(speculation: str | bool | None) -> bool:
    return draft_of(speculation) is not None or eagle3_of(speculation) is not None


def speculation_option(text: str) -> str:
    """Parse an option for speculation and make its path absolute. Raises ValueError."""
    if text not in ("ngram", "off") and not _names_path(text):
        raise ValueError(text)
    return with_path(text, lambda path: str(Path(path).expanduser().resolve()))


def check_speculation(speculation: str | bool | None, kind: EngineKind) -> None:
    """Raise ConfigError for a speculation that is unknown or unsupported by this kind of engine.

    False is YAML's reading of a bare ``off``.
    """
    if speculation is None or speculation is False:
        return
    if speculation not in ("ngram", "off") and not _names_path(speculation):
        raise ConfigError(
            f"speculation is {speculation!r:.80}; choose {', '.join(SPECULATIONS)}, or leave it "
            "out for the default, which does not change the tokens."
        )
    if speculation != "off" and kind is not EngineKind.REAL:
        raise ConfigError(
            f"speculation: {speculation} is for Millrace's own engine, and {kind} runs this model: "
            "leave it out, and have that engine speculate by its own means, such as "
            "--engine-arguments."
        )


def check_parallel(tensor: int, pipeline: int, experts: bool, kind: EngineKind) -> None:
    """Raise ConfigError for a group of devices that is impossible or unsupported by this kind of
    engine."""
    if tensor < 1:
        raise ConfigError(f"tensor parallelism needs at least 1 device, got {tensor}.")
    if pipeline < 1:
        raise ConfigError(f"a pipeline needs at least 1 stage, got {pipeline}.")
    if pipeline > 1 and kind is not EngineKind.REAL:
        raise ConfigError(
            f"{kind} runs this model, and a pipeline of {pipeline} stages is for Millrace's own "
            "engine: leave it out, and have that engine do so by its own means, such as "
            "--engine-arguments."
        )
    if experts and tensor == 1:
        raise ConfigError(
            "expert parallelism is over the devices of tensor parallelism, and there is 1: say of "
            "how many."
        )
    if tensor > 1 and kind in _WITHOUT_GROUPS:
        raise ConfigError(
            f"{kind} runs this model, and cannot be told to do so on {tensor} devices: leave "
            "tensor parallelism out."
        )
    if experts and kind is EngineKind.TGI:
        raise ConfigError("tgi runs this model, and has no expert parallelism: leave it out.")


def check_remote_stages(number: int, kind: EngineKind) -> None:
    """Raise ConfigError for remote stages if this kind of engine does not support them."""
    if number and kind is not EngineKind.REAL:
        raise ConfigError(
            f"{kind} runs this model, and stages on other hosts are of Millrace's own engine: "
            "leave engine.remote_stages out."
        )


def check_transfer(transfer: bool | None, address: str, kind: EngineKind) -> None:
    """Raise ConfigError for KV block exchange if this kind of engine does not support it."""
    if (transfer or address) and kind is not EngineKind.REAL:
        raise ConfigError(
            f"engine.{'transfer' if transfer else 'transfer_address'} is for Millrace's own "
            f"engine, and {kind} runs this model: leave it out."
        )


def check_supported(
    sampling: SamplingOptions,
    pooling: Pooling | None,
    kind: EngineKind,
    promises: EnginePromises | None = None,
) -> None:
    """Raise ParameterError, naming the field, for a parameter that the engine does not support.

    ``promises`` are the engine's own capabilities; None: those of its kind.
    """
    promises = promises or PROMISES[kind]
    given = {name for name in promises.unsupported - {"pooling"} if sampling.asks_for(name)}
    if pooling is not None and "pooling" in promises.unsupported:
        raise ParameterError(
            "model",
            f"The {kind} engine of this model makes no embeddings, scores or labels; name a model "
            "of Millrace's own engine.",
        )
    if given:
        name = _BEAMS if _BEAMS in given else min(given)
        why = _REASONS.get(name, f"cannot honour {name}")
        raise ParameterError(name, f"The {kind} engine of this model {why}; leave {name} out.")
    grammar = sampling.grammar
    if grammar is not None and grammar.kind not in promises.grammars:
        raise ParameterError(
            "grammar",
            f"The {kind} engine of this model takes no grammar of kind {grammar.kind}; it takes "
            f"{', '.join(sorted(promises.grammars)) or 'none'}.",
        )

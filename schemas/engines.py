"""Which engines can run a model, and what each of them can promise."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import msgspec

from millrace.schemas.errors import ConfigError, ParameterError
from millrace.schemas.pooling import Pooling
from millrace.schemas.sampling import GrammarKind, SamplingOptions

# What wide weights can be rounded to when they are loaded.
QUANTIZATIONS = ("int8", "int4", "fp8")
# What proposes tokens: what was met before, what a grammar forces and a request predicts; and,
# where that has nothing, the smaller checkpoint or the EAGLE-3 head at a path; or nothing does.
SPECULATIONS = ("ngram", "draft=PATH", "eagle3=PATH", "off")
DRAFT_PREFIX = "draft="
EAGLE3_PREFIX = "eagle3="
# The folder of a checkpoint in which its draft is, if it brings one.
DRAFT_FOLDER = "draft"
_ALLOWED = "allowed_token_ids"
_BEAMS = "use_beam_search"
_REASONS = {
    "n": "makes one completion of a request",
    _BEAMS: "makes no beam search",
    "grammar": "holds no answer to a schema, a pattern or a demanded tool call",
}


class EngineKind(StrEnum):
    """The engine of a worker: ``real`` is Millrace's own, ``simulated`` computes nothing,
    ``custom`` is a class that the user wrote, the others drive a server that somebody else
    wrote."""

    REAL = "real"
    SIMULATED = "simulated"
    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMACPP = "llamacpp"
    OPENAI = "openai"
    TGI = "tgi"
    TRTLLM = "trtllm"
    CUSTOM = "custom"


# What devices these use is settled where they are started.
_WITHOUT_GROUPS = frozenset({EngineKind.LLAMACPP, EngineKind.OPENAI, EngineKind.CUSTOM})


class WorkerRole(StrEnum):
    """What a worker is preferred for: ``prefill`` computes long prompts, whose streams go on at one
    of ``decode``; each takes the other's work where there is nobody else."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class CostMethod(StrEnum):
    """How a request's device time is known: each step measured and shared by the work in it, or
    the time that the server was busy shared by the tokens that it computed meanwhile."""

    STEPS = "steps"
    TOKENS = "tokens"


class EnginePromises(msgspec.Struct, frozen=True, kw_only=True):
    """What streams of an engine can rely on.

    ``exact_token_ids``: token ids and their indexes are the engine's own; otherwise they are made
    anew from its text, and it counts ``max_tokens`` by its own. ``takes_token_ids``: so it does
    with those of prompts and of what was made before; otherwise it gets their text.
    ``continues_sampling``: after the engine died, a sampled stream goes on with the tokens that it
    would have had; otherwise with others, at the same index. ``continues_grammars``: and one with a
    grammar goes on within it. ``reasons_before_grammars``: a model's thoughts come before what its
    grammar holds for; otherwise it has none with a grammar.
    ``bounds_reasoning``: it makes a model end its thoughts at a budget; otherwise a budget is not
    enforced, and no request is refused for it.
    ``unsupported`` are the fields of the sampling parameters, and ``pooling``, that it refuses;
    ``grammars`` those kinds that it takes.
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


# What only Millrace's own engine does; log-probabilities of some servers are of texts, not of ids.
_OWN = frozenset({"pooling", "n", _BEAMS})
_LOGPROBS = frozenset({"logprobs", "prompt_logprobs"})
# What a server that takes texts cannot do; what is told by token ids, which are not its own here.
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
    # Its penalties of presence and frequency count the prompt, too, which is not what is asked.
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
    # Its penalty of frequency is computed otherwise.
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
    # Such an engine refuses by itself what it cannot do, but for answers that come all at once.
    EngineKind.CUSTOM: EnginePromises(unsupported=frozenset({_BEAMS})),
}


def can_hold_calls(kind: EngineKind) -> bool:
    """Whether an engine of this kind holds tool calls to their schemas where the answer may also be
    text. Nothing is known of custom engines, so these get a grammar only if the request demands
    one."""
    return kind is not EngineKind.CUSTOM and GrammarKind.EBNF in PROMISES[kind].grammars


def check_quantization(quantization: str | None, kind: EngineKind) -> None:
    """Raise ConfigError for a quantization at load that there is not, or that an engine of this
    kind does not have."""
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
    """The path of the draft's checkpoint; None without one."""
    return _path_behind(DRAFT_PREFIX, speculation)


def eagle3_of(speculation: str | bool | None) -> str | None:
    """The path of the EAGLE-3 head's checkpoint; None without one."""
    return _path_behind(EAGLE3_PREFIX, speculation)


def with_path(speculation: str, absolute: Callable[[str], str]) -> str:
    """The same, with the path that it names, if any, as ``absolute`` makes it."""
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
    """What an option says, with the path in it as it is from any folder. Raises ValueError."""
    if text not in ("ngram", "off") and not _names_path(text):
        raise ValueError(text)
    return with_path(text, lambda path: str(Path(path).expanduser().resolve()))


def check_speculation(speculation: str | bool | None, kind: EngineKind) -> None:
    """Raise ConfigError for a speculation that there is not, or that an engine of this kind does
    not have. False is how YAML reads a bare off."""
    if speculation is None or speculation is False:
        return
    if speculation not in ("ngram", "off") and not _names_path(speculation):
        raise ConfigError(
            f"speculation is {speculation!r:.80}; choose {', '.join(SPECULATIONS)}, or leave it "
            "out to have tokens proposed where that changes none."
        )
    if speculation != "off" and kind is not EngineKind.REAL:
        raise ConfigError(
            f"speculation: {speculation} is for Millrace's own engine, and {kind} runs this model: "
            "leave it out, and have that engine speculate by its own means, such as "
            "--engine-arguments."
        )


def check_parallel(tensor: int, pipeline: int, experts: bool, kind: EngineKind) -> None:
    """Raise ConfigError for a group of devices that there cannot be, or that an engine of this kind
    does not make."""
    if tensor < 1:
        raise ConfigError(f"tensor parallelism is over {tensor} devices; it takes 1 or more.")
    if pipeline < 1:
        raise ConfigError(f"a pipeline is of {pipeline} stages; it takes 1 or more.")
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
    """Raise ConfigError for stages on other hosts that an engine of this kind does not have."""
    if number and kind is not EngineKind.REAL:
        raise ConfigError(
            f"{kind} runs this model, and stages on other hosts are of Millrace's own engine: "
            "leave engine.remote_stages out."
        )


def check_transfer(transfer: bool | None, address: str, kind: EngineKind) -> None:
    """Raise ConfigError for blocks of a KV cache that an engine of this kind is to exchange with
    others, but does not."""
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
    """Raise ParameterError, naming the field, for what an engine of this kind cannot do, or what it
    does not promise where it has ``promises`` of its own."""
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

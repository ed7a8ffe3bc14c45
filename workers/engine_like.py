"""What a worker asks of an engine, whoever wrote it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from schemas.engines import PROMISES, EngineKind
from schemas.errors import MillraceError, ParameterError
from schemas.sampling import SamplingParams
from workers.engine.types import (
    DeviceTime,
    EngineOutput,
    EngineRequest,
    EngineStats,
    PrefixChanges,
)

OnOutputs = Callable[[list[EngineOutput], EngineStats], None]
OnPrefixes = Callable[[PrefixChanges], None]
OnDeviceTimes = Callable[[list[DeviceTime]], None]

_DEFAULTS = SamplingParams()
_REASONS = {"pooling": "makes no embeddings", "n": "makes one completion of a request"}


class EngineFailedError(MillraceError, code="engine_failed", retryable=True):
    """The engine ended, or could not load the model; the message says why."""


class EngineLike(ABC):
    """An engine as the worker sees it. ``tests/workers/conformance.py`` checks these promises for
    every engine; ``docs/engines.md`` shows how to write one.

    1. **Configure.** The class method that starts it takes the model and ``worker.engine``. A
       setting that it cannot honour is a ConfigError, before anything runs.
    2. **Load.** It awaits the weights. An engine that dies meanwhile, or takes longer than it may,
       raises EngineFailedError with the reason, and leaves no process behind.
    3. **Ready.** From here on ``stats`` and ``device_uuid`` are true, and requests are taken.
    4. **Add and cancel.** Neither blocks nor raises. A request that the engine cannot serve is
       answered by an output with ``error``; one that is added under an id that runs replaces it.
       After ``cancel`` the request's slot and cache are free before the next step, and its device
       time is reported once, with ``over``.
    5. **Stream.** ``on_outputs`` gets what was made, in order: each token of a request once, at the
       index behind those before it, ``output_token_ids`` included. A request ends with exactly one
       output that has ``finish_reason`` or ``error``. ``on_prefixes`` gets what changed in the
       prefix cache, ``on_device_times`` what requests have taken of the device: the last word for
       each that was cancelled, and now and then how things stand. They are called on the event
       loop, never from ``add`` or ``cancel``, and must not block.
    6. **Stats.** ``stats`` costs nothing to read; its counters never fall while the engine lives.
    7. **Drain.** Who adds nothing more sees every request end by itself, and ``stats`` at rest.
    8. **Close.** Ends everything that the engine owns, at once; no callback comes after it.
       ``wait_closed`` returns then, or when the engine has ended by itself, with why. What ran is
       lost, and may be added to the next engine with the tokens that it had as
       ``output_token_ids``.
    """

    def __init__(self) -> None:
        self.on_outputs: OnOutputs = ignore
        self.on_prefixes: OnPrefixes = ignore
        self.on_device_times: OnDeviceTimes = ignore
        self.device_uuid = ""
        """The CUDA device's, by which its driver knows it; empty without one."""

    @property
    @abstractmethod
    def stats(self) -> EngineStats:
        """As of the last step."""

    @abstractmethod
    def add(self, request: EngineRequest) -> None:
        """Generate for a request."""

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """Stop a request; outputs of a step that runs now may still come."""

    @abstractmethod
    async def wait_closed(self) -> str:
        """Returns when the engine has ended, with why."""

    @abstractmethod
    async def close(self) -> None:
        """End the engine; what runs in it is lost."""


def check_supported(request: EngineRequest, kind: EngineKind) -> None:
    """Raise ParameterError, naming the field, for what an engine of this kind cannot do."""
    promises, sampling = PROMISES[kind], request.sampling
    given = {
        name
        for name in promises.unsupported - {"pooling"}
        if getattr(sampling, name) != getattr(_DEFAULTS, name)
    }
    if request.pooling is not None and "pooling" in promises.unsupported:
        given.add("pooling")
    if given:
        name = min(given)
        why = _REASONS.get(name, f"cannot honour {name}")
        raise ParameterError(name, f"The {kind} engine of this model {why}; leave {name} out.")
    grammar = sampling.grammar
    if grammar is not None and grammar.kind not in promises.grammars:
        raise ParameterError(
            "grammar",
            f"The {kind} engine of this model takes no grammar of kind {grammar.kind}; it takes "
            f"{', '.join(sorted(promises.grammars)) or 'none'}.",
        )


def ignore(*_: object) -> None:
    """A callback of an engine that has no worker yet."""

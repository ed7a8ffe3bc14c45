"""Delay of a tenant's new grammar behind another tenant's slowly compiled grammars.

    python -m benchmarks.engine --only grammars [--slow 24] [--helpers 2]

The engine runs the demo model. Tenant a sends ``--slow`` grammars at once, each of which takes
nearly the compile time limit of one grammar (``accepted``) or more (``refused``). Then tenant b
sends a small new grammar; it also does so while the engine is idle (``alone``). A time is from the
request to the engine's first output for it. The goal: behind either kind, b waits at most 0.25 s
longer than alone.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineRequest
from millrace.registry.catalogue import load_catalogue
from millrace.schemas.config import EngineConfig
from millrace.schemas.sampling import Grammar, GrammarKind, SamplingParams

_GOAL_S = 0.25
# Multiples of these numbers compile slowly: the first within the limit, the others beyond it.
_ACCEPTED_FROM = 50_001
_REFUSED_FROM = 200_001
_numbers = itertools.count()


def _slow(first: int, count: int) -> Iterator[Grammar]:
    for number in range(first, first + 2 * count, 2):
        text = json.dumps({"type": "integer", "multipleOf": number})
        yield Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)


def _small() -> Grammar:
    """Return a new grammar."""
    return Grammar(kind=GrammarKind.REGEX, text=f"[ab]{{1,6}}{next(_numbers)}")


def _request(tenant: str, grammar: Grammar) -> EngineRequest:
    return EngineRequest(
        request_id=f"{tenant}-{next(_numbers)}",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=2, seed=0, grammar=grammar),
        tenant=tenant,
    )


def _ask(engine: Engine, tenant: str, grammars: Iterable[Grammar]) -> dict[str, float]:
    """Add a request for each grammar; return the time of adding by request id."""
    added_s = {}
    for grammar in grammars:
        request = _request(tenant, grammar)
        added_s[request.request_id] = time.perf_counter()
        engine.add(request)
    return added_s


def _waits_s(engine: Engine, added_s: dict[str, float]) -> dict[str, float]:
    """Run the engine until it is idle; return each request's time to first token in seconds."""
    waits_s: dict[str, float] = {}
    while engine.has_work:
        for output in engine.step():
            waited_s = time.perf_counter() - added_s[output.request_id]
            waits_s.setdefault(output.request_id, waited_s)
    return waits_s


def _behind(engine: Engine, slow: Iterable[Grammar]) -> tuple[float, float]:
    """Return the seconds that tenant b waited, and those of tenant a's last request."""
    added_s = _ask(engine, "a", slow)
    (own,) = other = _ask(engine, "b", [_small()])
    waits_s = _waits_s(engine, added_s | other)
    return waits_s[own], max(waits_s.values())


def _alone_s(engine: Engine) -> float:
    (wait_s,) = _waits_s(engine, _ask(engine, "b", [_small()])).values()
    return wait_s


def run(slow: int = 24, helpers: int = 2) -> None:
    """Give tenant a ``slow`` grammars; ``helpers`` is engine.grammar_helpers."""
    path = Path(load_catalogue("").get("demo").source)
    engine = Engine.load(path, EngineConfig(device="cpu", grammar_helpers=helpers))
    _alone_s(engine)  # starts the helpers
    alone_s = _alone_s(engine)
    print(f"{'alone':9} b {alone_s:6.3f} s")
    for name, first in (("accepted", _ACCEPTED_FROM), ("refused", _REFUSED_FROM)):
        wait_s, last_s = _behind(engine, _slow(first, slow))
        verdict = "met" if wait_s - alone_s <= _GOAL_S else "missed"
        print(f"{name:9} b {wait_s:6.3f} s   last of a {last_s:6.2f} s   goal {verdict}")

"""Compiler of the grammars of waiting sequences, on threads of its own, with a cache."""

from __future__ import annotations

import collections
import functools
import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from typing import NamedTuple

from millrace.engine.grammar.library import COMPILE_STACK_BYTES, Matcher
from millrace.engine.grammar.reasoning import ReasoningMatcher, ReasoningMatchers
from millrace.engine.step.sequence import Sequence, SequenceState
from millrace.engine.threads.tasks import FairTasks, TaskThreads
from millrace.engine.types import EngineRequest
from millrace.schemas.errors import GrammarError
from millrace.schemas.sampling import Grammar, SamplingParams

MAX_CACHED_GRAMMARS = 128

_log = logging.getLogger(__name__)


class Settled(NamedTuple):
    """Request that ends before its first step here.

    Its grammar cannot be followed (``error``), or the tokens delivered before were already
    complete.
    """

    sequence: Sequence
    error: GrammarError | None


class _Kept(NamedTuple):
    """Cache entry: a grammar's matcher at its start, or the error.

    ``tenant`` requested it first.
    """

    tenant: str
    start: Future[Matcher]


class GrammarCompiler:
    """Compiler that gives each sequence a matcher of its own, and then makes it ready.

    ``compile_grammar`` makes a matcher at the start of a grammar, or raises GrammarError. It is
    called once for each grammar that is not in the cache. The cache holds ``MAX_CACHED_GRAMMARS``
    grammars, rejected ones included. When it is full, the tenant with the most grammars loses its
    least recently used one. Compilation runs on ``num_helpers`` threads, whose time tenants share;
    a cached grammar does not wait for them. ``on_settled`` is called on one of these threads when
    sequences are ready or over.
    """

    def __init__(
        self,
        compile_grammar: Callable[[Grammar], Matcher],
        with_reasoning: ReasoningMatchers,
        on_settled: Callable[[], None],
        num_helpers: int = 1,
    ) -> None:
        self._compile = compile_grammar
        self._with_reasoning = with_reasoning
        self._on_settled = on_settled
        self._helpers = FairTasks("grammar-compile", num_helpers, COMPILE_STACK_BYTES)
        self._quick = TaskThreads("grammar-start", 1, COMPILE_STACK_BYTES)
        self._lock = threading.Lock()
        self._cache: collections.OrderedDict[Grammar, _Kept] = collections.OrderedDict()
        self._settled: collections.deque[Settled] = collections.deque()

    def submit(self, choices: Rows[Sequence]) -> None:
        """Make the matchers of a request's choices, which are not ready until then.

        If the grammar is in the cache, this is done on return.
        """
        request = choices[0].request
        start = self._known(request.sampling)
        if start is not None and not request.output_token_ids and not start.complete:
            _give_matchers(choices, start)
            return
        for sequence in choices:
            sequence.ready = False
        task = functools.partial(self._prepare, choices)
        if self._must_compile(request.sampling.grammar):
            self._helpers.submit(request.tenant, task)
        else:
            self._quick.submit(task)

    def run_soon(self, task: Callable[[], None]) -> None:
        """Run another task of grammars on the thread that does not compile."""
        self._quick.submit(task)

    def pop_settled(self) -> list[Settled]:
        """Return the requests that are over, by their first choice, each once.

        Cancelled ones may be among them.
        """
        settled = []
        while self._settled:
            settled.append(self._settled.popleft())
        return settled

    def _prepare(self, choices: Rows[Sequence]) -> None:
        first = choices[0]
        request = first.request
        if first.state is SequenceState.FINISHED:
            return
        try:
            start = self._begin(request)
            start.accept(request.output_token_ids)
        except GrammarError as error:
            self._settled.append(Settled(first, error))
        except BaseException as error:  # noqa: BLE001 (a panic of the library is no Exception)
            _log.error("a grammar could not be prepared", exc_info=error)
            why = GrammarError(f"The grammar cannot be compiled: {type(error).__name__}.")
            self._settled.append(Settled(first, why))
        else:
            if start.complete:
                self._settled.append(Settled(first, None))
            else:
                _give_matchers(choices, start)
        self._on_settled()

    def _begin(self, request: EngineRequest) -> Matcher | ReasoningMatcher:
        """Make a matcher at the start, for the request's sampling parameters."""
        sampling, grammar = request.sampling, request.sampling.grammar
        inner = None if grammar is None else self._start_of(grammar, request.tenant).copy()
        if inner is not None and sampling.reasoning is None:
            return inner
        return self._with_reasoning(inner, sampling)

    def _known(self, sampling: SamplingParams) -> Matcher | None:
        """Return the cached matcher if it has compiled and the request needs nothing else."""
        grammar = sampling.grammar
        if grammar is None or sampling.reasoning is not None:
            return None
        with self._lock:
            known = self._cache.get(grammar)
            if known is None or not known.start.done() or known.start.exception() is not None:
                return None
            self._cache.move_to_end(grammar)
            return known.start.result()

    def _must_compile(self, grammar: Grammar | None) -> bool:
        """Return whether there is a grammar whose compilation has not ended."""
        if grammar is None:
            return False
        with self._lock:
            known = self._cache.get(grammar)
            return known is None or not known.start.done()

    def _start_of(self, grammar: Grammar, tenant: str) -> Matcher:
        """Return the compiled grammar. The first request for it compiles it; the others wait."""
        with self._lock:
            known = self._cache.get(grammar)
            if known is None:
                future: Future[Matcher] = Future()
                self._cache[grammar] = _Kept(tenant, future)
                if len(self._cache) > MAX_CACHED_GRAMMARS:
                    self._make_room()
            else:
                self._cache.move_to_end(grammar)
        if known is not None:
            return _result(known.start)
        try:
            future.set_result(self._compile(grammar))
        except GrammarError as error:
            future.set_exception(error)
        except BaseException as error:
            future.set_exception(error)
            with self._lock:
                self._cache.pop(grammar, None)
            raise
        return _result(future)

    def _make_room(self) -> None:
        """Evict the least recently used grammar of the tenant with the most grammars."""
        ((tenant, _),) = collections.Counter(k.tenant for k in self._cache.values()).most_common(1)
        del self._cache[next(g for g, kept in self._cache.items() if kept.tenant == tenant)]


def _give_matchers(choices: Rows[Sequence], start: Matcher | ReasoningMatcher) -> None:
    for sequence in choices:
        sequence.matcher = start.copy()
    # The planner waits for the first; the others start from it.
    for sequence in reversed(choices):
        sequence.ready = True


def _result(future: Future[Matcher]) -> Matcher:
    error = future.exception()
    if isinstance(error, GrammarError):
        # A new error each time, since a raised exception collects the frames that it passes.
        raise GrammarError(error.message)
    return future.result()

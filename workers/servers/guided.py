"""Grammars for servers that do not support them, or that cannot start in the middle of one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from millrace.engine.grammar.library import COMPILE_STACK_BYTES, GrammarLibrary, Matcher
from millrace.engine.grammar.probe import GrammarProbe
from millrace.engine.threads.tasks import FairTasks
from millrace.engine.types import EngineRequest
from millrace.registry.served import ServedModel
from millrace.schemas.errors import GrammarError, MillraceError
from millrace.schemas.sampling import Grammar
from millrace.workers.servers.dialect import ServerStreamError

# Number of single-token calls after a token that did not fit; doubled each time in a row.
_FIRST_SINGLES, _MOST_SINGLES = 1, 64
# Maximum number of remembered grammars.
_MAX_KNOWN = 256

_Result = TypeVar("_Result")


class Guide:
    """State of one completion in its grammar, and how to continue it from there.

    The server generates freely as long as its tokens fit. The first token that does not fit is
    drawn again among the allowed tokens. This gives the distribution of a server that masks from
    the beginning: p(t) + p(misfit) * p(t | fits) = p(t | fits).
    """

    def __init__(self, matcher: Matcher, num_words: int, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._ends = ends
        self._mask = np.zeros(num_words, dtype=np.int32)
        self._num_singles = 0
        self._next_singles = _FIRST_SINGLES

    @property
    def complete(self) -> bool:
        """True if the grammar is complete."""
        return self._matcher.complete

    @property
    def asks_for_one(self) -> bool:
        """True if the next token must be requested alone, from ``allowed``."""
        return self._num_singles > 0

    def allowed(self) -> npt.NDArray[np.int64]:
        """Return the ids of the tokens that may come next. Raises GrammarError if there is none."""
        self._matcher.fill_mask(self._mask.ctypes.data, len(self._mask))
        error = self._matcher.error
        if error is not None:
            raise error
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        found = np.flatnonzero(bits)
        if len(found) > 1 and self._ends:
            others = found[~np.isin(found, list(self._ends))]
            found = others if len(others) else found
        if not len(found):
            raise GrammarError("No token of this model continues the grammar.")
        return found

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance by the tokens that fit, and return their number."""
        num_fitting = 0
        for token_id in token_ids:
            if token_id in self._ends and not self._matcher.complete and self._has_others():
                break
            if self.complete or not self._matcher.fits(token_id):
                break
            self._matcher.accept((token_id,))
            num_fitting += 1
        self._note(len(token_ids), num_fitting)
        return num_fitting

    def _has_others(self) -> bool:
        return any(int(token_id) not in self._ends for token_id in self.allowed())

    def _note(self, num_tokens: int, num_fitting: int) -> None:
        if self._num_singles:
            self._num_singles -= num_fitting
        elif num_fitting < num_tokens and not self.complete:
            self._num_singles = self._next_singles
            self._next_singles = min(2 * self._next_singles, _MOST_SINGLES)
        elif num_fitting > 1:
            self._next_singles = _FIRST_SINGLES


class Guides:
    """Factory of guides for one model, with ``num_helpers`` threads that tenants share fairly.

    Owns its probe until ``close``.
    """

    def __init__(self, model: ServedModel, num_helpers: int = 1) -> None:
        self._model = model
        self._probe = GrammarProbe(num_helpers=num_helpers)
        self._threads = FairTasks("grammar-compile", num_helpers, COMPILE_STACK_BYTES)
        self._lock = threading.Lock()
        self._library: GrammarLibrary | None = None
        self._good: dict[Grammar, None] = {}

    async def start(self, request: EngineRequest, read: Grammar, token_ids: Sequence[int]) -> Guide:
        """Return a guide that has advanced by ``token_ids``.

        Args:
            request: the request with its grammar.
            read: the grammar as the server reads it. If ``token_ids`` do not fit, the request's own
                grammar is tried: they may come from an engine that reads it so.
            token_ids: the tokens of the completion so far.

        Raises:
            GrammarError: the grammar cannot be compiled.
            ServerStreamError: the tokens fit neither grammar.
        """
        grammar = request.sampling.grammar
        assert grammar is not None
        work = partial(self._compile, tuple(dict.fromkeys((read, grammar))), tuple(token_ids))
        matcher = await self._done(request.tenant, work)
        assert self._library is not None
        ends = frozenset(request.eos_token_ids) if request.sampling.ignore_eos else frozenset()
        return Guide(matcher, self._library.num_words, ends)

    async def check(self, grammar: Grammar, tenant: str) -> None:
        """Check that a tenant's grammar compiles without bringing the server down. Raises
        GrammarError.
        """
        if grammar in self._good:
            return
        await self._done(tenant, partial(self._probe.check, grammar))
        self._good[grammar] = None
        if len(self._good) > _MAX_KNOWN:
            del self._good[next(iter(self._good))]

    async def _done(self, tenant: str, work: Callable[[], _Result]) -> _Result:
        """Return the result of ``work``, run on a thread within the tenant's share."""
        done: Future[_Result] = Future()
        self._threads.submit(tenant, partial(_run, work, done))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """End running compilations."""
        self._probe.close()

    def _compile(self, grammars: Sequence[Grammar], token_ids: tuple[int, ...]) -> Matcher:
        with self._lock:
            if self._library is None:
                self._library = GrammarLibrary(self._model.tokenizer, self._model.vocab_size)
        for grammar in grammars:
            self._probe.check(grammar)
            matcher = self._library.compile(grammar)
            try:
                matcher.accept(token_ids)
            except GrammarError as error:
                why = error.message
            else:
                return matcher
        raise ServerStreamError(
            f"The engine's server reads the grammar differently from this worker, which cannot "
            f"continue after the server's tokens: {why}"
        )


def _run(work: Callable[[], _Result], done: Future[_Result]) -> None:
    """Run ``work`` on this thread, unless its result is no longer awaited."""
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(work())
    except MillraceError as error:
        done.set_exception(error)
    except BaseException as error:  # noqa: BLE001 (a panic of the library is no Exception)
        done.set_exception(GrammarError(f"The grammar cannot be compiled: {type(error).__name__}."))

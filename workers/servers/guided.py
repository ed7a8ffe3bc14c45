"""Grammars for servers that do not have them, or that cannot begin in the midst of one."""

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

# After a token that did not fit, so many are asked for one by one; doubled each time in a row.
_FIRST_SINGLES, _MOST_SINGLES = 1, 64
# Grammars that were tried are remembered.
_MAX_KNOWN = 256

_Result = TypeVar("_Result")


class Guide:
    """How far one completion is in its grammar, and how it is asked for from there.

    The server is left to itself as long as its tokens fit. The first that does not is drawn again
    among those that may come, which gives the distribution of a server that had masked the others
    from the beginning: p(t) + p(misfit) * p(t | fits) = p(t | fits).
    """

    def __init__(self, matcher: Matcher, num_words: int, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._ends = ends
        self._mask = np.zeros(num_words, dtype=np.int32)
        self._num_singles = 0
        self._next_singles = _FIRST_SINGLES

    @property
    def complete(self) -> bool:
        """Whether all that the grammar wants is there."""
        return self._matcher.complete

    @property
    def asks_for_one(self) -> bool:
        """Whether the next token is to be asked for alone, as one of ``allowed``."""
        return self._num_singles > 0

    def allowed(self) -> npt.NDArray[np.int64]:
        """The ids of the tokens that may come next. Raises GrammarError if there is none."""
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
            raise GrammarError("No token of this model goes on with the grammar.")
        return found

    def accept(self, token_ids: Sequence[int]) -> int:
        """Go on by the tokens that fit; how many these are."""
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
    """Makes guides for one model, on ``num_helpers`` threads whose time tenants share. Owns its
    probe until ``close``."""

    def __init__(self, model: ServedModel, num_helpers: int = 1) -> None:
        self._model = model
        self._probe = GrammarProbe(num_helpers=num_helpers)
        self._threads = FairTasks("grammar-compile", num_helpers, COMPILE_STACK_BYTES)
        self._lock = threading.Lock()
        self._library: GrammarLibrary | None = None
        self._good: dict[Grammar, None] = {}

    async def start(self, request: EngineRequest, read: Grammar, token_ids: Sequence[int]) -> Guide:
        """One that stands behind ``token_ids``: in ``read``, which is what the server makes of the
        request's grammar, or in that itself, if they come from an engine that reads it otherwise.
        Raises GrammarError for a grammar that cannot be compiled, ServerStreamError if none leads
        there."""
        grammar = request.sampling.grammar
        assert grammar is not None
        work = partial(self._compile, tuple(dict.fromkeys((read, grammar))), tuple(token_ids))
        matcher = await self._done(request.tenant, work)
        assert self._library is not None
        ends = frozenset(request.eos_token_ids) if request.sampling.ignore_eos else frozenset()
        return Guide(matcher, self._library.num_words, ends)

    async def check(self, grammar: Grammar, tenant: str) -> None:
        """Raise GrammarError for a tenant's grammar that cannot be compiled, or whose compiling
        would take the server down."""
        if grammar in self._good:
            return
        await self._done(tenant, partial(self._probe.check, grammar))
        self._good[grammar] = None
        if len(self._good) > _MAX_KNOWN:
            del self._good[next(iter(self._good))]

    async def _done(self, tenant: str, work: Callable[[], _Result]) -> _Result:
        """What comes of ``work``, which a thread does within the tenant's share."""
        done: Future[_Result] = Future()
        self._threads.submit(tenant, partial(_run, work, done))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """End what compiles."""
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
            f"The engine's server reads the grammar otherwise than this worker, which cannot go on "
            f"behind what it made: {why}"
        )


def _run(work: Callable[[], _Result], done: Future[_Result]) -> None:
    """Do it on this thread, unless nothing waits for it any more."""
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(work())
    except MillraceError as error:
        done.set_exception(error)
    except BaseException as error:  # noqa: BLE001 (a panic of the library is no Exception)
        done.set_exception(GrammarError(f"The grammar cannot be compiled: {type(error).__name__}."))

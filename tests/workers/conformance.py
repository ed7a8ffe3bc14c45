"""Conformance suite of every engine: the promises of ``workers.engine_like``.

A subclass names its ``kind``; the module-scoped fixture ``engine`` beside it yields a running
engine of it, inside of ``running``, which checks what holds at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

from millrace.engine.types import (
    DeviceTime,
    EngineOutput,
    EngineRequest,
    EngineStats,
    PrefixChanges,
)
from millrace.schemas.engines import PROMISES, EngineKind, EnginePromises
from millrace.schemas.errors import PrefixCacheKeptError
from millrace.schemas.frames import FinishReason
from millrace.schemas.pooling import Pooling
from millrace.schemas.prefix import REPORTED_BYTES, extend_keys, root_key
from millrace.schemas.sampling import Grammar, GrammarKind, SamplingParams
from millrace.workers.engine_like import EngineLike
from tests.support.waiting import eventually

PROMPT = tuple(range(20, 44))
_LONG_TOKENS = 100
_WITHIN_S = 60.0
_REFUSED: dict[str, Any] = {
    "logprobs": 1,
    "prompt_logprobs": 0,
    "logit_bias": {30: 1.0},
    "bad_words": ("x",),
    "min_tokens": 2,
    "ignore_eos": True,
    "stop_token_ids": (30,),
    "typical_p": 0.5,
    "top_k": 4,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "n": 2,
    "use_beam_search": True,
    "grammar": Grammar(kind=GrammarKind.JSON_OBJECT),
}


class Heard:
    """Recorder of an engine's reports."""

    def __init__(self, engine: EngineLike) -> None:
        self.outputs: list[EngineOutput] = []
        self.stats: list[EngineStats] = []
        self.times: list[DeviceTime] = []
        self.prefixes: list[PrefixChanges] = []
        self._news = asyncio.Event()
        engine.on_outputs = self._note
        engine.on_device_times = self.times.extend
        engine.on_prefixes = self.prefixes.append

    def _note(self, outputs: list[EngineOutput], stats: EngineStats) -> None:
        self.outputs += outputs
        self.stats.append(stats)
        self._news.set()

    def of(self, request_id: str) -> list[EngineOutput]:
        """Return the outputs of a request, in order."""
        return [output for output in self.outputs if output.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        """Return the tokens of a request, in order."""
        return [token for output in self.of(request_id) for token in output.token_ids]

    def end(self, request_id: str) -> EngineOutput | None:
        """Return the last output of a request, or None while it runs."""
        ends = [output for output in self.of(request_id) if output.finished]
        assert len(ends) <= 1
        assert not ends or self.of(request_id)[-1] is ends[0]
        return ends[0] if ends else None

    async def came(self, request_id: str, num_tokens: int) -> None:
        """Wait until the request has this many tokens, and return at once, before a quick engine
        ends it."""
        async with asyncio.timeout(_WITHIN_S):
            while len(self.tokens(request_id)) < num_tokens:
                self._news.clear()
                await self._news.wait()

    async def ended(self, *request_ids: str) -> None:
        """Wait until all of these requests are over."""
        await eventually(lambda: all(self.end(one) for one in request_ids), timeout_s=_WITHIN_S)


def request(
    request_id: str,
    prompt: tuple[int, ...] = PROMPT,
    output_token_ids: tuple[int, ...] = (),
    **sampling: Any,
) -> EngineRequest:
    """Return a greedy request that ends after 12 tokens unless ``sampling`` says otherwise."""
    usual: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "seed": 7}
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        output_token_ids=output_token_ids,
        sampling=SamplingParams(**usual | sampling),
    )


@asynccontextmanager
async def running(engine: EngineLike) -> AsyncIterator[EngineLike]:
    """Yield the engine, then close it; the engine must be silent afterwards."""
    try:
        yield engine
        heard = Heard(engine)
        engine.add(request("last", max_tokens=_LONG_TOKENS))
    finally:
        await engine.close()
    assert await asyncio.wait_for(engine.wait_closed(), _WITHIN_S)
    num_heard = len(heard.outputs)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(heard.outputs) == num_heard


@pytest.mark.asyncio(loop_scope="module")
class EngineConformance:
    """Conformance tests of an engine: see the module."""

    kind: ClassVar[EngineKind]
    promises: ClassVar[EnginePromises | None] = None
    has_prefix_cache: ClassVar[bool] = True

    async def test_it_is_ready(self, engine: EngineLike) -> None:
        stats = engine.stats
        assert stats.max_num_sequences >= 1
        assert stats.num_free_blocks <= stats.num_blocks
        assert stats.max_tokens_per_request >= len(PROMPT) + _LONG_TOKENS
        assert (stats.num_running, stats.num_waiting, stats.outstanding_tokens) == (0, 0, 0)

    async def test_a_request_gets_its_tokens_and_one_end(self, engine: EngineLike) -> None:
        heard = Heard(engine)
        engine.add(request("a"))
        await heard.ended("a")
        end = heard.end("a")
        assert end is not None
        assert end.error is None, end.error
        if self._promised().exact_token_ids:
            assert len(heard.tokens("a")) == 12 or end.finish_reason is FinishReason.STOP
        assert heard.tokens("a")
        assert [output.started for output in heard.of("a")].count(True) == 1
        assert heard.of("a")[0].started
        assert end.device_us > 0 or end.owes

    async def test_a_completion_goes_on_where_another_stopped(self, engine: EngineLike) -> None:
        heard = Heard(engine)
        engine.add(request("whole"))
        await heard.ended("whole")
        tokens = heard.tokens("whole")
        engine.add(request("rest", output_token_ids=tuple(tokens[:5])))
        await heard.ended("rest")
        if self._promised().exact_token_ids:
            assert heard.tokens("rest") == tokens[5:]
        end = heard.end("rest")
        assert end is not None
        assert end.error is None

    async def test_one_that_had_all_its_tokens_ends_at_once(self, engine: EngineLike) -> None:
        heard = Heard(engine)
        engine.add(request("over", output_token_ids=tuple(range(30, 42))))
        expected = {"over": FinishReason.LENGTH}
        if self._can("stop_token_ids"):
            engine.add(request("stopped", output_token_ids=(31,), stop_token_ids=(31,)))
            expected["stopped"] = FinishReason.STOP
        await heard.ended(*expected)
        ends = {output.request_id: output.finish_reason for output in heard.outputs}
        assert ends == expected
        assert heard.tokens("over") == heard.tokens("stopped") == []

    async def test_a_stop_token_ends_it(self, engine: EngineLike) -> None:
        if not self._can("stop_token_ids"):
            return  # that it is refused by name is tested below
        heard = Heard(engine)
        engine.add(request("free"))
        await heard.ended("free")
        tokens = heard.tokens("free")
        engine.add(request("stopped", stop_token_ids=(tokens[3],)))
        await heard.ended("stopped")
        end = heard.end("stopped")
        assert end is not None
        assert end.finish_reason is FinishReason.STOP
        assert heard.tokens("stopped") == tokens[: tokens.index(tokens[3]) + 1]

    async def test_a_seed_decides_what_is_drawn(self, engine: EngineLike) -> None:
        heard = Heard(engine)
        for name, seed in (("a", 5), ("b", 5), ("c", 6)):
            engine.add(request(name, temperature=1.0, seed=seed, max_tokens=24))
            await heard.ended(name)
        assert heard.tokens("a") == heard.tokens("b") != heard.tokens("c")

    async def test_more_than_run_at_a_time_all_end(self, engine: EngineLike) -> None:
        heard = Heard(engine)
        names = [f"r{number}" for number in range(engine.stats.max_num_sequences + 4)]
        for number, name in enumerate(names):
            engine.add(request(name, prompt=(*PROMPT, 20 + number)))
        await heard.ended(*names)
        for name in names:
            assert len(heard.tokens(name)) <= 12 or not self._promised().exact_token_ids
            assert heard.tokens(name)
        counters = [(stats.decode_tokens, stats.prefill_tokens) for stats in heard.stats]
        assert counters == sorted(counters)
        await self._at_rest(engine)

    async def test_a_cancelled_one_is_silent_and_its_slot_free(self, engine: EngineLike) -> None:
        heard = Heard(engine)
        engine.add(request("gone", max_tokens=_LONG_TOKENS, ignore_eos=self._can("ignore_eos")))
        engine.add(request("at once", max_tokens=_LONG_TOKENS))
        engine.cancel("at once")
        await heard.came("gone", 2)
        engine.cancel("gone")
        num_outputs = len(heard.of("gone"))
        await eventually(lambda: sum(time.over for time in heard.times) == 2, timeout_s=_WITHIN_S)
        last_words = [time for time in heard.times if time.over]
        assert {time.request_id for time in last_words} == {"gone", "at once"}
        # A step that ran when it was cancelled may be told of, none after it.
        assert len(heard.of("gone")) <= num_outputs + 2
        assert heard.end("gone") is None
        await self._at_rest(engine)

    async def test_a_cancel_of_nothing_is_answered(self, engine: EngineLike) -> None:
        heard = Heard(engine)
        engine.cancel("unknown")
        await eventually(lambda: bool(heard.times), timeout_s=_WITHIN_S)
        assert heard.times[0] == DeviceTime("unknown", 0, 0.0, over=True)

    async def test_the_same_id_replaces_what_ran(self, engine: EngineLike) -> None:
        heard = Heard(engine)
        engine.add(request("twice", max_tokens=_LONG_TOKENS))
        engine.add(request("twice", max_tokens=3))
        await heard.ended("twice")
        assert len(heard.tokens("twice")) == 3 or not self._promised().exact_token_ids
        await self._at_rest(engine)

    @pytest.mark.parametrize(
        ("bad", "says"),
        [
            (request("r", prompt=()), "no tokens"),
            (request("r", prompt=(1 << 30,)), "vocabulary"),
            (request("r", max_tokens=1 << 24), "context"),
        ],
    )
    async def test_bad_requests_are_refused_and_the_next_one_served(
        self, engine: EngineLike, bad: EngineRequest, says: str
    ) -> None:
        heard = Heard(engine)
        engine.add(bad)
        engine.add(request("next"))
        await heard.ended("r", "next")
        refused = heard.end("r")
        assert refused is not None
        assert refused.error is not None
        assert says in refused.error[1]
        assert heard.tokens("next")

    @pytest.mark.parametrize("name", sorted(_REFUSED))
    async def test_what_it_does_not_promise_is_refused_by_name_and_the_rest_taken(
        self, engine: EngineLike, name: str
    ) -> None:
        if name == "n" and self._can("n"):
            return  # several choices are tested with the engine that makes them
        heard = Heard(engine)
        engine.add(request("r", **{"temperature": 1.0, name: _REFUSED[name]}))
        await heard.ended("r")
        end = heard.end("r")
        assert end is not None
        if name == "grammar":
            is_taken = GrammarKind.JSON_OBJECT in self._promised().grammars
        else:
            is_taken = self._can(name)
        if is_taken:
            assert end.error is None, end.error
        else:
            assert end.error is not None
            assert end.error[0] == "invalid_parameter"
            assert name in end.error[1]

    async def test_embeddings_are_made_or_refused(self, engine: EngineLike) -> None:
        heard = Heard(engine)
        engine.add(EngineRequest(request_id="e", prompt_token_ids=PROMPT, pooling=Pooling.MEAN))
        await heard.ended("e")
        end = heard.end("e")
        assert end is not None
        assert bool(end.embedding) is self._can("pooling")
        assert (end.error is None) is self._can("pooling")

    async def test_prefixes_that_it_may_have_are_told(self, engine: EngineLike) -> None:
        if not self.has_prefix_cache:
            return
        heard = Heard(engine)
        prompt = tuple(range(45, 45 + 48))
        engine.add(request("p", prompt=prompt))
        await heard.ended("p")
        keys: list[bytes] = []
        extend_keys(keys, root_key(""), prompt, num_blocks=2, block_size_tokens=16)
        added = b"".join(changes.added for changes in heard.prefixes)
        told = {added[at : at + REPORTED_BYTES] for at in range(0, len(added), REPORTED_BYTES)}
        assert told >= {key[:REPORTED_BYTES] for key in keys}

    async def test_its_prefix_cache_is_emptied_or_the_reason_told(self, engine: EngineLike) -> None:
        heard = Heard(engine)
        prompt = tuple(range(50, 50 + 48))
        for name in ("c0", "c1"):
            engine.add(request(name, prompt=prompt))
            await heard.ended(name)
        await self._at_rest(engine)
        try:
            await engine.reset_prefix_cache()
        except PrefixCacheKeptError:
            assert self.kind not in (EngineKind.REAL, EngineKind.SIMULATED, EngineKind.SGLANG)
            return
        engine.add(request("c2", prompt=prompt))
        await heard.ended("c2")
        found = [one.num_cached_tokens for one in heard.outputs if one.request_id == "c2"]
        assert not self.has_prefix_cache or max(found) == 0

    async def test_device_time_is_shared_and_no_more_than_there_was(
        self, engine: EngineLike
    ) -> None:
        heard = Heard(engine)
        before = engine.stats
        names = [f"t{number}" for number in range(4)]
        for number, name in enumerate(names):
            engine.add(request(name, prompt=(*PROMPT, 30 + number)))
        await heard.ended(*names)
        await self._at_rest(engine)
        charged_us = sum(end.device_us for name in names if (end := heard.end(name)))
        charged_us += sum(time.device_us for time in heard.times if time.over)
        busy_us = (engine.stats.busy_s - before.busy_s) * 1e6
        assert 0 < charged_us <= busy_us * 1.001 + 1

    def _can(self, name: str) -> bool:
        return name not in self._promised().unsupported

    def _promised(self) -> EnginePromises:
        return self.promises or PROMISES[self.kind]

    @staticmethod
    async def _at_rest(engine: EngineLike) -> None:
        await eventually(
            lambda: (engine.stats.num_running, engine.stats.num_waiting) == (0, 0),
            timeout_s=_WITHIN_S,
        )
        await eventually(lambda: engine.stats.outstanding_tokens == 0, timeout_s=_WITHIN_S)

"""llama.cpp's server, with token ids in and out over its own ``/completion``."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from millrace.engine.types import EngineRequest
from millrace.registry.gguf.gguf_file import kv_bytes_per_token
from millrace.registry.served import ServedModel
from millrace.registry.source import gguf_file
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError
from millrace.schemas.sampling import SamplingParams
from millrace.workers.engine_like import EngineFailedError
from millrace.workers.servers.client import ServerClient
from millrace.workers.servers.dialect import (
    AnswerReader,
    Call,
    Command,
    Dialect,
    ServerAddress,
    ServerFacts,
    ServerLoad,
)
from millrace.workers.servers.dialects.commands import check_settings
from millrace.workers.servers.dialects.llamacpp_answers import LlamaReader
from millrace.workers.servers.dialects.server_facts import read_samples


class SlotAssignment(NamedTuple):
    """Slot by its number; ``may_reuse``: its cache is of the same salt."""

    number: int
    may_reuse: bool


class _Wish(NamedTuple):
    """Request that waits for a slot; wishes sort in the order in which they are served."""

    rank: tuple[int, int]
    request_id: str
    salt: str
    prompt: tuple[int, ...]
    turn: asyncio.Future[None]


class _Slot:
    def __init__(self) -> None:
        self.salt: str | None = None
        self.prompt: tuple[int, ...] = ()
        self.is_free = True
        self.used = 0


class SlotTable:
    """Table that gives each request a slot of its own, by priority, then first come, first served.

    Among free slots of the same salt, it chooses the slot whose last prompt has the longest common
    prefix with the request's. Otherwise it chooses the slot that was unused for longest.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._of_request: dict[str, SlotAssignment] = {}
        self._waiting: list[_Wish] = []
        self._order = itertools.count()

    @property
    def share_in_use(self) -> float:
        """Share of the slots in use, 0 to 1."""
        return sum(not slot.is_free for slot in self._slots) / len(self._slots)

    def slot_of(self, request_id: str) -> SlotAssignment | None:
        """Return the slot of a request between ``acquire`` and ``release``; otherwise None."""
        return self._of_request.get(request_id)

    async def acquire(
        self, request_id: str, salt: str, prompt: Sequence[int], priority: int = 0
    ) -> None:
        """Wait for a free slot of the llama.cpp server, and reserve it for the request."""
        turn = asyncio.get_running_loop().create_future()
        rank = (-priority, next(self._order))
        heapq.heappush(self._waiting, _Wish(rank, request_id, salt, tuple(prompt), turn))
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            self.release(request_id)
            raise

    def release(self, request_id: str) -> None:
        """Free the slot of a request, if it has one."""
        assignment = self._of_request.pop(request_id, None)
        if assignment is not None:
            self._slots[assignment.number].is_free = True
            self._give()

    def _give(self) -> None:
        """Give the free slots to waiting requests."""
        while self._waiting and any(slot.is_free for slot in self._slots):
            wish = heapq.heappop(self._waiting)
            if wish.turn.done():
                continue  # cancelled
            number = self._choose(wish.salt, wish.prompt)
            slot = self._slots[number]
            self._of_request[wish.request_id] = SlotAssignment(number, slot.salt == wish.salt)
            slot.salt, slot.prompt, slot.is_free = wish.salt, wish.prompt, False
            slot.used = next(self._order)
            wish.turn.set_result(None)

    def _choose(self, salt: str, prompt: Sequence[int]) -> int:
        free = [number for number, slot in enumerate(self._slots) if slot.is_free]
        own = [number for number in free if self._slots[number].salt == salt]
        if own:
            return max(own, key=lambda number: _num_common(self._slots[number].prompt, prompt))
        return min(free, key=lambda number: self._slots[number].used)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


_NUM_SLOTS = 8
# Divisor of the machine's memory that gives the default size of the slots' KV cache.
_MEMORY_SHARE = 4
# Prefer fewer slots to slots shorter than this.
_USUAL_SLOT_TOKENS = 4_096
_FEWEST_SLOT_TOKENS = 512
_MAX_SEED = 2**32 - 1
_STEPS = "llamacpp:n_decode_total"
# Above the logit of every other token, yet within the exact range of a float.
_CHOSEN_BIAS = 10_000.0
# The order of Millrace's own engine: penalties, then temperature, then cuts.
_SAMPLERS = ("penalties", "temperature", "top_k", "top_p", "min_p", "typ_p")


class LlamaCppDialect(Dialect):
    """Dialect of llama.cpp.

    Each request gets a slot, preferably a slot whose last prompt had the same salt. A slot's cache
    is reused for prompts of one salt only.
    """

    kind = EngineKind.LLAMACPP
    package = "llama.cpp (make engines)"
    program = "llama-server"

    def __init__(self, model: ServedModel, config: EngineConfig, *, owned: bool) -> None:
        super().__init__(model, config, owned=owned)
        self._num_slots = config.max_num_sequences or _NUM_SLOTS
        self._slots = SlotTable(self._num_slots)

    def command(self, program: Path, address: ServerAddress) -> Command:
        entry, config = self.model.entry, self.config
        check_settings(config, self.kind)
        if not entry.is_gguf:
            raise ConfigError(
                f"The model {entry.name} is not a GGUF file, and llama.cpp reads only GGUF files. "
                f"Name a GGUF file, or run the checkpoint with another engine."
            )
        file = gguf_file(entry)
        num_slots, slot_tokens = self._shape(kv_bytes_per_token(file))
        num_threads = config.num_threads or len(os.sched_getaffinity(0))
        arguments = [
            *(str(program), "--model", str(file), "--host", str(address.socket)),
            *("--parallel", str(num_slots), "--no-kv-unified"),
            *("--ctx-size", str(num_slots * slot_tokens)),
            *("--threads", str(num_threads), "--metrics", "--no-webui", "--offline"),
            # This cache would be shared by all slots, and so by all tenants.
            *("--cache-ram", "0"),
        ]
        if config.max_batch_tokens:
            arguments += ["--batch-size", str(config.max_batch_tokens)]
        # Spinning threads waste their time where other processes want the cores.
        return Command((*arguments, *config.arguments), {"OMP_WAIT_POLICY": "PASSIVE"})

    def _shape(self, kv_token_bytes: int) -> tuple[int, int]:
        """Return the number of slots and the tokens of each: the whole window, or as many as fit
        the memory for the KV cache.

        Raises:
            ConfigError: the slots would be too short.
        """
        config, window = self.config, self.model.context_window_tokens
        num_slots = self._num_slots
        if not kv_token_bytes:
            return num_slots, window
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        budget_tokens = (config.kv_cache_bytes or memory // _MEMORY_SHARE) // kv_token_bytes
        if not config.max_num_sequences:
            usual = min(window, _USUAL_SLOT_TOKENS)
            num_slots = max(1, min(num_slots, budget_tokens // usual))
        slot_tokens = min(window, budget_tokens // num_slots)
        if slot_tokens < min(window, _FEWEST_SLOT_TOKENS):
            raise ConfigError(
                f"{num_slots} slots of llama.cpp (worker.engine.max_num_sequences) would have only "
                f"{slot_tokens} tokens each. Set fewer slots, or more worker.engine.kv_cache_bytes."
            )
        return num_slots, slot_tokens

    async def read_facts(self, client: ServerClient) -> ServerFacts:
        props = await client.get_json("/props")
        models = await client.get_json("/v1/models")
        try:
            num_slots = int(props["total_slots"])
            window = int(props["default_generation_settings"]["n_ctx"])
            model = models["data"][0]
            vocab_size = int(model["meta"]["n_vocab"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineFailedError(
                f"The server at {client.url} is not llama.cpp's: its answer lacks {error}."
            ) from error
        self._slots = SlotTable(num_slots)
        return ServerFacts(
            model=str(model.get("id", "")),
            context_window_tokens=window,
            vocab_size=vocab_size,
            kv_capacity_tokens=window * num_slots,
            max_num_sequences=num_slots,
        )

    async def read_load(self, client: ServerClient) -> ServerLoad:
        samples = read_samples(await client.get("/metrics"), (_STEPS,))
        return ServerLoad(kv_usage=self._slots.share_in_use, num_steps=int(sum(samples[_STEPS])))

    def call(self, request: EngineRequest, token_ids: Sequence[int]) -> Call:
        slot = self._slots.slot_of(request.request_id)
        body = {
            "prompt": [*request.prompt_token_ids, *token_ids],
            "n_predict": self.num_new_tokens(request, len(token_ids)),
            "stream": True,
            "return_tokens": True,
            "return_progress": True,
            "cache_prompt": slot is None or slot.may_reuse,
            **({} if slot is None else {"id_slot": slot.number}),
            **_sampling(request.sampling, self.model.context_window_tokens),
        }
        return Call("/completion", body)

    def call_one_of(
        self, request: EngineRequest, token_ids: Sequence[int], allowed: Sequence[int]
    ) -> Call:
        call = self.call(request, token_ids)
        known = dict(request.sampling.logit_bias)
        if 2 * len(allowed) <= self.model.vocab_size:
            biases: list[list[Any]] = [[one, _CHOSEN_BIAS + known.get(one, 0.0)] for one in allowed]
        else:
            others = set(range(self.model.vocab_size)).difference(allowed)
            biases = [[one, False] for one in sorted(others)]
            biases += [[one, bias] for one, bias in known.items() if one not in others]
        body = call.body | {"n_predict": 1, "logit_bias": biases, "stream": False}
        return call._replace(body=body, streams=False)

    def biased(self, call: Call, bias: dict[int, float]) -> Call:
        biases = [*call.body["logit_bias"], *([one, change] for one, change in bias.items())]
        return call._replace(body=call.body | {"logit_bias": biases})

    def call_whole(self, request: EngineRequest, token_ids: Sequence[int], num_tokens: int) -> Call:
        call = self.call(request, token_ids)
        body = call.body | {"n_predict": num_tokens, "stream": False}
        return call._replace(body=body, streams=False)

    def reader(
        self,
        request: EngineRequest,
        token_ids: Sequence[int],  # noqa: ARG002  (it counts by itself)
    ) -> AnswerReader:
        return LlamaReader(self.model.tokenizer.table, request.sampling.logprobs)

    async def begin(self, request: EngineRequest) -> None:
        await self._slots.acquire(
            request.request_id, request.cache_salt, request.prompt_token_ids, request.priority
        )

    def end(self, request_id: str) -> None:
        self._slots.release(request_id)


def _sampling(sampling: SamplingParams, window_tokens: int) -> dict[str, Any]:
    """Return every setting, so that the server's own defaults do not apply."""
    fields: dict[str, Any] = {
        "samplers": list(_SAMPLERS),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": window_tokens,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": sampling.ignore_eos,
        "logit_bias": [[token_id, bias] for token_id, bias in sampling.logit_bias.items()],
    }
    if sampling.seed is not None:
        fields["seed"] = sampling.seed % _MAX_SEED
    if sampling.logprobs is not None:
        fields["n_probs"] = max(1, sampling.logprobs)
    return fields

"""Engine on llama.cpp's own server: a real one, with a small checkpoint in float32."""

from __future__ import annotations

import asyncio
import json
import math
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
import pytest_asyncio

from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineRequest
from millrace.registry.catalogue import Catalogue, CatalogueEngine
from millrace.registry.gguf.gguf_file import kv_bytes_per_token
from millrace.registry.served import ServedModel
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import CheckpointError, ConfigError
from millrace.schemas.sampling import Grammar, GrammarKind
from millrace.workers.engine_like import EngineFailedError, EngineLike
from millrace.workers.process.keeper import EngineKeeper
from millrace.workers.servers.dialect import ServerAddress
from millrace.workers.servers.dialects.llamacpp import LlamaCppDialect
from millrace.workers.servers.dialects.llamacpp_answers import LlamaReader
from millrace.workers.servers.server_engine import ServerEngine
from millrace.workers.servers.starting import start_server_engine
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.gguf_files import write_gguf
from tests.support.waiting import eventually
from tests.workers.conformance import EngineConformance, Heard, request, running
from tests.workers.servers.llamacpp_server import llamacpp_server

pytestmark = [
    pytest.mark.slow(reason="starts another project's server with a real model"),
    pytest.mark.llamacpp,
]

_NUM_STREAMS = 20
_EXACT = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> ServedModel:
    file = write_gguf(checkpoint.parent / "tiny.gguf", checkpoint, "float32")
    return _served(file)


def _served(file: Path) -> ServedModel:
    """The model of a GGUF file, as a catalogue that names llama.cpp for it has it."""
    entry = Catalogue({}).entry_for(str(file))
    entry = msgspec.structs.replace(entry, engine=CatalogueEngine(kind=EngineKind.LLAMACPP))
    return ServedModel.load(Catalogue({entry.name: entry}), entry.name)


def _config(**changes: Any) -> EngineConfig:
    usual: dict[str, Any] = {
        "kind": EngineKind.LLAMACPP,
        "max_num_sequences": 4,
        "num_threads": 1,
        "arguments": () if "url" in changes else _EXACT,
    }
    return EngineConfig(**usual | changes)


@asynccontextmanager
async def _engine(model: ServedModel, **changes: Any) -> AsyncIterator[ServerEngine]:
    engine = await start_server_engine(model, _config(**changes), SystemClock())
    try:
        yield engine
    finally:
        await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: ServedModel) -> AsyncIterator[EngineLike]:
    async with running(await start_server_engine(model, _config(), SystemClock())) as engine:
        yield engine


class TestLlamaCpp(EngineConformance):
    kind = EngineKind.LLAMACPP

    async def test_its_tokens_are_those_of_our_own_engine(
        self, engine: EngineLike, checkpoint: Path, model: ServedModel
    ) -> None:
        own = Engine.load(checkpoint, EngineConfig(device="cpu", dtype="float32", num_blocks=64))
        prompts = [tuple(range(20 + n, 50 + n)) for n in range(4)]
        heard = Heard(engine)
        for number, prompt in enumerate(prompts):
            name = f"r{number}"
            engine.add(request(name, prompt=prompt, max_tokens=40, ignore_eos=True))
            own.add(request(name, prompt=prompt, max_tokens=40, ignore_eos=True))
        made: dict[str, list[int]] = {}
        while own.has_work:
            for output in own.step():
                made.setdefault(output.request_id, []).extend(output.token_ids)
        await heard.ended(*made)
        for name, tokens in made.items():
            # llama.cpp never draws an end that is ignored, our own engine goes on behind it.
            num_alike = next(
                (at for at, token in enumerate(tokens) if token in model.eos_token_ids),
                len(tokens),
            )
            assert heard.tokens(name)[:num_alike] == tokens[:num_alike]

    async def test_logprobs_are_natural_logarithms_of_the_models_own(
        self, engine: EngineLike
    ) -> None:
        heard = Heard(engine)
        engine.add(request("r", logprobs=3, max_tokens=6))
        await heard.ended("r")
        logprobs = [one for output in heard.of("r") for one in output.logprobs]
        assert [one.token_id for one in logprobs] == heard.tokens("r")
        for one in logprobs:
            assert len(one.top) == 3
            assert one.top[0] == (one.token_id, one.logprob)
            assert 0 < sum(math.exp(logprob) for _, logprob in one.top) <= 1.0

    async def test_a_prompt_is_found_again_for_its_own_salt_only(self, engine: EngineLike) -> None:
        heard = Heard(engine)
        prompt = tuple(range(60, 110))
        for number, salt in enumerate(("a", "b", "a")):
            name = f"salted-{number}"
            asked = request(name, prompt=prompt, max_tokens=2)
            engine.add(_salted(asked, salt))
            await heard.ended(name)
        cached = [heard.of(f"salted-{n}")[-1].num_cached_tokens for n in range(3)]
        assert cached[:2] == [0, 0]
        assert cached[2] >= len(prompt) - 1

    @pytest.mark.parametrize("kind", list(GrammarKind))
    async def test_grammars_of_every_kind_are_kept(
        self, engine: EngineLike, model: ServedModel, kind: GrammarKind
    ) -> None:
        texts = {
            GrammarKind.JSON_OBJECT: "",
            GrammarKind.JSON_SCHEMA: '{"enum": ["mill", "race", 7]}',
            GrammarKind.REGEX: "[0-9]{3}-[0-9]{2}",
            GrammarKind.EBNF: 'start: "a" "b"+ "c"',
        }
        heard = Heard(engine)
        engine.add(request("g", max_tokens=60, grammar=Grammar(kind=kind, text=texts[kind])))
        await heard.ended("g")
        end = heard.end("g")
        assert end is not None
        assert end.error is None
        text = model.tokenizer.decode(heard.tokens("g"))
        match kind:
            case GrammarKind.JSON_SCHEMA:
                assert json.loads(text) in ("mill", "race", 7)
            case GrammarKind.REGEX:
                assert [len(part) for part in text.split("-")] == [3, 2]
            case GrammarKind.EBNF:
                assert text.startswith("ab")
            case GrammarKind.JSON_OBJECT:
                assert text.lstrip().startswith("{")


def _salted(asked: EngineRequest, salt: str) -> EngineRequest:
    return msgspec.structs.replace(asked, cache_salt=salt)


async def test_a_killed_server_is_replaced_and_every_stream_goes_on(model: ServedModel) -> None:
    names = [f"r{number}" for number in range(_NUM_STREAMS)]

    def asked(number: int, made: tuple[int, ...] = ()) -> Any:
        prompt = tuple(range(20, 40 + number))
        return request(f"r{number}", prompt, made, max_tokens=60, ignore_eos=True)

    async with _engine(model) as engine:
        undisturbed = Heard(engine)
        for number in range(_NUM_STREAMS):
            engine.add(asked(number))
        await undisturbed.ended(*names)
    clock, others = SystemClock(), _servers()

    async def start() -> ServerEngine:
        return await start_server_engine(model, _config(), clock)

    keeper = EngineKeeper(await start(), start, clock)
    made: dict[str, list[int]] = {name: [] for name in names}
    ended: set[str] = set()

    def on_outputs(outputs: list[Any]) -> None:
        for output in outputs:
            made[output.request_id] += output.token_ids
            if output.finished:
                assert output.error is None
                ended.add(output.request_id)

    def on_replaced() -> None:
        for number, name in enumerate(names):
            if name not in ended:
                keeper.add(asked(number, tuple(made[name])))

    keeper.listen(on_outputs)
    running_keeper = asyncio.ensure_future(keeper.run(on_replaced=on_replaced))
    try:
        for number in range(_NUM_STREAMS):
            keeper.add(asked(number))
        await eventually(lambda: sum(map(len, made.values())) > 40, timeout_s=30.0)
        [server] = _servers() - others
        server.send_signal(signal.SIGKILL)
        await eventually(lambda: len(ended) == _NUM_STREAMS, timeout_s=60.0)
        assert keeper.num_restarts == 1
        assert made == {name: undisturbed.tokens(name) for name in names}
    finally:
        running_keeper.cancel()
        await asyncio.gather(running_keeper, return_exceptions=True)
        await keeper.close()
    await eventually(lambda: _servers() == others)


def _servers() -> set[psutil.Process]:
    own = psutil.Process().children(recursive=True)
    return {one for one in own if one.name() == "llama-server"}


async def test_a_cancel_frees_the_slot(model: ServedModel, tmp_path: Path) -> None:
    async with (
        llamacpp_server(model, tmp_path) as (url, _),
        _engine(model, url=url) as engine,
    ):
        heard = Heard(engine)
        engine.add(request("gone", max_tokens=100, ignore_eos=True))
        await eventually(lambda: len(heard.tokens("gone")) > 2, timeout_s=30.0)
        engine.cancel("gone")

        async def is_idle() -> bool:
            async with aiohttp.ClientSession() as session, session.get(f"{url}/slots") as answer:
                return not any(slot["is_processing"] for slot in await answer.json())

        await eventually(is_idle)


async def test_another_model_behind_a_url_is_refused(
    model: ServedModel, checkpoint: Path, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", max_position_embeddings=512)
    file = write_gguf(tmp_path / "other.gguf", other, "float32")
    wide = _served(file)
    async with llamacpp_server(model, tmp_path) as (url, _):
        with pytest.raises(ConfigError, match="context window is 128 tokens"):
            await start_server_engine(wide, _config(url=url), SystemClock())


async def test_a_truncated_file_is_told_before_anything_starts(
    model: ServedModel, tmp_path: Path
) -> None:
    broken = tmp_path / "tiny.gguf"
    raw = Path(model.entry.source).read_bytes()
    broken.write_bytes(raw[: len(raw) // 2])
    entry = Catalogue({}).entry_for(str(broken))
    damaged = ServedModel(entry, model.path, model.config, model.tokenizer)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf is truncated"):
        await start_server_engine(damaged, _config(), SystemClock())


async def test_a_server_that_does_not_come_up_leaves_its_last_words(model: ServedModel) -> None:
    others = _servers()
    with pytest.raises(EngineFailedError, match=r"(?s)before the model was loaded.*no-such-option"):
        await start_server_engine(model, _config(arguments=("--no-such-option",)), SystemClock())
    assert _servers() == others


async def test_a_folder_is_not_for_llama_cpp(checkpoint: Path) -> None:
    catalogue = Catalogue({}).with_model(str(checkpoint))
    folder = ServedModel.load(catalogue, catalogue.names()[0])
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        await start_server_engine(folder, _config(), SystemClock())


def _shape_of(model: ServedModel, **config: Any) -> tuple[int, int]:
    command = LlamaCppDialect(model, _config(**config), owned=True).command(
        Path("llama-server"), ServerAddress(Path("/run"))
    )
    words = list(command.arguments)
    num_slots = int(words[words.index("--parallel") + 1])
    return num_slots, int(words[words.index("--ctx-size") + 1]) // num_slots


def test_slots_have_what_the_memory_has_room_for(model: ServedModel) -> None:
    token_bytes = kv_bytes_per_token(Path(model.entry.source))
    assert token_bytes == 2 * 2 * 2 * 2 * 8  # layers, heads, keys and values, their size, float16
    window = model.context_window_tokens
    assert _shape_of(model, max_num_sequences=0) == (8, window)
    assert _shape_of(model, max_num_sequences=0, kv_cache_bytes=3 * window * token_bytes) == (
        3,
        window,
    )
    with pytest.raises(ConfigError, match=r"4 slots .* 32 tokens each"):
        _shape_of(model, kv_cache_bytes=window * token_bytes)


async def test_requests_longer_than_a_slot_are_refused_one_by_one(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "wide", max_position_embeddings=512)
    file = write_gguf(tmp_path / "wide.gguf", checkpoint, "float32")
    wide = _served(file)
    async with _engine(wide, arguments=(*_EXACT, "--ctx-size", "1024")) as engine:
        assert engine.stats.max_tokens_per_request == 256
        heard = Heard(engine)
        engine.add(request("long", max_tokens=300))
        engine.add(request("short"))
        await heard.ended("long", "short")
        refused = heard.end("long")
        assert refused is not None
        assert refused.error is not None
        assert refused.error[0] == "kv_capacity_exceeded"
        assert heard.tokens("short")


async def test_settings_of_the_own_engine_are_not_ignored(model: ServedModel) -> None:
    with pytest.raises(
        ConfigError, match=r"worker\.engine\.kernels is a setting of Millrace's own"
    ):
        await start_server_engine(model, _config(kernels="torch"), SystemClock())


def test_a_token_that_ends_within_a_character_keeps_its_place_among_logprobs(
    model: ServedModel,
) -> None:
    def entry(token_id: int) -> dict[str, Any]:
        top = [{"id": token_id, "logprob": -0.5}]
        return {"id": token_id, "logprob": -0.5, "top_logprobs": top}

    reader = LlamaReader(model.tokenizer.table, 1)
    told = {"stop": True, "tokens": [7, 8, 9], "completion_probabilities": [entry(7), entry(9)]}
    part = reader.read(msgspec.json.encode(told))
    assert part is not None
    assert [(one.token_id, one.logprob) for one in part.logprobs] == [
        (7, -0.5),
        (8, -9999.0),
        (9, -0.5),
    ]

"""GGUF files as models of the catalogue: served as their source checkpoints are."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import msgspec
import pytest

from millrace.engine.step.engine import Engine
from millrace.registry.artifacts.store import ModelSourceError
from millrace.registry.catalogue import (
    Catalogue,
    CatalogueEngine,
    EngineChoice,
    ModelEntry,
    load_catalogue,
)
from millrace.registry.checkpoints.checkpoint import read_model_config, read_model_outline
from millrace.registry.checkpoints.fingerprint import weights_fingerprint
from millrace.registry.gguf import checkpoint_folder as folders
from millrace.registry.gguf.checkpoint_folder import checkpoint_folder
from millrace.registry.served import ServedModel
from millrace.registry.source import gguf_file, resolve
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import CheckpointError, ConfigError
from millrace.schemas.jobs import ChatMessage, Job
from millrace.schemas.pooling import Pooling
from millrace.workers.simulated.engine import SimulatedEngine
from tests.support.engine.checkpoints_made import CONTEXT_WINDOW_TOKENS, write_checkpoint
from tests.support.engine.gguf_made import TOKENS, write_metadata
from tests.support.gguf_files import write_gguf

_LLAMA: Mapping[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 8,
    "llama.context_length": 64,
    "llama.block_count": 2,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


_ON_HUB = ("org/mill-gguf", "v1")


def entry_of(source: Path | str) -> ModelEntry:
    return ModelEntry(name="x", source=str(source))


def served_by(path: Path) -> ServedModel:
    catalogue = load_catalogue("").with_model(str(path))
    return ServedModel.load(catalogue, catalogue.names()[-1])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny-hf")


@pytest.fixture
def file(tmp_path: Path, checkpoint: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", checkpoint)


def test_a_file_is_served_as_its_checkpoint_is(checkpoint: Path, file: Path) -> None:
    hf, ours = served_by(checkpoint), served_by(file)
    assert (ours.entry.name, ours.entry.source) == ("tiny", str(file))
    assert ours.context_window_tokens == hf.context_window_tokens == CONTEXT_WINDOW_TOKENS
    assert ours.vocab_size == hf.vocab_size
    assert ours.eos_token_ids == hf.eos_token_ids
    assert ours.embedding_size == hf.embedding_size
    assert ours.config.bos_token_id == hf.config.bos_token_id
    assert ours.config.has_head
    assert ours.tool_format == hf.tool_format
    chat = Job(request_id="r", model="x", messages=(ChatMessage("user", "mill 水車"),))
    assert ours.prepare(chat, random.Random(1)) == hf.prepare(chat, random.Random(1))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
)
def test_a_window_that_scaling_has_made_longer(tmp_path: Path, scaling: dict[str, Any]) -> None:
    checkpoint = write_checkpoint(tmp_path / "hf", rope_scaling=scaling)
    ours = served_by(write_gguf(tmp_path / "x.gguf", checkpoint))
    assert ours.context_window_tokens == 2 * CONTEXT_WINDOW_TOKENS
    assert ours.context_window_tokens == served_by(checkpoint).context_window_tokens


def test_the_catalogue_names_files(tmp_path: Path, file: Path) -> None:
    models = tmp_path / "models.yaml"
    models.write_text(f"models:\n  a: {{source: ./{file.name}}}\n  b: {{source: {file}}}\n")
    catalogue = load_catalogue(str(models))
    for name in ("a", "b"):
        entry = catalogue.get(name)
        assert entry.is_gguf
        assert entry.is_local
        assert gguf_file(entry) == file
        assert ServedModel.load(catalogue, name).vocab_size
    assert not load_catalogue("").get("demo").is_gguf


def test_a_link_to_a_file_keeps_its_name(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = file.rename(tmp_path / "blob")
    (tmp_path / "link.gguf").symlink_to(blob)
    monkeypatch.chdir(tmp_path)
    entry = load_catalogue("").entry_for("link.gguf")
    assert (entry.name, entry.source) == ("link", str(tmp_path / "link.gguf"))
    assert resolve(entry).is_dir()


def test_what_is_made_of_a_file_is_made_once(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = checkpoint_folder(file)
    assert made.parent == cache / "millrace" / "gguf"
    assert [path.name for path in made.parent.iterdir()] == [made.name]
    monkeypatch.setattr(folders, "read_gguf", None)
    assert checkpoint_folder(file) == made


def test_a_file_written_anew_is_read_anew(tmp_path: Path) -> None:
    file = write_metadata(tmp_path / "x.gguf")
    assert served_by(file).context_window_tokens == 64
    write_metadata(file, {"tiny.context_length": 48})
    os.utime(file, ns=(1, 1))
    assert served_by(file).context_window_tokens == 48


def test_several_may_ask_at_once(file: Path) -> None:
    made: list[Path] = []
    start = threading.Barrier(4)

    def ask() -> None:
        start.wait()
        made.append(checkpoint_folder(file))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert len(set(made)) == 1
    assert [path.name for path in made[0].parent.iterdir()] == [made[0].name]


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: .* Set XDG_CACHE_HOME to another"):
        checkpoint_folder(file)


def test_any_architecture_that_llama_cpp_has(tmp_path: Path) -> None:
    served = served_by(write_metadata(tmp_path / "x.gguf"))
    assert served.config.architecture == "tiny"
    assert (served.vocab_size, served.embedding_size) == (len(TOKENS), 8)


def test_embeddings_are_pooled_as_the_file_says(tmp_path: Path) -> None:
    file = write_metadata(tmp_path / "x.gguf", {"tiny.pooling_type": 3})
    served = served_by(file)
    assert not served.config.has_head
    assert served.embedding_defaults.pooling is Pooling.LAST
    assert served_by(write_metadata(file, {"tiny.pooling_type": 0})).config.has_head


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tiny.context_length": None}, r"tiny\.context_length is missing"),
        ({"tiny.embedding_length": 0}, r"tiny\.embedding_length must be a positive integer"),
        ({"general.type": "adapter"}, "general.type must be model: this file is an addition"),
        ({"tiny.pooling_type": 4}, r"tiny\.pooling_type must be 0 \(none\), 1 \(mean\) or 3"),
        ({"split.count": 3}, r"split\.count must be the number of files in the file's name"),
    ],
)
def test_what_cannot_be_served_is_refused(
    tmp_path: Path, changes: Mapping[str, Any], words: str
) -> None:
    file = write_metadata(tmp_path / "x.gguf", changes)
    with pytest.raises(CheckpointError, match=words) as caught:
        resolve(entry_of(file))
    assert str(file) in caught.value.message


def test_a_vocabulary_of_another_size_than_the_embedding(tmp_path: Path) -> None:
    file = write_metadata(tmp_path / "x.gguf", num_rows=98)
    with pytest.raises(CheckpointError, match=r"97 tokens, but .* token_embd\.weight is for 98"):
        resolve(entry_of(file))


def test_a_file_without_weights(tmp_path: Path) -> None:
    file = write_metadata(tmp_path / "x.gguf", tensor="other.weight")
    with pytest.raises(CheckpointError, match=r"tensor token_embd\.weight is missing"):
        resolve(entry_of(file))


def test_a_model_in_several_files_is_named_by_the_first(tmp_path: Path) -> None:
    first = tmp_path / "mill-00001-of-00002.gguf"
    second = first.with_name("mill-00002-of-00002.gguf")
    write_metadata(first, {"split.count": 2}, tensor="other.weight")
    with pytest.raises(CheckpointError, match=r"mill-00002-of-00002\.gguf does not exist"):
        served_by(first)
    second.write_bytes(b"")
    served = served_by(first)
    assert (served.entry.name, served.vocab_size) == ("mill", len(TOKENS))
    with pytest.raises(CheckpointError, match=r"name the first, mill-00001-of-00002\.gguf"):
        served_by(second)


def test_a_folder_of_files_is_told_to_name_one(tmp_path: Path) -> None:
    write_metadata(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match=rf"or a GGUF file .* such as {tmp_path}/x\.gguf"):
        resolve(entry_of(tmp_path))
    with pytest.raises(CheckpointError, match=r"the file .*y\.gguf does not exist"):
        resolve(entry_of(tmp_path / "y.gguf"))


def test_a_file_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def download(repository: str, **options: Any) -> str:
        calls.append({"repository": repository, **options})
        return str(tmp_path)

    def stored(repository: str, file: str, *, revision: str | None) -> str | None:
        return str(tmp_path / file) if calls and (repository, revision) == _ON_HUB else None

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", stored)
    (tmp_path / "q4").mkdir()
    write_metadata(tmp_path / "q4" / "x.gguf")
    entry = entry_of("org/mill-gguf/q4/x.gguf@v1")
    assert entry.is_gguf
    assert not entry.is_local
    before = entry.engine_kind
    assert gguf_file(entry) == tmp_path / "q4" / "x.gguf"
    # The file's architecture is known once it is here.
    assert [before, entry.engine_kind] == [EngineKind.REAL, EngineKind.LLAMACPP]
    assert calls[0]["repository"] == "org/mill-gguf"
    assert calls[0]["revision"] == "v1"
    assert calls[0]["allow_patterns"] == ["q4/x.gguf"]
    assert ServedModel.load(Catalogue({"x": entry}), "x").vocab_size == len(TOKENS)
    with pytest.raises(CheckpointError, match="does not exist"):
        gguf_file(entry_of("org/mill-gguf/big-00001-of-00002.gguf"))
    assert calls[-1]["allow_patterns"] == [f"big-0000{n}-of-00002.gguf" for n in (1, 2)]
    assert not entry_of("org/mill.gguf").is_gguf


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise ConnectionError("refused")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelSourceError, match="org/mill cannot be fetched"):
        resolve(load_catalogue("").entry_for("org/mill/x.gguf"))


def test_the_own_engine_says_which_one_computes_other_files(tmp_path: Path) -> None:
    entry = entry_of(write_metadata(tmp_path / "x.gguf"))
    folder = resolve(entry)
    assert entry.engine_choice.kind is EngineKind.LLAMACPP
    assert entry.engine_choice.reason.endswith("cannot compute the file: its architecture is tiny")
    assert read_model_outline(folder).architecture == "tiny"
    for refused in (
        lambda: read_model_config(folder),
        lambda: Engine.load(folder, EngineConfig(device="cpu")),
    ):
        with pytest.raises(CheckpointError, match=r"x\.gguf cannot be .* --engine llamacpp"):
            refused()


def test_the_own_engine_is_the_default(file: Path, checkpoint: Path) -> None:
    entry = entry_of(file)
    assert entry.engine_choice == EngineChoice(
        EngineKind.REAL, "it computes the file's architecture and types"
    )
    ours, theirs = read_model_config(resolve(entry)), read_model_config(checkpoint)
    given = {"rms_norm_eps": theirs.rms_norm_eps, "dtype": theirs.dtype}
    given["eos_token_ids"] = theirs.eos_token_ids
    assert msgspec.structs.replace(ours, **given) == theirs
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)
    asked = msgspec.structs.replace(entry, engine=CatalogueEngine(kind=EngineKind.LLAMACPP))
    assert asked.engine_choice == EngineChoice(EngineKind.LLAMACPP, "it was asked for")
    assert read_model_outline(resolve(entry), any_architecture=True).architecture == "llama"


def test_files_that_cannot_be_read_end_in_their_own_errors(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    for path in (damaged, tmp_path / "missing.gguf"):
        assert entry_of(path).engine_kind is EngineKind.REAL
        with pytest.raises(CheckpointError, match=path.name):
            resolve(entry_of(path))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "its RoPE scaling is longrope"),
        ({"llama.attention.causal": False}, "its attention is not causal"),
        ({"llama.attention.value_length": 4}, "llama.attention.value_length is not the keys' 8"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count is not the keys' 8"),
        ({"llama.logit_scale": 2.0}, "it has llama.logit_scale"),
        ({"llama.attention.head_count_kv": [1, 2]}, "head_count_kv differs from layer to layer"),
        ({"llama.expert_count": 2, "llama.expert_gating_func": 2}, "gating_func is 2, not softmax"),
    ],
)
def test_features_that_only_llama_cpp_computes(
    tmp_path: Path, changes: Mapping[str, Any], reason: str
) -> None:
    file = write_metadata(tmp_path / "x.gguf", {**_LLAMA, **changes})
    assert entry_of(file).engine_choice.kind is EngineKind.LLAMACPP
    assert reason in entry_of(file).engine_choice.reason


def test_a_tensor_that_the_architecture_lacks(tmp_path: Path) -> None:
    file = write_metadata(tmp_path / "x.gguf", {**_LLAMA, "split.count": None})
    assert entry_of(file).engine_kind is EngineKind.REAL
    first = tmp_path / "y-00001-of-00002.gguf"
    write_metadata(first, {**_LLAMA, "split.count": 2})
    write_metadata(first.with_name("y-00002-of-00002.gguf"), tensor="blk.0.ssm_a")
    reason = "its tensor blk.0.ssm_a is not part of the architecture"
    assert entry_of(first).engine_choice.reason.endswith(reason)


def test_the_fingerprint_is_that_of_the_file(tmp_path: Path, file: Path) -> None:
    fingerprint = weights_fingerprint(resolve(entry_of(file)))
    assert fingerprint == weights_fingerprint(file) != ""
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    assert weights_fingerprint(resolve(entry_of(copy))) == fingerprint
    with copy.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x7f")
    assert weights_fingerprint(resolve(entry_of(copy))) != fingerprint


async def test_no_engine_is_simulated_for_other_files(tmp_path: Path) -> None:
    file = write_metadata(tmp_path / "x.gguf")
    with pytest.raises(ConfigError, match="GGUF files cannot be simulated"):
        SimulatedEngine(served_by(file), EngineConfig(), SystemClock())


def test_the_outline_of_a_checkpoint_is_its_configuration(checkpoint: Path) -> None:
    assert read_model_outline(checkpoint) == read_model_config(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"architectures": ["T5Model"]}))
    with pytest.raises(CheckpointError, match="architecture T5Model is not supported"):
        read_model_outline(checkpoint)

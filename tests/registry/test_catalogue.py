"""Catalogue file, models beside it, and the sources of their files."""

from __future__ import annotations

import re
from decimal import Decimal
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from millrace.registry.adapters import AdapterOffer, check_offer
from millrace.registry.artifacts.store import ModelSourceError
from millrace.registry.catalogue import Catalogue, load_catalogue
from millrace.registry.pricing import PriceBook, cost, prices_with
from millrace.registry.source import resolve
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import CheckpointError, ConfigError, ModelNotFoundError, ParameterError
from millrace.schemas.jobs import Tier

PRICES = """
    prices:
      version: v7
      currency: EUR
      input_per_million: 0.1
      cached_input_per_million: "0.05"
      output_per_million: 1
"""


def written(folder: Path, text: str) -> Catalogue:
    file = folder / "models.yaml"
    file.write_text(text)
    return load_catalogue(str(file))


def test_the_built_in_catalogue() -> None:
    entry = load_catalogue("").get("demo")
    assert entry.is_local
    assert entry.tiers == tuple(Tier)
    assert entry.prices.version == "2026-11"
    assert entry.prices.output_per_million == Decimal("0.40")


def test_a_model_that_is_offered_only_by_name() -> None:
    catalogue = load_catalogue("")
    assert catalogue.names() == ("demo",)
    with pytest.raises(ModelNotFoundError, match="Models: demo, smollm2"):
        catalogue.get("smollm2")
    entry = catalogue.entry_for("smollm2")
    assert entry.is_gguf
    named = catalogue.with_model("smollm2")
    assert named.names() == ("demo", "smollm2")
    assert named.get("smollm2") == entry


def test_every_field(tmp_path: Path) -> None:
    catalogue = written(
        tmp_path,
        "models:\n  small:\n    source: ./a/b\n    tiers: [pro, free]\n    created: 2026-11-01\n"
        f"    description: Small\n    context_window_tokens: 512{PRICES}  large:\n"
        "    source: org/large@v1.0\n",
    )
    small, large = catalogue.get("small"), catalogue.get("large")
    assert catalogue.names() == ("small", "large")
    assert small.source == str(tmp_path / "a" / "b")
    assert (small.tiers, small.context_window_tokens) == ((Tier.PRO, Tier.FREE), 512)
    assert small.created.isoformat() == "2026-11-01"
    assert small.prices.input_per_million == Decimal("0.1")
    assert (large.source, large.is_local) == ("org/large@v1.0", False)
    assert large.prices.version == "unpriced"


def test_what_is_written_reads_the_same(tmp_path: Path) -> None:
    catalogue = written(tmp_path, f"models:\n  small:\n    source: ./a{PRICES}")
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "models.yaml"
    catalogue.with_model("org/large").write(file)
    again = load_catalogue(str(file))
    assert again.names() == ("small", "org/large")
    assert again.get("small") == catalogue.get("small")


def test_unknown_model_lists_the_names(tmp_path: Path) -> None:
    catalogue = written(tmp_path, "models:\n  a: {source: ./a}\n  b: {source: ./b}\n")
    with pytest.raises(ModelNotFoundError, match=r"'c'.*a, b"):
        catalogue.get("c")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models:\n  x: {source: ./a, colour: red}", ["model x", "`colour`"]),
        (
            "models:\n  x: {source: ./a, prices: {version: v, input: 1}}",
            ["model x", "`input`", "prices"],
        ),
        ("models: {x: {}}", ["model x", "`source`"]),
        ("models: {x: {source: here}}", ["model x", "source", "'here'"]),
        ("models: {x: {source: ./a, tiers: [gold]}}", ["model x", "gold"]),
        ("models: {x: {source: ./a, tiers: []}}", ["model x", "tiers"]),
        ("models: {x: {source: ./a, context_window_tokens: 0}}", ["context_window_tokens"]),
        ("models: {auto: {source: ./a}}", ["auto", "reserved"]),
        ("models: {..: {source: ./a}}", ["..", "reserved"]),
        ("models: {'a b': {source: ./a}}", ["'a b'"]),
        ("models: {7: {source: ./a}}", ["7"]),
        ("models: {}\nmodel: {}", ["unknown keys: model;"]),
        ("models: [x]", ["mapping `models`"]),
        ("models: {", ["not valid YAML"]),
        (
            "models:\n  x:\n    source: ./a"
            + PRICES.replace("output_per_million: 1", "output_per_million: -1"),
            ["model x", "output_per_million", "-1"],
        ),
    ],
)
def test_a_bad_catalogue_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, text)
    for word in words:
        assert word in caught.value.message


def test_a_missing_catalogue_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        load_catalogue(str(tmp_path / "none.yaml"))


def test_a_folder_becomes_a_model_named_after_it(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    catalogue = load_catalogue("").with_model(f"{tmp_path}/my-model/")
    assert catalogue.names() == ("demo", "my-model")
    assert catalogue.get("my-model").source == str(tmp_path / "my-model")
    assert catalogue.with_model("demo").names() == catalogue.names()
    assert catalogue.entry_for("org/large").source == "org/large"


@pytest.mark.parametrize("text", ["./nowhere", "/no/where", "unheard-of"])
def test_neither_a_model_nor_a_folder(text: str) -> None:
    with pytest.raises(ModelNotFoundError, match="demo"):
        load_catalogue("").with_model(text)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    catalogue = load_catalogue("").with_model(str(tmp_path / "empty"))
    with pytest.raises(CheckpointError, match=r"Model empty: .* no config\.json"):
        resolve(catalogue.get("empty"))
    (tmp_path / "empty").rmdir()
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve(catalogue.get("empty"))


def test_a_hub_model_is_fetched_by_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    calls: list[dict[str, Any]] = []

    def download(repository: str, **options: Any) -> str:
        calls.append({"repository": repository, **options})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    catalogue = written(tmp_path, "models: {x: {source: org/large@v1}}")
    assert resolve(catalogue.get("x")) == tmp_path
    assert (calls[0]["repository"], calls[0]["revision"]) == ("org/large", "v1")
    patterns = calls[0]["allow_patterns"]
    assert "*.safetensors" in patterns
    # How embeddings are pooled is said beside the weights.
    for name in ("modules.json", "1_Pooling/config.json"):
        assert any(fnmatch(name, pattern) for pattern in patterns)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.LocalEntryNotFoundError("no network"), "check the network"),
        (ConnectionError("refused"), "check the network"),
        (errors.HFValidationError("bad"), "not a hub id"),
    ],
)
def test_the_hub_s_refusals_are_typed(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelSourceError, match=words):
        resolve(load_catalogue("").entry_for("org/large"))


def book(**changes: Any) -> PriceBook:
    prices = {
        "input_per_million": Decimal("0.10"),
        "cached_input_per_million": Decimal("0.05"),
        "output_per_million": Decimal("0.40"),
    }
    return PriceBook(version="v", **(prices | changes))


def test_cost_is_exact() -> None:
    assert cost(book(), 1000, 400, 3) == Decimal("0.0000812")
    assert cost(book(), 0, 0, 0) == 0


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ParameterError, match="11 cached"):
        cost(book(), 10, 11, 0)


def test_an_adapter_has_its_model_s_devices_in_one_currency() -> None:
    model = book(device_per_hour=Decimal(3))
    own = dict.fromkeys(("input_per_million", "cached_input_per_million"), "1")
    own |= {"version": "a", "output_per_million": "2"}
    assert prices_with(model, None) is model
    assert prices_with(model, own).device_per_hour == 3
    other = prices_with(model, own | {"currency": "EUR"})
    assert (other.currency, other.device_per_hour) == ("EUR", Decimal(0))
    offer = AdapterOffer(name="sql", model="m", source="/sql", prices=own | {"currency": "EUR"})
    with pytest.raises(ParameterError, match=r"in EUR.* m cost USD.* Give prices in USD"):
        check_offer(offer, EngineKind.REAL, (), model)


@pytest.mark.parametrize("currency", ["euro", "eur", "", "€", "EUR "])
def test_a_currency_is_a_code(currency: str) -> None:
    with pytest.raises(ValueError, match="three capital letters, such as USD or EUR"):
        book(currency=currency)


@pytest.mark.parametrize("price", [Decimal(-1), Decimal("NaN"), Decimal("Infinity")])
def test_prices_are_prices(price: Decimal) -> None:
    with pytest.raises(ValueError, match="output_per_million"):
        book(output_per_million=price)


def test_versions_stand_beside_their_model(tmp_path: Path) -> None:
    models = "chat@v1: {source: org/a, tiers: [pro, free]}, chat@v2: {source: org/b, tiers: [pro]}"
    small = "small: {source: org/c}"
    route = "routes: {auto: {small: small, large: chat}}"
    catalogue = written(tmp_path, f"models: {{{models}, {small}}}\n{route}")
    assert catalogue.names() == ("chat@v1", "chat@v2", "small")
    assert catalogue.routes["auto"].large == "chat"
    # A revision of the hub may be called anything, and reads back.
    reads_back = Catalogue({}).with_model("org/model@stable")
    reads_back.write(tmp_path / "again.yaml")
    assert load_catalogue(str(tmp_path / "again.yaml")).names() == ("org/model@stable",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: {chat@stable: {source: org/a}}", "The version stable of 'chat@stable'"),
        (
            (
                "models: {chat@v1: {source: org/a}, b: {source: org/b}}\n"
                "routes: {chat: {small: chat@v1, large: b}}"
            ),
            "its name must be text without spaces and not a model's",
        ),
        (
            (
                "models: {auto@v1: {source: org/a}, b: {source: org/b}}\n"
                "routes: {auto: {small: auto@v1, large: b}}"
            ),
            "its name must be text without spaces and not a model's",
        ),
    ],
)
def test_names_that_would_stand_for_two_things_are_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        written(tmp_path, text)


def test_a_model_may_be_quantized_when_it_is_loaded(tmp_path: Path) -> None:
    entry = written(tmp_path, "models:\n  small:\n    source: ./a\n    quantization: int8\n").get(
        "small"
    )
    assert entry.engine_config(EngineConfig()).quantization == "int8"
    told = EngineConfig(quantization="int4")
    assert entry.engine_config(told).quantization == "int4"
    with pytest.raises(ConfigError, match="and vllm runs this model"):
        entry.engine_config(EngineConfig(kind=EngineKind.VLLM))


@pytest.mark.parametrize(
    ("says", "means"),
    [("speculation: ngram", "ngram"), ("speculation: off", False), ("speculation: 'off'", "off")],
)
def test_a_model_says_whether_tokens_are_proposed(
    tmp_path: Path, says: str, means: str | bool
) -> None:
    text = f"models:\n  small:\n    source: ./a\n    {says}\n"
    entry = written(tmp_path, text).get("small")
    assert entry.engine_config(EngineConfig()).speculation == means
    assert entry.engine_config(EngineConfig(speculation="off")).speculation == "off"


def test_a_model_may_be_computed_by_several_devices(tmp_path: Path) -> None:
    text = "models:\n  big:\n    source: ./a\n    parallel: {tensor: 2, experts: true}\n"
    entry = written(tmp_path, text).get("big")
    config = entry.engine_config(EngineConfig())
    assert (config.tensor_parallel, config.expert_parallel) == (2, True)
    told = entry.engine_config(EngineConfig(tensor_parallel=4))
    assert (told.tensor_parallel, told.expert_parallel) == (4, False)
    simulated = entry.engine_config(EngineConfig(kind=EngineKind.SIMULATED))
    assert simulated.tensor_parallel == 2
    by_vllm = entry.engine_config(EngineConfig(kind=EngineKind.VLLM))
    assert by_vllm.tensor_parallel == 2
    with pytest.raises(ConfigError, match="llamacpp runs this model, and cannot be told to do so"):
        entry.engine_config(EngineConfig(kind=EngineKind.LLAMACPP))
    with pytest.raises(ConfigError, match="tgi runs this model, and has no expert parallelism"):
        entry.engine_config(EngineConfig(kind=EngineKind.TGI))


def test_parallelism_is_kept_for_other_processes(tmp_path: Path) -> None:
    catalogue = written(tmp_path, "models:\n  b:\n    source: ./a\n    parallel: {tensor: 2}\n")
    catalogue.write(tmp_path / "again.yaml")
    assert load_catalogue(str(tmp_path / "again.yaml")).get("b") == catalogue.get("b")


@pytest.mark.parametrize("kind", ["draft", "eagle3"])
def test_a_draft_is_looked_for_beside_the_catalogue(tmp_path: Path, kind: str) -> None:
    text = f"models:\n  big:\n    source: ./a\n    speculation: {kind}=./small\n"
    entry = written(tmp_path, text).get("big")
    assert entry.speculation == f"{kind}={tmp_path.resolve() / 'small'}"


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (
            "speculation: eagle",
            "speculation is 'eagle'; choose ngram, draft=PATH, eagle3=PATH, off",
        ),
        ("speculation: eagle3=", "speculation is 'eagle3='; choose ngram"),
        ("speculation: eagle3=./a\n    engine: {kind: sglang}", "sglang runs this model"),
        ("speculation: on", "speculation is True"),
        ("speculation: ngram\n    engine: {kind: vllm}", "vllm runs this model"),
        ("quantization: int3", "model small: quantization is 'int3'; choose int8, int4, fp8"),
        ("quantization: int8\n    engine: {kind: sglang}", "sglang runs this model"),
        ("quantization: 8", "Expected `str | null`"),
        ("parallel: {tensor: 0}", "model small: tensor parallelism needs at least 1 device, got 0"),
        ("parallel: {experts: true}", "expert parallelism is over the devices"),
        ("parallel: {layers: 2}", "unknown field `layers`"),
        ("parallel: {pipeline: 0}", "a pipeline needs at least 1 stage, got 0"),
        (
            "parallel: {tensor: 2}\n    engine: {kind: openai, url: 'http://a'}",
            "openai runs this model, and cannot be told to do so on 2 devices",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused(tmp_path: Path, says: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        written(tmp_path, f"models:\n  small:\n    source: ./a\n    {says}\n")


@pytest.mark.parametrize(
    ("told", "setting"),
    [({"transfer": True}, "transfer"), ({"transfer_address": "10.0.0.1:0"}, "transfer_address")],
)
def test_only_the_own_engine_exchanges_blocks(
    tmp_path: Path, told: dict[str, Any], setting: str
) -> None:
    text = "models:\n  small:\n    source: ./a\n    engine: {kind: vllm}\n"
    entry = written(tmp_path, text).get("small")
    with pytest.raises(ConfigError, match=rf"engine\.{setting} is for Millrace's own engine"):
        entry.engine_config(EngineConfig(**told))
    assert entry.engine_config(EngineConfig(transfer=False)).transfer is False


def test_only_the_own_engine_has_stages_on_other_hosts(tmp_path: Path) -> None:
    text = "models:\n  small:\n    source: ./a\n    engine: {kind: vllm}\n"
    entry = written(tmp_path, text).get("small")
    with pytest.raises(ConfigError, match=r"vllm runs this model, .* leave engine\.remote_stages"):
        entry.engine_config(EngineConfig(remote_stages=1))


def test_a_gguf_file_is_not_quantized_when_it_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="int8 is not for GGUF files, whose weights are computed"):
        written(tmp_path, "models:\n  s:\n    source: ./a.gguf\n    quantization: int8\n")
    entry = written(tmp_path, "models:\n  s:\n    source: ./a.gguf\n").get("s")
    with pytest.raises(ConfigError, match="int4 is not for GGUF files"):
        entry.engine_config(EngineConfig(quantization="int4"))


@pytest.mark.parametrize("source", ["pypi:package", "pypi:package==1/m.gguf", "pypi:package==1"])
def test_an_incomplete_source_in_a_wheel_names_the_form(source: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"pypi:NAME==VERSION/PATH#sha256=DIGEST"):
        Catalogue({}).entry_for(source)

"""Which models there are: names, sources, prices and who may use them."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import msgspec

from millrace.registry.artifacts.store import is_address
from millrace.registry.gguf.parts import GGUF_ENDING, absolute_source, model_name_of
from millrace.registry.pricing import UNPRICED, PriceBook
from millrace.registry.rollouts.versions import Versions, check_label
from millrace.registry.routing.router import Route, Router
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.config import EngineConfig, TierPolicies
from millrace.schemas.engines import (
    EngineKind,
    check_parallel,
    check_quantization,
    check_remote_stages,
    check_speculation,
    check_transfer,
    with_path,
)
from millrace.schemas.errors import ConfigError, ModelNotFoundError
from millrace.schemas.jobs import RESERVED_NAMES, Tier
from millrace.schemas.pooling import EmbeddingPooling
from millrace.schemas.tools import ToolFormat

BUILT_IN = Path(__file__).with_name("models.yaml")
_LOCAL_PREFIXES = ("./", "../", "/", "~")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?P<file>/[\w./-]+\.gguf)?(@[\w./-]+)?")
_NAME = re.compile(r"[^\s\x00-\x1f]{1,200}")
_LONG_AGO = datetime.date(1970, 1, 1)


class GenerationConfig(StrEnum):
    """Whether the sampling that a checkpoint's generation_config.json recommends counts."""

    AUTO = "auto"
    IGNORE = "ignore"


class CatalogueEngine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What runs a model where that is not Millrace's own engine; as ``worker.engine`` of the
    configuration, which it goes before."""

    kind: EngineKind
    url: str = ""
    command: str = ""
    arguments: tuple[str, ...] = ()
    served_name: str = ""


class Parallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many devices compute the model together; as ``worker.engine.tensor_parallel``,
    ``pipeline_parallel`` and ``expert_parallel`` of the configuration."""

    tensor: int = 1
    pipeline: int = 1
    experts: bool = False


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    description: str = ""
    created: datetime.date = _LONG_AGO
    context_window_tokens: int | None = None
    pooling: EmbeddingPooling | None = None
    tiers: tuple[Tier, ...] = tuple(Tier)
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | Literal["none"] | None = None
    generation_config: GenerationConfig = GenerationConfig.AUTO
    prices: PriceBook = UNPRICED
    quantization: str | None = None
    speculation: str | bool | None = None
    parallel: Parallel = Parallel()
    engine: CatalogueEngine | None = None

    def __post_init__(self) -> None:
        if self.context_window_tokens is not None and self.context_window_tokens < 2:
            raise ValueError("context_window_tokens must be at least 2")
        if not self.tiers:
            raise ValueError("tiers must not be empty")


class ModelEntry(_Entry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model of the catalogue.

    ``source`` is the absolute path of a folder or of a GGUF file, an address in an object store
    (``s3://bucket/path``, ``gs://…`` or ``az://…``), or a hub id
    (``organisation/model[@revision]`` or ``organisation/model/file.gguf[@revision]``).
    ``context_window_tokens`` and ``pooling`` (of embeddings) None: what the checkpoint says.
    ``reasoning_format`` is how the model marks its thoughts (None: as its chat template shows), or
    ``none``: they are content. ``generation_config``: whether requests that do not say how they are
    sampled go by the checkpoint's generation_config.json. ``quantization``: what Millrace's own
    engine rounds the weights to when it loads them, where it is not told otherwise; likewise
    ``speculation``, whether it proposes tokens, and ``parallel``, over how many devices.
    """

    name: str

    @property
    def engine_kind(self) -> EngineKind:
        """What runs it, as far as the catalogue says: a GGUF file needs no word for llama.cpp."""
        if self.engine is not None:
            return self.engine.kind
        return EngineKind.LLAMACPP if self.is_gguf else EngineKind.REAL

    def engine_config(self, config: EngineConfig) -> EngineConfig:
        """The worker's settings, with what the catalogue says of this model's engine. A worker that
        was told of another kind than Millrace's own, of a quantization, a speculation or several
        devices, keeps to that. Raises ConfigError for one that the engine does not have."""
        if config.kind is EngineKind.REAL:
            given: dict[str, Any] = {"kind": self.engine_kind}
            if self.engine is not None:
                given |= {
                    name: value
                    for name in self.engine.__struct_fields__
                    if (value := getattr(self.engine, name))
                }
            config = msgspec.structs.replace(config, **given)
        config = self.described(config)
        check_quantization(config.quantization, config.kind)
        check_speculation(config.speculation, config.kind)
        check_parallel(
            config.tensor_parallel, config.pipeline_parallel, config.expert_parallel, config.kind
        )
        check_remote_stages(config.remote_stages, config.kind)
        check_transfer(config.transfer, config.transfer_address, config.kind)
        return config

    def described(self, config: EngineConfig) -> EngineConfig:
        """Settings of an engine that computes the model, with the quantization, the speculation and
        the devices that the catalogue says, where they say none."""
        given: dict[str, Any] = {}
        if config.quantization is None:
            given["quantization"] = self.quantization
        if config.speculation is None:
            given["speculation"] = self.speculation
        if config.tensor_parallel == config.pipeline_parallel == 1:
            given |= {
                "tensor_parallel": self.parallel.tensor,
                "pipeline_parallel": self.parallel.pipeline,
                "expert_parallel": self.parallel.experts or config.expert_parallel,
            }
        return msgspec.structs.replace(config, **given)

    @property
    def is_local(self) -> bool:
        """Whether ``source`` is a folder or a file."""
        return Path(self.source).is_absolute()

    @property
    def is_gguf(self) -> bool:
        """Whether ``source`` is a GGUF file, here or on the hub."""
        if self.is_local:
            return self.source.endswith(GGUF_ENDING)
        found = _HUB_ID.fullmatch(self.source)
        return found is not None and found["file"] is not None


class Catalogue:
    """The models that can be served, by name, and the routes that choose among them. Immutable.

    A route that leads to a model which is not there is left out.
    """

    def __init__(
        self, entries: Mapping[str, ModelEntry], routes: Mapping[str, Route] | None = None
    ) -> None:
        self._entries = dict(entries)
        known = self._entries.keys() | Versions(self._entries).models()
        self.routes = {
            name: route for name, route in (routes or {}).items() if known >= set(route.models)
        }

    def names(self) -> tuple[str, ...]:
        """In the order of the file."""
        return tuple(self._entries)

    def get(self, name: str) -> ModelEntry:
        """Raises ModelNotFoundError listing the names that there are."""
        entry = self._entries.get(name)
        if entry is None:
            raise ModelNotFoundError(
                f"There is no model {name!r:.200}. Models: {', '.join(self._entries) or 'none'}."
            )
        return entry

    def entry_for(self, path_or_name: str) -> ModelEntry:
        """The entry of that name; else one, unpriced, for a local folder, a GGUF file or an address
        in an object store (named after it) or for a hub id (named by it). Raises
        ModelNotFoundError, which says of a path what is wrong with it."""
        if path_or_name in self._entries:
            return self._entries[path_or_name]
        path = Path(path_or_name).expanduser()
        if path.is_dir() or (path.suffix == GGUF_ENDING and path.is_file()):
            source = absolute_source(path)
            name = source.name if path.is_dir() else model_name_of(path.name)
            return ModelEntry(name=checked_name(name), source=str(source))
        if is_address(path_or_name):
            name = path_or_name.rstrip("/").rpartition("/")[2]
            return ModelEntry(name=checked_name(name), source=path_or_name)
        self._check_is_no_path(path_or_name, path)
        if not _HUB_ID.fullmatch(path_or_name):
            return self.get(path_or_name)
        return ModelEntry(name=path_or_name, source=path_or_name)

    def _check_is_no_path(self, name: str, path: Path) -> None:
        """Raises ModelNotFoundError for what can only be meant as a path and leads to no model."""
        if path.is_file():
            raise ModelNotFoundError(
                f"{path} is a file; a model is a folder in Hugging Face layout, or a file whose "
                f"name ends in {GGUF_ENDING}."
            )
        hub_id = _HUB_ID.fullmatch(name)
        is_hub_file = hub_id is not None and hub_id["file"] is not None
        if name.startswith(_LOCAL_PREFIXES) or (name.endswith(GGUF_ENDING) and not is_hub_file):
            kind = "file" if name.endswith(GGUF_ENDING) else "folder"
            raise ModelNotFoundError(
                f"The {kind} {path} does not exist, and no model is called so. Models: "
                f"{', '.join(self._entries) or 'none'}."
            )

    def with_model(self, path_or_name: str) -> Catalogue:
        """This catalogue and ``entry_for(path_or_name)``, which takes the place of an entry of
        the same name."""
        entry = self.entry_for(path_or_name)
        return Catalogue(self._entries | {entry.name: entry}, self.routes)

    def router(self, policies: TierPolicies | None = None) -> Router:
        """What chooses a model for those who ask for a route; ``policies`` are the scheduler's, or
        what they are by default."""
        tiers = {name: entry.tiers for name, entry in self._entries.items()}
        versions = Versions(self._entries)
        for model in versions.models():
            # Whichever answers.
            every = [self._entries[one].tiers for one in versions.of(model)]
            tiers[model] = tuple(tier for tier in Tier if all(tier in one for one in every))
        return Router(self.routes, tiers, policies)

    def only(self, entries: Mapping[str, ModelEntry]) -> Catalogue:
        """These entries, and the routes among them."""
        return Catalogue(entries, self.routes)

    def write(self, file: Path) -> None:
        """Write it in the form that ``load_catalogue`` reads, for other processes: whole or not at
        all, since they may read it at any moment."""
        models = {
            name: {key: value for key, value in msgspec.to_builtins(entry).items() if key != "name"}
            for name, entry in self._entries.items()
        }
        data = {"models": models, "routes": msgspec.to_builtins(self.routes)}
        fresh = file.with_suffix(".new")
        fresh.write_bytes(msgspec.yaml.encode(data))
        fresh.replace(file)


def load_catalogue(path: str) -> Catalogue:
    """Read a models.yaml; "" is the built-in one.

    Raises ConfigError naming the file, the model and the key or value at fault.
    """
    file = Path(path).expanduser() if path else BUILT_IN
    try:
        data = msgspec.yaml.decode(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}.") from error
    if not isinstance(data, dict) or not isinstance(data.get("models"), dict):
        raise ConfigError(f"{file} must hold a mapping `models` from names to models.")
    unknown = [str(key) for key in data if key not in ("models", "routes")]
    if unknown:
        raise ConfigError(
            f"{file} has unknown keys: {', '.join(unknown)}; it takes `models` and `routes` only."
        )
    entries = {name: _entry(file, name, raw) for name, raw in data["models"].items()}
    routes = {} if data.get("routes") is None else data["routes"]
    if not isinstance(routes, dict):
        raise ConfigError(f"{file}: `routes` must be a mapping from names to routes.")
    return Catalogue(entries, {name: _route(file, name, routes[name], entries) for name in routes})


def _entry(file: Path, name: object, raw: Any) -> ModelEntry:
    where = f"{file}: model {name}"
    try:
        entry = msgspec.convert(raw, _Entry)
        fields = {field: getattr(entry, field) for field in entry.__struct_fields__}
        fields["source"] = _source(file.resolve().parent, entry.source)
        if isinstance(entry.speculation, str):
            folder = file.resolve().parent
            fields["speculation"] = with_path(entry.speculation, lambda path: _source(folder, path))
        whole = ModelEntry(name=checked_name(name), **fields)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{where}: {error}.") from error
    try:
        if whole.name != whole.source:  # a hub id's revision may be called anything
            check_label(whole.name)
        check_quantization(whole.quantization, whole.engine_kind)
        check_speculation(whole.speculation, whole.engine_kind)
        parallel = whole.parallel
        check_parallel(parallel.tensor, parallel.pipeline, parallel.experts, whole.engine_kind)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}") from error
    return whole


def _route(file: Path, name: object, raw: Any, entries: Mapping[str, ModelEntry]) -> Route:
    where, versions = f"{file}: route {name}", Versions(entries)
    try:
        route = msgspec.convert(raw, Route)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{where}: {error}.") from error
    taken = {*entries, *versions.models()}
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in taken:
        raise ConfigError(f"{where}: its name must be text without spaces, and no model's.")
    unknown = [model for model in route.models if model not in (*entries, *versions.models())]
    if unknown:
        raise ConfigError(
            f"{where}: there is no model {unknown[0]!r:.200}. Models: {', '.join(entries)}."
        )
    for tier, rule in route.tiers.items():
        model = {"small": route.small, "large": route.large}.get(str(rule))
        entry = entries.get(model or "") or entries.get(next(iter(versions.of(model or "")), ""))
        if entry is not None and tier not in entry.tiers:
            raise ConfigError(f"{where}: the tier {tier} may not use the model {model}.")
    return route


def _source(folder: Path, source: str) -> str:
    if source.startswith(_LOCAL_PREFIXES):
        return str(absolute_source(folder / Path(source).expanduser()))
    if is_address(source) or _HUB_ID.fullmatch(source):
        return source
    raise ValueError(
        f"source must be a folder (./folder, /folder), a GGUF file (./file.gguf), a hub id "
        f"(organisation/model) or an address (s3://, gs:// or az://), got {source!r}"
    )


def checked_name(name: object) -> str:
    """A name that a model can have. Raises ConfigError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"A model's name must be text without spaces, got {name!r:.200}.")
    if name in RESERVED_NAMES:
        raise ConfigError(f"The model name {name} is reserved; choose another.")
    return name

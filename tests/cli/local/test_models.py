"""Added and removed models: remembered changes, and failures of a change."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import msgspec
import pytest

from millrace.cli.local.control import AddModelRequest, ControlError, RemoveModelRequest
from millrace.cli.local.live import LiveSystem, ModelChanges, StartingModels, _wish
from millrace.cli.local.machine_memory import MemoryTooSmallError, check_memory
from millrace.cli.local.models import (
    AddedModel,
    SavedModels,
    catalogue_for,
    models_to_run,
    read_saved,
    with_removed,
    without,
    write_saved,
)
from millrace.cli.local.supervisor import StartError
from millrace.cli.main import main
from millrace.registry.catalogue import Catalogue, CatalogueEngine, ModelEntry, load_catalogue
from millrace.runtime.process import available_bytes
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError, MillraceError
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.waiting import eventually

_SIMULATED = CatalogueEngine(kind=EngineKind.SIMULATED)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def _added(path: Path, **fields: object) -> AddedModel:
    entry = ModelEntry(name=path.name, source=str(path))
    return AddedModel(entry=entry, **fields)  # type: ignore[arg-type]


def test_what_is_asked_for_is_logged_within_bounds() -> None:
    name = "x" * 5_000
    assert _wish(RemoveModelRequest("demo")) == "remove the model demo"
    for wish in (RemoveModelRequest(name), AddModelRequest(name=name, model=name)):
        assert len(_wish(wish)) < 450


def test_what_was_changed_is_remembered_exactly(tmp_path: Path, tiny: Path) -> None:
    assert read_saved(tmp_path) == SavedModels()
    prices = load_catalogue("").get("demo").prices
    entry = ModelEntry(name="t", source=str(tiny), prices=prices, engine=_SIMULATED)
    saved = SavedModels(added={"t": AddedModel(entry=entry, workers=3)}, removed=("demo",))
    write_saved(tmp_path, saved)
    assert read_saved(tmp_path) == saved
    assert (tmp_path / "models.json").stat().st_mode & 0o77 == 0
    (tmp_path / "models.json").write_text("{")
    with pytest.raises(ConfigError, match=r"malformed: .* add the models again"):
        read_saved(tmp_path)


def test_what_is_run_at_the_next_start(tmp_path: Path, tiny: Path) -> None:
    gone = tmp_path / "gone"
    saved = SavedModels(added={"tiny": _added(tiny), "gone": _added(gone)}, removed=("demo",))
    wanted, added, messages = models_to_run(None, "demo", saved)
    assert (wanted, list(added)) == ([], ["tiny"])
    assert "the model gone, added earlier, is left out: " in messages[0]
    assert models_to_run(["demo"], "demo", saved)[0] == ["demo"]
    only_removed = SavedModels(removed=("demo",))
    assert models_to_run(None, "demo", only_removed)[0] == ["demo"]  # there is no other
    assert without(saved, {"tiny", "demo"}) == SavedModels(added={"gone": _added(gone)})
    assert with_removed(with_removed(saved, "tiny"), "tiny").removed == ("demo", "tiny")


def test_an_added_model_is_run_by_what_runs_the_others_unless_it_has_its_own(
    tmp_path: Path, tiny: Path
) -> None:
    file = tmp_path / "models.yaml"
    both = {"a": _added(tiny), "b": _added(tiny, own_engine=True)}
    _, names = catalogue_for("", ["demo"], file, _SIMULATED, both)
    assert names == ("demo", "a", "b")
    written = load_catalogue(str(file))
    kinds = {name: written.get(name).engine_kind for name in names}
    assert kinds == {"demo": "simulated", "a": "simulated", "b": "real"}


def test_a_model_can_be_forgotten_while_nothing_runs(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_saved(tmp_path, SavedModels(added={"tiny": _added(tiny)}))
    assert main(["models", "remove", "other", "--data", str(tmp_path)]) == 2
    assert "Nothing runs on" in capsys.readouterr().err
    assert main(["models", "remove", "tiny", "--data", str(tmp_path)]) == 0
    assert read_saved(tmp_path) == SavedModels(removed=("tiny",))


def test_weights_that_do_not_fit(tiny: Path) -> None:
    size = (tiny / "model.safetensors").stat().st_size
    check_memory(tiny, 2, free_bytes=2 * size)
    with pytest.raises(MemoryTooSmallError, match=r"for each of 2 workers, and .* are free"):
        check_memory(tiny, 2, free_bytes=2 * size - 1)
    assert 0 < available_bytes() < 1 << 50


class Host:
    """The processes, which do as a test says."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.fails: Exception | None = None
        self.is_late = False
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def start_workers(self, model: str, count: int) -> None:
        self.did.append(f"start {count} of {model}")
        await self.goes_on.wait()
        if self.fails is not None:
            raise self.fails

    async def stop_workers(self, model: str) -> int:
        self.did.append(f"stop {model}")
        return 1

    async def serve_one(self, model: str) -> None:
        self.did.append(f"ask {model}")

    async def wait_until_idle(self, model: str) -> None:
        self.did.append(f"wait for {model}")

    async def wait_until_heard(self, part: str, model: str, *, is_there: bool) -> None:
        self.did.append(f"{part} {'knows' if is_there else 'forgets'} {model}")
        if self.is_late:
            raise TimeoutError(f"{part}-1 did not read the new catalogue")


class System:
    """A system that serves the demo model."""

    def __init__(self, data: Path) -> None:
        (data / "run").mkdir()
        self.data = data
        self.host = Host()
        known = load_catalogue("")
        models = StartingModels(
            known=known, entries={"demo": known.get("demo")}, saved=SavedModels()
        )
        self.changes = ModelChanges(data, models, cast(LiveSystem, self.host))
        self.changes.write()
        self.said: list[str] = []

    async def add(self, path: Path, name: str = "new") -> str:
        request = AddModelRequest(name=name, model=str(path))
        return (await self.changes.add(request, self.said.append)).text

    def catalogue(self, file: str) -> Catalogue:
        return load_catalogue(str(self.data / "run" / f"{file}.yaml"))

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of models that gateways offer and of models known to schedulers."""
        return self.catalogue("models").names(), self.catalogue("known-models").names()


async def test_schedulers_know_a_model_before_and_after_gateways_offer_it(
    tmp_path: Path, tiny: Path
) -> None:
    system = System(tmp_path)
    assert await system.add(tiny) == "new is served, by 1 worker"
    assert system.names() == (("demo", "new"), ("demo", "new"))
    await system.changes.remove("new", system.said.append)
    assert system.names() == (("demo",), ("demo",))
    assert system.host.did == [
        *("scheduler knows new", "start 1 of new", "ask new", "gateway knows new"),
        *("gateway forgets new", "stop new", "scheduler forgets new"),
    ]


async def test_weights_are_rounded_as_the_command_says(tmp_path: Path, tiny: Path) -> None:
    system = System(tmp_path)
    request = AddModelRequest(name="new", model=str(tiny), quantization="int8")
    await system.changes.add(request, system.said.append)
    served = load_catalogue(str(tmp_path / "run" / "models.yaml"))
    assert served.get("new").quantization == "int8"
    assert read_saved(tmp_path).added["new"].entry.quantization == "int8"
    simulated = msgspec.structs.replace(request, name="other", engine=EngineKind.SIMULATED)
    with pytest.raises(ConfigError, match="quantization"):
        await system.changes.add(simulated, system.said.append)


async def test_versions_of_a_model_have_names_of_their_own(tmp_path: Path, tiny: Path) -> None:
    system = System(tmp_path)
    await system.add(tiny, "demo@v2")
    with pytest.raises(ConfigError, match="The version canary of 'demo@canary' is reserved"):
        await system.add(tiny, "demo@canary")
    await system.changes.remove("demo@v2", system.said.append, when_idle=True)
    assert system.host.did[-4:] == [
        "gateway forgets demo@v2",
        "wait for demo@v2",
        "stop demo@v2",
        "scheduler forgets demo@v2",
    ]


@pytest.mark.parametrize("error", [StartError("worker-2 ended"), MillraceError("odd")])
async def test_a_failed_change_changes_nothing(
    tmp_path: Path, tiny: Path, error: Exception
) -> None:
    system = System(tmp_path)
    system.host.fails = error
    with pytest.raises(MillraceError, match=str(error)):
        await system.add(tiny)
    assert system.host.did[-1] == "stop new"
    assert system.names() == (("demo",), ("demo",))
    assert read_saved(tmp_path) == SavedModels()
    system.host.fails = None
    await system.add(tiny)  # the name is free


async def test_one_change_at_a_time(tmp_path: Path, tiny: Path) -> None:
    system = System(tmp_path)
    system.host.goes_on.clear()
    adding = asyncio.create_task(system.add(tiny))
    await eventually(lambda: "start 1 of new" in system.host.did)
    assert system.names() == (("demo",), ("demo", "new"))
    states = {one.name: one.state for one in system.changes.report(lambda _: 1, may_rest=False)}
    assert states == {"demo": "serving", "new": "starting"}
    with pytest.raises(ControlError, match="the system is adding new; try again"):
        await system.add(tiny, "another")
    system.host.goes_on.set()
    await adding


async def test_a_gateway_that_hangs_holds_nobody_up(tmp_path: Path, tiny: Path) -> None:
    system = System(tmp_path)
    await system.add(tiny)
    system.host.is_late = True
    assert "is removed" in (await system.changes.remove("new", system.said.append)).text
    assert "gateway-1 did not read the new catalogue; continuing without" in system.said
    with pytest.raises(ControlError, match="scheduler-1 did not read the new catalogue"):
        await system.add(tiny)  # its jobs would be refused


def test_a_model_may_be_at_rest(tmp_path: Path) -> None:
    changes = System(tmp_path).changes
    assert [one.state for one in changes.report(lambda _: 0, may_rest=True)] == ["at rest"]
    assert [one.state for one in changes.report(lambda _: 0, may_rest=False)] == ["no worker"]


@pytest.mark.parametrize("kind", list(EngineKind))
@pytest.mark.parametrize("command", [None, "", "a/b.py:C", "llama-server"])
def test_what_is_not_said_of_an_engine_stays_unsaid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: EngineKind, command: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-server").mkdir()  # a name is none of the current folder's files
    asked: list[AddModelRequest] = []
    monkeypatch.setattr(
        "millrace.cli.operate.models.change", lambda _data, request: asked.append(request)
    )
    line = ["models", "add", "new", "--model", "demo", "--engine", kind]
    line += [] if command is None else ["--engine-command", command]
    is_served = kind is EngineKind.OPENAI
    line += ["--engine-url", "http://127.0.0.1:1/v1"] if is_served else []
    code = main(line)
    if command and kind in (EngineKind.REAL, EngineKind.SIMULATED):
        assert code == 2
        return
    expected = str(tmp_path / command) if command and "/" in command else command or ""
    assert [(one.model, one.engine, one.engine_command) for one in asked] == [
        ("demo", kind, expected)
    ]

"""The parts of a run, each in a process of its own: one that fails leaves memory and device to the
next."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.connection
import sys
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.gpu.report import (
    ADAPTERS,
    KERNELS,
    LLAMA_8B,
    QWEN_06B,
    QWEN_8B,
    SPECULATION,
    TOKENS,
    TRANSFORMERS,
    Ceilings,
    Environment,
    Row,
    RunSettings,
)

Item = Row | Ceilings | Environment
Keep = Callable[[Item], None]

# How long a section may go on with what it has begun, behind the time that it is given.
_GRACE_S = 10.0
# Loaded once, then there in every section's process; none of them touches a device.
_PRELOADED = ["torch", "triton", "benchmarks.gpu.scope"]
# These may look for a device, which is then lost to the processes: without one that is no matter.
_SMOKE_PRELOADED = [
    *_PRELOADED,
    "transformers.generation.continuous_batching",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
]


class Section(NamedTuple):
    """``function`` of the module ``benchmarks.gpu.<module>`` is called with a scope, and with
    ``argument`` if there is one. ``limit_s`` is its share of the run."""

    name: str
    module: str
    limit_s: float
    argument: str = ""
    function: str = "run"


CEILINGS = Section("ceilings", "ceilings", 15)
# What matters most comes first, so that a run that is cut has it.
SECTIONS = (
    CEILINGS,
    Section(KERNELS, "kernels", 95),
    Section(LLAMA_8B, "engine", 80, LLAMA_8B),
    Section(QWEN_06B, "engine", 45, QWEN_06B),
    Section(QWEN_8B, "engine", 65, QWEN_8B),
    Section(TRANSFORMERS + QWEN_06B, "transformers_loads", 30, QWEN_06B),
    Section(TRANSFORMERS + QWEN_8B, "transformers_loads", 35, QWEN_8B),
    Section(TOKENS, "tokens", 30),
    Section("ablation", "ablation", 25),
    Section("quantized", "quantized_kernels", 60),
    Section(TRANSFORMERS + LLAMA_8B, "transformers_loads", 30, LLAMA_8B),
    Section(ADAPTERS, "adapters", 180),
    Section(SPECULATION, "speculation", 90),
)
# A sweep takes as long as all of these together, so it has to be named.
TILES = Section("tiles", "kernels", 520, function="sweep")


def chosen(names: list[str]) -> list[Section]:
    """Sections whose names begin with one of ``names``, all but the tiles without any; the ceilings
    always.

    Raises ValueError for a name that no section has.
    """
    if not names:
        return list(SECTIONS)
    sections = (*SECTIONS, TILES)
    for name in names:
        if not any(section.name.startswith(name) for section in sections):
            raise ValueError(f"no section is called {name}")
    return [
        section
        for section in sections
        if section is CEILINGS or section.name.startswith(tuple(names))
    ]


class SectionProcesses:
    """Runs sections one after the other, each in a fork of a process that has loaded torch."""

    def __init__(self, settings: RunSettings) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_SMOKE_PRELOADED if settings.smoke else _PRELOADED)
        self._settings = settings

    def run(
        self,
        section: Section,
        limit_s: float,
        ceilings: Ceilings | None,
        earlier: list[Row],
        keep: Keep,
    ) -> None:
        """Run a section for ``limit_s`` and a moment at most; whatever happens becomes rows."""
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_run_here,
            args=(sender, section, self._settings, limit_s, ceilings, earlier),
        )
        process.start()
        sender.close()
        try:
            ended = _receive(receiver, time.monotonic() + limit_s + _GRACE_S, keep)
            if not ended:
                reason = f"ended after {limit_s + _GRACE_S:.0f} s"
                keep(Row(section=section.name, name="the rest of it", failure=reason))
            else:
                process.join(_GRACE_S)
        finally:
            exit_code = process.exitcode
            process.kill()
            process.join()
        if exit_code:
            reason = f"its process ended with exit code {exit_code}"
            keep(Row(section=section.name, name="the rest of it", failure=reason))


def _receive(
    receiver: multiprocessing.connection.Connection, deadline_s: float, keep: Keep
) -> bool:
    """Keep what comes; whether the other side was done, or gone, by ``deadline_s``."""
    while receiver.poll(max(0.0, deadline_s - time.monotonic())):
        try:
            keep(receiver.recv())
        except EOFError:
            return True
    return False


def _run_here(
    sender: multiprocessing.connection.Connection,
    section: Section,
    settings: RunSettings,
    limit_s: float,
    ceilings: Ceilings | None,
    earlier: list[Row],
) -> None:
    """The whole life of a section's process."""
    from benchmarks.gpu.environment import environment
    from benchmarks.gpu.scope import Scope, describe

    scope = Scope(
        section.name,
        settings._replace(sweeps=section.name == TILES.name),
        deadline_s=time.monotonic() + limit_s,
        ceilings=ceilings,
        earlier=earlier,
        hand_over=sender.send,
    )
    try:
        if section is CEILINGS or section.name == CEILINGS.name:
            sender.send(environment(scope.device))
        module = importlib.import_module(f"benchmarks.gpu.{section.module}")
        run = getattr(module, section.function)
        run(scope, section.argument) if section.argument else run(scope)
    except Exception as error:  # noqa: BLE001 (the run goes on with the next section)
        traceback.print_exc()
        scope.fail("the rest of it", describe(error))
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()

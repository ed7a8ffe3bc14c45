"""Sections of a run, each in a process of its own, so that a failed one frees memory and device."""

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

# Time that a section may exceed its limit to finish its current work.
_GRACE_S = 10.0
# Loaded once and inherited by every section's process; no module touches a device.
_PRELOADED = ["torch", "triton", "benchmarks.gpu.scope"]
# These may initialise a device, which its child processes cannot use; without a device they may.
_SMOKE_PRELOADED = [
    *_PRELOADED,
    "transformers.generation.continuous_batching",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
]


class Section(NamedTuple):
    """Section: ``function`` of the module ``benchmarks.gpu.<module>``, called with a scope.

    ``argument`` is passed if there is one. ``limit_s`` is its share of the run.
    """

    name: str
    module: str
    limit_s: float
    argument: str = ""
    function: str = "run"


CEILINGS = Section("ceilings", "ceilings", 15)
# The most important sections come first, in case a run is interrupted.
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
# A sweep takes as long as all other sections together, so it must be named.
TILES = Section("tiles", "kernels", 520, function="sweep")


def chosen(names: list[str]) -> list[Section]:
    """Return the sections whose names begin with one of ``names``, and always the ceilings.

    Without names, return all except the tiles.

    Raises:
        ValueError: No section has such a name.
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
    """Runner of sections one after another, each in a fork of a process that has loaded torch."""

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
        """Run a section for at most ``limit_s`` and a moment; any failure becomes rows."""
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
    """Keep received rows; return whether the section was done, or gone, by ``deadline_s``."""
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
    """Run a section's process."""
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

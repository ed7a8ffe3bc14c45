"""Figures of all systems side by side."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from benchmarks.engine.ceilings import Ceilings
from benchmarks.peers.loads import MILLRACE_ENGINE, Load
from benchmarks.support.figures import Figures

MILLRACE = "millrace"


class Report(msgspec.Struct, kw_only=True):
    """Report: ``figures`` by load, then system; ``failures`` has failed systems' reasons."""

    ceilings: Ceilings
    figures: dict[str, dict[str, Figures]] = {}
    failures: dict[str, str] = {}

    def add(self, load: str, system: str, figures: Figures) -> None:
        self.figures.setdefault(load, {})[system] = figures

    def ratios(self) -> dict[str, dict[str, float]]:
        """Return Millrace's tokens per second through the bus divided by each other system's."""
        return {load: _ratios(systems) for load, systems in self.figures.items()}

    def content(self) -> dict[str, object]:
        """Return everything, with the ratios."""
        return {**msgspec.to_builtins(self, str_keys=True), "ratios": self.ratios()}


def _ratios(systems: Mapping[str, Figures]) -> dict[str, float]:
    if MILLRACE not in systems:
        return {}
    own = systems[MILLRACE].tokens_per_s
    return {
        name: own / figures.tokens_per_s for name, figures in systems.items() if name != MILLRACE
    }


def table(load: Load, report: Report) -> list[str]:
    """Format one load: a line for each system, then the machine's bounds."""
    systems = report.figures.get(load.name, {})
    ratios = _ratios(systems)
    width = max((len(name) for name in systems), default=0)
    lines = [
        f"{load.name}",
        f"  {'':{width}}  tokens/s  TTFT p50     p99   ITL p50     p99 ms   millrace over it",
    ]
    for name, figures in systems.items():
        ratio = f"{ratios[name]:.2f}x" if name in ratios else ""
        lines.append(
            f"  {name:{width}}  {figures.tokens_per_s:8.1f}  {figures.ttft_p50_ms:8.1f}"
            f"{figures.ttft_p99_ms:8.1f}  {figures.itl_p50_ms:8.2f}{figures.itl_p99_ms:8.2f}"
            f"{ratio:>16}".rstrip()
        )
    return [*lines, *_bounds(load, report.ceilings, systems.get(MILLRACE_ENGINE))]


def _bounds(load: Load, ceilings: Ceilings, engine: Figures | None) -> list[str]:
    gemm_ms = ceilings.gemm_only_ms.get(load.streams)
    if gemm_ms is None:
        return []
    bound = load.streams * 1e3 / gemm_ms
    lines = [f"  decoding at the speed of its linear maps alone: {bound:.0f} tokens/s"]
    if engine is not None:
        share = engine.itl_p50_ms / gemm_ms
        lines.append(
            f"  ITL p50 of {MILLRACE_ENGINE} over the {gemm_ms:.2f} ms of these: {share:.2f}x"
        )
    if load.streams == 1:
        lines.append(
            f"  reading all weights once a token: {ceilings.batch_1_tokens_per_s:.0f} tokens/s"
        )
    return lines

"""Metrics of a part as Prometheus reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from millrace.runtime.metrics_server import exposition, render

_LIBRARY = ("process_", "python_")
# What a label may be about. All of it is bounded by what we run and by words of our own.
LABELS = frozenset(
    {
        *("model", "worker", "version", "tier", "status", "code", "result", "why"),
        *("source", "outcome", "route", "limit", "topic", "table", "le", "device", "store"),
        "expert",
    }
)


class Scraped:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.help: dict[str, str] = {}
        self.kinds: dict[str, str] = {}
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            assert family.name not in self.kinds, f"{family.name} is exposed twice"
            self.kinds[family.name] = family.type
            self.help[family.name] = family.documentation
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self._values, f"{key} is exposed twice"
                self._values[key] = sample.value

    def value(self, name: str, **labels: str) -> float:
        """KeyError if there is no such sample."""
        return self._values[name, frozenset(labels.items())]

    @property
    def own(self) -> set[str]:
        """The names of families that are ours, counters without their suffix."""
        return {name for name in self.kinds if not name.startswith(_LIBRARY)}

    @property
    def sample_names(self) -> set[str]:
        """Return the sample names that an expression may use."""
        return {name for name, _ in self._values}

    def check(self) -> None:
        """AssertionError for a name, a help text or a label that is not as all others are."""
        for name in self.own:
            assert name.startswith("millrace_"), name
            assert self.help[name], f"{name} is not explained"
        for name, labels in self._values:
            if not name.startswith(_LIBRARY):
                assert {label for label, _ in labels} <= LABELS, (name, labels)


def exemplars_of(collector: Collector) -> dict[str, set[str]]:
    """Return the exemplars of a single collector."""
    registry = CollectorRegistry()
    registry.register(collector)
    body, _ = exposition(registry, [(b"accept", b"application/openmetrics-text")])
    return exemplars(body.decode())


def exemplars(text: str) -> dict[str, set[str]]:
    """The traces that an answer in OpenMetrics names, by the sample that names them. ValueError for
    text that is no OpenMetrics."""
    found: dict[str, set[str]] = {}
    for family in openmetrics_families(text):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            if sample.exemplar is not None:
                found.setdefault(sample.name, set()).add(sample.exemplar.labels["trace_id"])
    return found


def scrape(registry: CollectorRegistry) -> Scraped:
    scraped = Scraped(render(registry).decode())
    scraped.check()
    return scraped


def scrape_of(collector: Collector) -> Scraped:
    """Scrape a single collector."""
    registry = CollectorRegistry()
    registry.register(collector)
    return scrape(registry)

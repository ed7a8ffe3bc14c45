"""Which version of a model answers a request. Pure: no clock, no I/O.

``name@version`` in a catalogue is a version of ``name``; an entry called ``name`` is the one that
was there before there were others. ``name`` then stands for all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

from millrace.schemas.errors import ConfigError
from millrace.schemas.models.rollouts import Rollout, RolloutState

SEPARATOR = "@"
STABLE, CANARY, INITIAL = "stable", "canary", "initial"
# Names that stand for versions, so none is called so.
RESERVED = frozenset({STABLE, CANARY, INITIAL})
# Why a request got its model.
REASON = "version"
_SHARE_BITS = 53


def split(name: str) -> tuple[str, str]:
    """A version's model and its own label, which is empty for a name without one."""
    model, separator, label = name.rpartition(SEPARATOR)
    return (model, label) if separator and model and label else (name, "")


def check_label(name: str) -> None:
    """Raises ConfigError for ``name@version`` with a version that stands for another one."""
    label = split(name)[1]
    if label in RESERVED:
        raise ConfigError(
            f"The version {label} of {name!r:.200} is reserved; choose another. Reserved are "
            f"{', '.join(sorted(RESERVED))}."
        )


class Versions:
    """The versions among ``names`` of a catalogue. Immutable."""

    def __init__(self, names: Collection[str] = ()) -> None:
        grouped: dict[str, list[str]] = {}
        for name in names:
            model, label = split(name)
            # A hub id may have a revision that is called so; it is a model of its own.
            grouped.setdefault(name if label in RESERVED else model, []).append(name)
        self._by_model = {
            model: tuple(sorted(own, key=lambda name: name != model))
            for model, own in grouped.items()
            if own != [model]
        }

    def models(self) -> Collection[str]:
        """The names that stand for several versions, or for one of another name."""
        return self._by_model.keys()

    def of(self, model: str) -> tuple[str, ...]:
        """The versions of a model, the one that was there before others first; empty: it has
        none."""
        return self._by_model.get(model, ())

    def stands_for_several(self, name: str) -> bool:
        """Whether ``name`` is to be resolved: a model's, or ``model@stable`` and the like."""
        model, label = split(name)
        return name in self._by_model or (label in RESERVED and model in self._by_model)

    def names_of(self, model: str) -> tuple[str, ...]:
        """All names that are to be resolved to a version of a model."""
        return (model, *(f"{model}{SEPARATOR}{label}" for label in sorted(RESERVED)))

    def family(self, name: str) -> tuple[str, ...]:
        """The model that ``name`` is a version of, or stands for, and all versions of it; else
        ``name`` alone."""
        model = name if name in self._by_model else split(name)[0]
        return tuple(dict.fromkeys((model, *self.of(model)))) if self.of(model) else (name,)

    def model_of(self, name: str) -> str:
        """The model whose versions a name of ``stands_for_several`` stands for."""
        return name if name in self._by_model else split(name)[0]

    def stable(self, model: str, rollouts: Mapping[str, Rollout]) -> str:
        """The version that answers unless a rollout takes a share: the first while there has been
        no rollout. Where the one that should is not there any more, the one before it, then the
        first."""
        versions, rollout = self._by_model[model], rollouts.get(model)
        if rollout is None:
            return versions[0]
        liked = (rollout.stable, rollout.former)
        return next((one for one in liked if one in versions), versions[0])

    def resolve(self, name: str, key: str, rollouts: Mapping[str, Rollout]) -> str | None:
        """The version that answers a request for ``name``; None: there is none that it could stand
        for. Requests with the same ``key``, such as those of a session, get the same one while
        shares stay, and those who have the new version keep it while its share grows."""
        model, label = split(name)
        if name in self._by_model:
            model, label = name, ""
        stable, rollout = self.stable(model, rollouts), rollouts.get(model)
        candidate = _candidate(rollout, self._by_model[model])
        if label == INITIAL:
            return model if model in self._by_model[model] else None
        if label == CANARY:
            return candidate
        if label == STABLE or candidate is None or rollout is None:
            return stable
        return candidate if _place(model, key) < rollout.percent / 100 else stable

    def shares(self, model: str, rollouts: Mapping[str, Rollout]) -> dict[str, float]:
        """Which part of the model's requests each version answers, in percent."""
        shares = dict.fromkeys(self._by_model[model], 0.0)
        rollout = rollouts.get(model)
        candidate = _candidate(rollout, self._by_model[model])
        percent = 0.0 if candidate is None or rollout is None else rollout.percent
        shares[self.stable(model, rollouts)] = 100.0 - percent
        if candidate is not None:
            shares[candidate] = percent
        return shares


def _candidate(rollout: Rollout | None, versions: Collection[str]) -> str | None:
    if rollout is None or not rollout.is_open or rollout.candidate not in versions:
        return None
    return rollout.candidate if rollout.state is RolloutState.RUNNING else None


def _place(model: str, key: str) -> float:
    """Where in [0, 1) a key stands, evenly, for one model independently of the others."""
    digest = hashlib.blake2b(f"{model}\0{key}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> (64 - _SHARE_BITS)) / (1 << _SHARE_BITS)

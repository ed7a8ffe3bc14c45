"""Versions of a model, and the choice of the version for a request. Pure: no clock, no I/O.

``name@version`` in a catalogue is a version of ``name``. An entry called ``name`` is the initial
version. ``name`` then stands for all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

from millrace.schemas.errors import ConfigError
from millrace.schemas.models.rollouts import Rollout, RolloutState

SEPARATOR = "@"
STABLE, CANARY, INITIAL = "stable", "canary", "initial"
# Names that stand for versions, so no version may have them.
RESERVED = frozenset({STABLE, CANARY, INITIAL})
# Reason recorded with a request whose model was chosen by version.
REASON = "version"
_SHARE_BITS = 53


def split(name: str) -> tuple[str, str]:
    """Return a version's model and its label; the label is empty for a name without one."""
    model, separator, label = name.rpartition(SEPARATOR)
    return (model, label) if separator and model and label else (name, "")


def check_label(name: str) -> None:
    """Raise ConfigError for ``name@version`` with a reserved version label."""
    label = split(name)[1]
    if label in RESERVED:
        raise ConfigError(
            f"The version {label} of {name!r:.200} is reserved; choose another label. Reserved are "
            f"{', '.join(sorted(RESERVED))}."
        )


class Versions:
    """Versions among ``names`` of a catalogue. Immutable."""

    def __init__(self, names: Collection[str] = ()) -> None:
        grouped: dict[str, list[str]] = {}
        for name in names:
            model, label = split(name)
            # A hub id may have such a revision; it is a model of its own.
            grouped.setdefault(name if label in RESERVED else model, []).append(name)
        self._by_model = {
            model: tuple(sorted(own, key=lambda name: name != model))
            for model, own in grouped.items()
            if own != [model]
        }

    def models(self) -> Collection[str]:
        """Return the names that stand for several versions, or for one with another name."""
        return self._by_model.keys()

    def of(self, model: str) -> tuple[str, ...]:
        """Return the versions of a model, the initial version first; empty if it has none."""
        return self._by_model.get(model, ())

    def stands_for_several(self, name: str) -> bool:
        """Return whether ``name`` must be resolved: a model's name, or ``model@stable`` and the
        like.
        """
        model, label = split(name)
        return name in self._by_model or (label in RESERVED and model in self._by_model)

    def names_of(self, model: str) -> tuple[str, ...]:
        """Return all names that resolve to a version of a model."""
        return (model, *(f"{model}{SEPARATOR}{label}" for label in sorted(RESERVED)))

    def family(self, name: str) -> tuple[str, ...]:
        """Return the model that ``name`` is a version of or stands for, followed by all its
        versions; otherwise ``name`` alone.
        """
        model = name if name in self._by_model else split(name)[0]
        return tuple(dict.fromkeys((model, *self.of(model)))) if self.of(model) else (name,)

    def model_of(self, name: str) -> str:
        """Return the model of a name for which ``stands_for_several`` is true."""
        return name if name in self._by_model else split(name)[0]

    def stable(self, model: str, rollouts: Mapping[str, Rollout]) -> str:
        """Return the version that answers outside of a rollout's share.

        Without a rollout so far it is the first version. If the stable version no longer exists, it
        is the former one, and then the first.
        """
        versions, rollout = self._by_model[model], rollouts.get(model)
        if rollout is None:
            return versions[0]
        liked = (rollout.stable, rollout.former)
        return next((one for one in liked if one in versions), versions[0])

    def resolve(self, name: str, key: str, rollouts: Mapping[str, Rollout]) -> str | None:
        """Return the version that answers a request for ``name``; None if no version fits.

        Requests with the same ``key``, such as those of a session, get the same version while
        shares stay. A key that gets the new version keeps it while its share grows.
        """
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
        """Return the share of the model's requests that each version answers, in percent."""
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
    """Return a key's place in [0, 1), uniformly distributed and independent for each model."""
    digest = hashlib.blake2b(f"{model}\0{key}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> (64 - _SHARE_BITS)) / (1 << _SHARE_BITS)

"""What tells whether two hosts have the same checkpoint."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.checkpoints.fingerprint import weights_fingerprint

_DIGEST_BYTES = 8


class CheckpointIdentity(NamedTuple):
    """Of its weights, and of what its config.json says of their shapes."""

    fingerprint: str
    config_digest: str

    @classmethod
    def of(cls, path: Path) -> CheckpointIdentity:
        """Of the one at a path. Raises CheckpointError."""
        config = repr(read_model_config(path)).encode()
        digest = blake2b(config, digest_size=_DIGEST_BYTES).hexdigest()
        return cls(weights_fingerprint(path), digest)

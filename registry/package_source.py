"""Model sources of the kind ``pypi:``: a file or a folder in a wheel of a Python package index."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import NamedTuple, Self

PREFIX = "pypi:"
_SOURCE = re.compile(
    r"pypi:(?P<name>[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)==(?P<version>[\w.!+-]+)"
    r"/(?P<path>[^\s#?]+)#sha256=(?P<sha256>[0-9a-f]{64})"
)
FORM = f"{PREFIX}NAME==VERSION/PATH#sha256=DIGEST"


class PackageSource(NamedTuple):
    """File or folder in a wheel: ``path`` in the wheel ``name`` of ``version``.

    ``sha256`` is the wheel's digest in hexadecimal.
    """

    name: str
    version: str
    path: PurePosixPath
    sha256: str

    @classmethod
    def parse(cls, source: str) -> Self | None:
        """Read a source of the form ``FORM``; None if it has another form."""
        found = _SOURCE.fullmatch(source)
        if found is None:
            return None
        path = PurePosixPath(found["path"])
        if path.is_absolute() or ".." in path.parts:
            return None
        return cls(found["name"], found["version"], path, found["sha256"])

    @property
    def requirement(self) -> str:
        """The package as the package client names it."""
        return f"{self.name}=={self.version}"

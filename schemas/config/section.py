"""Base of every section of the configuration: frozen, refuses unknown keys."""

from __future__ import annotations

import msgspec

from millrace.schemas.redaction import shown


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section of the configuration. The text below a field is its documentation:
    ``docs/configuration.md`` is generated from it."""

    def __repr__(self) -> str:
        return shown(self)


class TlsSettings(Section, frozen=True, kw_only=True):
    """PEM files of a connection; setting any of them requires TLS."""

    ca_file: str = ""
    """Certificate authorities trusted for the server's certificate; empty: the machine's own."""

    certificate_file: str = ""
    """Client certificate, for servers that require one."""

    key_file: str = ""
    """Private key of the client certificate."""

"""What every section of the configuration is: frozen, and it refuses unknown keys."""

from __future__ import annotations

import msgspec

from millrace.schemas.redaction import shown


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text below a field is its documentation: ``docs/configuration.md`` is made from it."""

    def __repr__(self) -> str:
        return shown(self)


class TlsSettings(Section, frozen=True, kw_only=True):
    """PEM files of a connection; any of them demands TLS."""

    ca_file: str = ""
    """Authorities that may have signed the server's certificate; empty: those of this machine."""

    certificate_file: str = ""
    """Our own certificate, for servers that demand one."""

    key_file: str = ""
    """The private key of our own certificate."""

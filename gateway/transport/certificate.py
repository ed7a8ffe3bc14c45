"""Certificate of the gateway, used in handshakes, and replaced while streams continue."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from millrace.runtime.tls import load_own_certificate
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import ConfigError

_log = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 2.0


class Certificate:
    """Certificate that owns the context of a listener's handshakes. Handshakes after ``reload`` use
    the new files; open connections keep theirs.
    """

    def __init__(self, config: GatewayConfig) -> None:
        """Load the files. Raises ConfigError that names the invalid setting."""
        self._files = (config.certificate_file, config.key_file)
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.set_alpn_protocols(["http/1.1"])
        self._seen = self._look()
        load_own_certificate(self.context, "gateway", *self._files)

    def reload(self) -> bool:
        """Read the files again; return whether they can be used. If not, the certificate stays
        unchanged, and the log has the reason.
        """
        self._seen = self._look()
        try:
            load_own_certificate(self.context, "gateway", *self._files)
        except ConfigError as error:
            _log.error(
                "the new certificate is unusable; the old one stays", extra={"cause": error.message}
            )
            return False
        _log.info("the certificate was read again", extra={"file": self._files[0]})
        return True

    async def follow(self) -> None:
        """Reload whenever a file has changed, for ever. A pair that is half written is refused, and
        read again when the other half is there.
        """
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            if self._look() != self._seen:
                self.reload()

    def _look(self) -> tuple[object, ...]:
        """Return a fingerprint of the files' version, also behind symbolic links that change."""
        versions: list[object] = []
        for file in self._files:
            try:
                found = Path(file).stat()
            except OSError as error:
                versions.append(error.errno)
            else:
                versions.append((found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size))
        return tuple(versions)


def certificate_of(config: GatewayConfig) -> Certificate | None:
    """Return the certificate; None for a gateway without TLS. Raises ConfigError that names the
    invalid setting.
    """
    if not (config.certificate_file or config.key_file):
        return None
    return Certificate(config)


def front_url(config: GatewayConfig, port: int) -> str:
    """Return the URL of the gateway for this machine."""
    scheme = "https" if config.certificate_file else "http"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{port}"

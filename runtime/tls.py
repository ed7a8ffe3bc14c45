"""TLS of connections: contexts from PEM files, and causes of failed handshakes."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import NoReturn

from millrace.schemas.config.section import TlsSettings
from millrace.schemas.errors import (
    ConfigError,
    CredentialsRefusedError,
    MillraceError,
    UntrustedServerError,
)

# OpenSSL's codes for certificate errors.
_EXPIRED, _NOT_YET_VALID, _WRONG_HOST, _WRONG_ADDRESS = 10, 9, 62, 64
_PROBE_TIMEOUT_S = 5.0
_LATE_REFUSAL_S = 1.0
_UNKNOWN_ISSUER = frozenset({2, 18, 19, 20, 21})


class HungUpError(OSError):
    """Connection that the server ended right after the handshake, as some do without a
    certificate."""


def has_tls_files(files: TlsSettings) -> bool:
    return bool(files.ca_file or files.certificate_file or files.key_file)


def client_context(section: str, files: TlsSettings) -> ssl.SSLContext:
    """Return a client context.

    It verifies the server and its host name by ``<section>.ca_file``, by default by this machine's
    authorities, and shows the client certificate if one is set. Raises ConfigError, which names the
    setting.
    """
    authorities = None
    if files.ca_file:
        authorities = read_setting_file(f"{section}.ca_file", files.ca_file)
    try:
        context = ssl.create_default_context(cadata=authorities)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{section}.ca_file: {files.ca_file} holds no certificate in PEM form."
        ) from error
    if files.certificate_file or files.key_file:
        load_own_certificate(context, section, files.certificate_file, files.key_file)
    return context


def load_own_certificate(
    context: ssl.SSLContext, section: str, certificate_file: str, key_file: str
) -> None:
    """Load a certificate into ``context``, also one in use: later handshakes show it.

    Raises ConfigError, which names the setting. The context is then unchanged.
    """
    if not (certificate_file and key_file):
        given, lacking = "certificate_file", "key_file"
        if key_file:
            given, lacking = lacking, given
        raise ConfigError(f"{section}.{given} also needs {section}.{lacking}.")
    certificate = read_setting_file(f"{section}.certificate_file", certificate_file)
    key = read_setting_file(f"{section}.key_file", key_file)
    if "-----BEGIN CERTIFICATE-----" not in certificate:
        raise ConfigError(
            f"{section}.certificate_file: {certificate_file} holds no certificate in PEM form."
        )
    if "PRIVATE KEY-----" not in key:
        raise ConfigError(f"{section}.key_file: {key_file} holds no private key in PEM form.")

    def refuse_password() -> NoReturn:
        raise ConfigError(
            f"{section}.key_file: {key_file} is encrypted; give it without a password."
        )

    try:
        # A partly written pair must not leave a context in use with half of it.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            certificate_file, key_file, refuse_password
        )
        context.load_cert_chain(certificate_file, key_file, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"{section}.key_file: {key_file} is not the key of the certificate in "
                f"{certificate_file}."
            ) from error
        raise ConfigError(
            f"{section}.certificate_file: {certificate_file} and {key_file} cannot be used: "
            f"{error.reason or error}."
        ) from error
    except OSError as error:
        raise ConfigError(f"{section}.certificate_file cannot be read: {error}.") from error


def read_setting_file(setting: str, path: str) -> str:
    """Return the text of a file that a setting names. Raises ConfigError, which names both."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{setting}: {path} is not text.") from error
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"{setting}: {path} cannot be read: {why}.") from error


def handshake_refusal(
    error: BaseException,
    server: str,
    section: str,
    files: TlsSettings,
    *,
    wants_certificate: bool = False,
) -> MillraceError | None:
    """Return the error of a handshake if a retry does not help: no trust, or a refused certificate.

    None for all other errors. ``server`` is the server's name in a sentence. ``wants_certificate``:
    the server is known to have hung up for lack of a client certificate.
    """
    distrust = _distrust_of(error, section)
    if distrust is not None:
        return UntrustedServerError(f"{server} {distrust}.")
    if wants_certificate or _wants_other_certificate(error):
        ours = "our certificate" if files.certificate_file else "clients without a certificate"
        return CredentialsRefusedError(
            f"{server} does not take {ours}; set {section}.certificate_file and "
            f"{section}.key_file to those of a client that it trusts."
        )
    return None


def _distrust_of(error: BaseException, section: str) -> str | None:
    """Return why a server's certificate is not trusted, as words after its name; None otherwise."""
    cause = _find(error, ssl.SSLCertVerificationError)
    if not isinstance(cause, ssl.SSLCertVerificationError):
        return None
    code = cause.verify_code
    if code in _UNKNOWN_ISSUER:
        return (
            f"shows a certificate that no trusted authority signed ({cause.verify_message}); "
            f"set {section}.ca_file to the authority that did"
        )
    if code == _EXPIRED:
        return "shows a certificate that has expired; renew it there"
    if code == _NOT_YET_VALID:
        return "shows a certificate that is not valid yet; compare the clocks"
    if code in {_WRONG_HOST, _WRONG_ADDRESS}:
        return (
            f"shows a certificate for another name ({cause.verify_message}); address it by a name "
            "that is in its certificate"
        )
    return f"shows a certificate that is not trusted ({cause.verify_message})"


def _wants_other_certificate(error: BaseException) -> bool:
    """Return whether a server ended the connection as our certificate is missing or refused."""
    if isinstance(error, HungUpError):
        return True
    cause = _find(error, ssl.SSLError)
    reason = (cause.reason or "") if isinstance(cause, ssl.SSLError) else ""
    return "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason)


def handshake_error(host: str, port: int, context: ssl.SSLContext) -> Exception | None:
    """Return the error of a handshake, for clients that hide it; None if it succeeds.

    Blocks. Waits a moment, as a TLS 1.3 server may report a refusal late.
    """
    try:
        with (
            socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            # Send nothing: data could be lost together with the server's answer.
            secure.settimeout(_LATE_REFUSAL_S)
            if not secure.recv(1):
                return HungUpError("the server hung up after the handshake")
    except TimeoutError:
        return None
    except (OSError, ValueError) as error:
        return error
    return None


def _find(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    """Return the first error of a type among an error, its causes, and its arguments."""
    seen: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        one = waiting.pop(0)
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, kind):
            return one
        waiting += [one.__cause__, one.__context__, getattr(one, "reason", None), *one.args]
    return None

"""How two hosts find out that they know the same token, without saying it.

Who connects sends a hello with a number of its own that nobody has used before, and the other
answers with one of its own. Then each proves by both numbers that it knows the token, who connects
first. Everything has a fixed size, so that nothing of a stranger is taken for a length.
"""

from __future__ import annotations

import hmac
import secrets
import struct

from millrace.engine.parallel.group.remote.errors import StageError, StageRefusedError
from millrace.engine.parallel.group.remote.wire import VERSION
from millrace.engine.transfer.errors import PeerError
from millrace.engine.transfer.streams import Stream

_HELLO = struct.Struct("<8sI32s")
_MAGIC = b"mrstages"
_NONCE_BYTES = _PROOF_BYTES = 32
_REFUSED = bytes(_PROOF_BYTES)


def greet(stream: Stream, token: str) -> None:
    """By who connects. Raises StageError, StageRefusedError for another token or version."""
    own = secrets.token_bytes(_NONCE_BYTES)
    try:
        stream.send(_hello(own))
        other = _nonce(stream.receive(_HELLO.size))
        stream.send(_proof(token, b"stage", own, other))
        proof = stream.receive(_PROOF_BYTES)
    except PeerError as error:
        raise StageError(error.message) from error
    if not hmac.compare_digest(proof, _proof(token, b"lead", own, other)):
        raise StageRefusedError(
            "the worker there has another token: give both sides the same, in "
            "worker.engine.stages_token or a file that "
            "MILLRACE_WORKER__ENGINE__STAGES_TOKEN_FILE names."
        )


def welcome(stream: Stream, token: str) -> None:
    """By who is connected to. Raises StageError for who does not know the token, or is of another
    version."""
    own = secrets.token_bytes(_NONCE_BYTES)
    try:
        hello = stream.receive(_HELLO.size)
        # Said to another version, too, so that it can tell its user.
        stream.send(_hello(own))
        other = _nonce(hello)
        proof = stream.receive(_PROOF_BYTES)
        knows = hmac.compare_digest(proof, _proof(token, b"stage", other, own))
        stream.send(_proof(token, b"lead", other, own) if knows else _REFUSED)
    except PeerError as error:
        raise StageError(error.message) from error
    if not knows:
        raise StageRefusedError("it has another token: give both sides the same")


def _hello(nonce: bytes) -> bytes:
    return _HELLO.pack(_MAGIC, VERSION, nonce)


def _nonce(hello: bytes) -> bytes:
    """Raises StageRefusedError for the hello of another version, or of something else."""
    magic, version, nonce = _HELLO.unpack(hello)
    if magic != _MAGIC:
        raise StageRefusedError(
            "what answers there is no worker that waits for stages: look at the address, "
            "worker.engine.stages_address."
        )
    if version != VERSION:
        raise StageRefusedError(
            f"the other side speaks version {version} of this protocol and this one {VERSION}: "
            "run the same version of Millrace on both."
        )
    return bytes(nonce)


def _proof(token: str, role: bytes, of_stage: bytes, of_lead: bytes) -> bytes:
    """A role in it: nobody can prove anything with what the other side has proved."""
    return hmac.digest(token.encode(), _MAGIC + role + of_stage + of_lead, "sha256")

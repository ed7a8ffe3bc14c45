"""From a stored message to a Job: what a job must be, whoever published it."""

from __future__ import annotations

import msgspec

from bus import codec, subjects
from schemas.errors import MalformedMessageError
from schemas.jobs import MAX_LABEL_CHARACTERS, MAX_NAME_CHARACTERS, Job, Tier, check_length

MALFORMED = "malformed"
TOO_MANY_DELIVERIES = "too_many_deliveries"


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who to tell about a message that is not a job, as far as it can be read."""

    request_id: str = ""
    reply: str = ""
    tenant: str = "local"
    model: str = ""
    store_result: bool = False
    frames_as_json: bool = False

    def __post_init__(self) -> None:
        for name in ("request_id", "reply", "tenant"):
            check_length(name, getattr(self, name), MAX_NAME_CHARACTERS)
        check_length("model", self.model, MAX_LABEL_CHARACTERS)


class _Stated(msgspec.Struct, frozen=True):
    """The tier as written; absent, the subject's holds."""

    tier: str | None = None


_OWNER: codec.Codec[Owner] = codec.Codec(Owner)
_STATED: codec.Codec[_Stated] = codec.Codec(_Stated)


def read_job(subject: str, payload: bytes, content_type: str | None, stored_ns: int) -> Job:
    """The job in a message of the stream JOBS.

    The model in the body must be the subject's, and so must the tier if the body states one. A
    job without ``received_ns`` was received when it was stored; a JSON job's listener reads JSON.
    Raises MalformedMessageError.
    """
    job = codec.JOB.decode(payload, content_type)
    try:
        model, tier = subjects.model_and_tier(subject)
        subject_tier = Tier(tier)
    except ValueError as error:
        raise MalformedMessageError(f"{subject} is not jobs.<model>.<tier>") from error
    if job.model != model:
        raise MalformedMessageError("the job's model is not the one that its subject names")
    changes: dict[str, object] = {}
    if job.tier != subject_tier:
        if _STATED.decode(payload, content_type).tier is not None:
            raise MalformedMessageError("the job's tier is not the one that its subject names")
        changes["tier"] = subject_tier
    if job.received_ns == 0:
        changes["received_ns"] = stored_ns
    if codec.is_json(content_type):
        changes["frames_as_json"] = True
    return msgspec.structs.replace(job, **changes) if changes else job


def read_owner(payload: bytes, content_type: str | None) -> Owner:
    """Whatever can be read of who published a malformed job; empty where nothing can."""
    try:
        owner = _OWNER.decode(payload, content_type)
    except MalformedMessageError:
        return Owner()
    if codec.is_json(content_type):
        return msgspec.structs.replace(owner, frames_as_json=True)
    return owner


def owner_of(job: Job) -> Owner:
    return Owner(
        request_id=job.request_id,
        reply=job.reply,
        tenant=job.tenant,
        model=job.model,
        store_result=job.store_result,
        frames_as_json=job.frames_as_json,
    )

"""Jobs as services publish them: fields of a chat or completion body and of a job on one level."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec

from millrace.schemas.jobs import MAX_NAME_CHARACTERS, Source, Tier
from millrace.schemas.notices import NOTICE_NAME, Notices
from millrace.schemas.openai import ChatCompletionRequest, CompletionRequest

REQUEST_ID = (
    f"request_id must be a string of 1 to {MAX_NAME_CHARACTERS} characters; keep ids of your own "
    "that are numbers as strings"
)


class JobFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a job outside its body. They mean the same as in ``Job``.

    ``deadline`` is the time of ``deadline_ns`` in ISO 8601 with an offset from UTC. A missing tier
    or tenant is taken from the subject.
    """

    request_id: str
    reply: str = ""
    batch_frames: bool = False
    frames_as_json: bool = False
    store_result: bool = False
    tenant: str = "local"
    tier: Tier = Tier.FREE
    source: Source = Source.NATS
    model_requested: str = ""
    route_reason: str = ""
    received_ns: int = 0
    deadline_ns: int | None = None
    deadline: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    traceparent: str = ""
    keep_transcript: bool = False
    key_id: str = ""
    adapter: str = ""
    adapter_version: str = ""
    notices: Notices = msgspec.field(name=NOTICE_NAME, default=())


def _published(name: str, doc: str, body: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a struct with the fields of ``body`` and ``JobFields``."""
    fields: list[Any] = [
        (one.name, one.type, msgspec.field(name=one.encode_name, default=one.default))
        for one in msgspec.structs.fields(JobFields)
    ]
    return msgspec.defstruct(
        name,
        fields,
        bases=(body,),
        namespace={"__doc__": doc},
        frozen=True,
        kw_only=True,
        forbid_unknown_fields=True,
    )


ChatJob = _published(
    "ChatJob",
    """Job with the body of ``POST /v1/chat/completions``. ``model`` is the subject's; ``stream``
    and ``stream_options`` have no effect. Its answer is told apart: content, thoughts and tool
    calls. ``n`` above 1, ``use_beam_search``, ``server_tools``, ``session_id``, ``session_keep``
    and ``return_token_ids`` raise an error that names them.""",
    ChatCompletionRequest,
)
CompletionJob = _published(
    "CompletionJob",
    """Job with the body of ``POST /v1/completions`` and one prompt. ``max_tokens`` defaults to the
    rest of the model's context window. ``n`` above 1, ``use_beam_search``, ``echo`` and
    ``return_token_ids`` raise an error that names them.""",
    CompletionRequest,
)

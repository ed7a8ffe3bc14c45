"""``millrace publish``: publish a job on the bus, as any service does."""

from __future__ import annotations

import argparse
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.cli.arguments import path_or_name, seconds_to_wait, whole_number
from millrace.cli.endpoints import add_data_argument, bus_of
from millrace.schemas.errors import ConfigError, ParameterError

if TYPE_CHECKING:
    from millrace.schemas.jobs import Job

TIERS = ("enterprise", "pro", "free", "batch")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace publish``."""
    parser = subparsers.add_parser(
        "publish",
        help="publish a generation job on the bus",
        description="Publish a job and wait for its result. The answer goes to stdout, the "
        "request id to stderr; with --no-wait the id goes to stdout and the result is kept for "
        "millrace result.",
    )
    what = parser.add_argument_group("the job")
    what.add_argument("--model", metavar="NAME", help="default: the model of --body, else demo")
    what.add_argument("--adapter", default="", metavar="NAME", help="a LoRA adapter of the model")
    prompt = what.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="what to ask")
    prompt.add_argument(
        "--file", type=path_or_name, metavar="F", help="read the prompt from file F (- is stdin)"
    )
    prompt.add_argument(
        "--body",
        type=path_or_name,
        metavar="F",
        help="read the body of a chat completion, in JSON, from file F (- is stdin); it may have "
        "tools, and the job's other options are added to it",
    )
    what.add_argument("--raw", action="store_true", help="a plain prompt, not a chat message")
    what.add_argument(
        "--max-tokens", type=whole_number, help="default: the rest of the model's context window"
    )
    what.add_argument("--temperature", type=float, help="default: the model's")
    what.add_argument("--seed", type=int, help="default: drawn from the request id")
    what.add_argument("--tier", choices=TIERS, default="free", help="default: %(default)s")
    answer = parser.add_argument_group("the answer")
    waiting = answer.add_mutually_exclusive_group()
    waiting.add_argument("--stream", action="store_true", help="print the text as it comes")
    waiting.add_argument("--no-wait", action="store_true", help="print the id and exit at once")
    add_bus_arguments(parser)
    parser.set_defaults(handler=run)


def add_bus_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of commands that wait for a tenant's job."""
    group = parser.add_argument_group("whose it is, and where")
    group.add_argument("--tenant", default="local", help="default: %(default)s")
    group.add_argument(
        "--timeout",
        type=seconds_to_wait,
        default=120.0,
        metavar="S",
        help="seconds to wait for the result (default: %(default)s)",
    )
    group.add_argument("--nats", metavar="URL", help="the server to use instead")
    add_data_argument(group)


def run(arguments: argparse.Namespace) -> int:
    """Publish the job. Return 0 once it is answered (or stored, with --no-wait), 1 if it failed or
    took too long."""
    import uvloop

    job = build_job(arguments)
    return uvloop.run(_publish(job, arguments))


def build_job(arguments: argparse.Namespace) -> Job:
    """Build the job of the arguments. Raises ParameterError for a bad value."""
    from millrace.bus import codec
    from millrace.schemas.jobs import Job, Source, Tier
    from millrace.schemas.sampling import SamplingOptions
    from millrace.schemas.tenants import own_reply

    body = _read_body(arguments)
    model = arguments.model or body.get("model") or "demo"
    request_id = f"job-{uuid.uuid4().hex}"
    check_names(request_id=request_id, tenant=arguments.tenant)
    options = {
        name: getattr(arguments, name)
        for name in ("max_tokens", "temperature", "seed")
        if getattr(arguments, name) is not None
    }
    try:
        SamplingOptions(**options)
        return Job(
            request_id=request_id,
            model=model,
            model_requested=_requested(model, arguments.adapter),
            adapter=arguments.adapter,
            body=codec.encode(body | options),
            reply=own_reply(arguments.tenant, request_id) if arguments.stream else "",
            store_result=True,
            tenant=arguments.tenant,
            tier=Tier(arguments.tier),
            source=Source.NATS,
            received_ns=time.time_ns(),
        )
    except ValueError as error:
        # The model name with an adapter consists of both options.
        why = str(error).replace("model_requested", "--model and --adapter together")
        raise ParameterError("job", f"the job is not valid: {why}") from error


def check_names(**names: str) -> None:
    """Raise ParameterError for a name that has no subject on the bus."""
    from millrace.schemas.jobs import MAX_NAME_CHARACTERS, check_length

    for name, value in names.items():
        if not value:
            raise ParameterError(name, f"{name} must not be empty")
        try:
            check_length(name, value, MAX_NAME_CHARACTERS)
        except ValueError as error:
            raise ParameterError(name, str(error)) from error


def _requested(model: str, adapter: str) -> str:
    """Return the model name as HTTP clients write it."""
    from millrace.schemas.models.adapters import SEPARATOR

    return f"{model}{SEPARATOR}{adapter}" if adapter else model


async def _publish(job: Job, arguments: argparse.Namespace) -> int:
    from millrace.cli.requests.answers import print_result, stream_answer

    async with bus_of(arguments, "millrace-publish") as bus:
        if arguments.no_wait:
            await bus.jobs.publish(job)
            print(job.request_id)
            return 0
        print(job.request_id, file=sys.stderr)
        if arguments.stream:
            return await stream_answer(bus, job, arguments.timeout)
        await bus.jobs.publish(job)
        return await print_result(bus, job.tenant, job.request_id, arguments.timeout)


def _read_body(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read the body of a chat, or with ``--raw`` of a completion.

    Raises ConfigError for a file that cannot be read or has no such body, and for ``--raw``
    together with ``--body``.
    """
    if arguments.body is None:
        text = _read(arguments.file) if arguments.prompt is None else str(arguments.prompt)
        if arguments.raw:
            return {"prompt": text}
        return {"messages": [{"role": "user", "content": text}]}
    if arguments.raw:
        raise ConfigError(
            "--raw does not go with --body: give the body of a completion, with prompt"
        )
    import msgspec

    from millrace.runtime.json.tolerant import without_mark
    from millrace.schemas.published_jobs import JobFields

    text = without_mark(_read(arguments.body))
    try:
        body = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{arguments.body} is not the body of a chat: {error}") from error
    for name in sorted(body.keys() & set(JobFields.__struct_encode_fields__)):
        raise ConfigError(f"{arguments.body} sets {name}; use this command's option instead")
    if not isinstance(body.get("model", ""), str):
        raise ConfigError(f"{arguments.body}: model must be text")
    return body


def _read(file: str) -> str:
    try:
        if file == "-":
            return sys.stdin.read()
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error

"""``millrace result``: print the result of a published job."""

from __future__ import annotations

import argparse

from millrace.cli.endpoints import bus_of
from millrace.cli.requests.publish import add_bus_arguments, check_names


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace result``."""
    parser = subparsers.add_parser(
        "result",
        help="fetch the result of a published job",
        description="Print the result of a job, and wait for it if it is not stored yet. Results "
        "are kept for a day.",
    )
    parser.add_argument("request_id", metavar="REQUEST_ID")
    add_bus_arguments(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the result; return 0, or 1 if the request failed or has no result in time.

    Raises ParameterError for an invalid name.
    """
    import uvloop

    check_names(request_id=arguments.request_id, tenant=arguments.tenant)
    return uvloop.run(_fetch(arguments))


async def _fetch(arguments: argparse.Namespace) -> int:
    from millrace.cli.requests.answers import print_result

    async with bus_of(arguments, "millrace-result") as bus:
        return await print_result(bus, arguments.tenant, arguments.request_id, arguments.timeout)

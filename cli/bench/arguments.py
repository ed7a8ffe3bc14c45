"""Command line of ``millrace bench``."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from millrace.cli.arguments import (
    SPREAD,
    add_report_arguments,
    as_path,
    check_folders,
    parse_slo,
    path_or_name,
    seconds,
    whole_number,
)
from millrace.schemas.errors import ConfigError

if TYPE_CHECKING:
    from millrace.bench.settings import LoadSettings

_DEFAULT_URL = "http://127.0.0.1:8000"
_DEFAULT_DURATION_S = 30.0
_KEY_VARIABLE = "OPENAI_API_KEY"
_MAX_PROCESSES = 256
_DESCRIPTION = """\
Send load to an OpenAI-compatible server (or to Millrace's WebSocket), measure what its clients see,
and say what it was: TTFT, inter-token latency, throughput, goodput under an SLO, by percentile and
over time.

With --rate requests arrive at random (open loop) and every latency counts from when a request was
due, so a server that stalls cannot hide it by holding its clients up. With --concurrency a fixed
number of clients each send their next request when the one before is answered (closed loop).
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace bench``."""
    parser = subparsers.add_parser(
        "bench",
        help="load a server and measure the clients' latencies",
        description=_DESCRIPTION,
    )
    _add_server(parser.add_argument_group("the server"))
    _add_load(parser.add_argument_group("the load"))
    _add_prompts(parser.add_argument_group("the prompts"))
    _add_results(parser.add_argument_group("the results"))
    parser.set_defaults(handler=run)


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--url", default=_DEFAULT_URL, help="base URL (default: %(default)s)")
    group.add_argument(
        "--api",
        choices=("chat", "completions", "websocket"),
        default="chat",
        help="OpenAI's API over SSE, or millrace.v1 (default: %(default)s)",
    )
    group.add_argument("--model", default="", help="default: the first that the server lists")
    group.add_argument("--api-key", help=f"default: ${_KEY_VARIABLE}, if it is set")
    group.add_argument("--header", action="append", default=[], metavar="NAME: VALUE")
    group.add_argument(
        "--timeout", default="600s", help="timeout of one request (default: %(default)s)"
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rate", type=float, metavar="R", help="open loop: requests per second")
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="SHAPE",
        help="shape of the gamma distributed gaps of --rate; 1 is Poisson, lower is burstier",
    )
    group.add_argument("--concurrency", type=whole_number, metavar="N", help="closed loop: clients")
    group.add_argument(
        "--duration", metavar="TIME", help="length of the load, such as 30s or 5m (default: 30s)"
    )
    group.add_argument(
        "--requests",
        type=whole_number,
        metavar="N",
        help="number of requests, instead of --duration",
    )
    group.add_argument(
        "--warm-up",
        default="0s",
        metavar="TIME",
        help="length of the load before it that is not measured",
    )
    group.add_argument(
        "--drain",
        default="30s",
        metavar="TIME",
        help="longest wait for answers after the load (default: %(default)s)",
    )
    group.add_argument(
        "--processes",
        type=whole_number,
        default=1,
        metavar="N",
        help="number of load processes (default: 1)",
    )
    group.add_argument("--seed", type=int, default=0, help="seed of arrivals, prompts and lengths")


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset",
        type=path_or_name,
        metavar="FILE.jsonl",
        help='lines {"messages": […]} or {"prompt": "…"}, each with "max_tokens" if it likes',
    )
    group.add_argument(
        "--input-tokens",
        default="128",
        metavar="SPREAD",
        help=f"of synthetic prompts: {SPREAD} (default: %(default)s)",
    )
    group.add_argument(
        "--output-tokens",
        default="64",
        metavar="SPREAD",
        help="max_tokens, in the same forms (default: %(default)s)",
    )
    group.add_argument(
        "--shared-prefix-tokens",
        type=whole_number,
        default=0,
        metavar="N",
        help="tokens of the input that all prompts begin with",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="ignore the end of sequence, so that answers have the full length",
    )
    group.add_argument(
        "--extra-body", default="{}", metavar="JSON", help="fields to add to each request"
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    add_report_arguments(group)
    group.add_argument(
        "--samples", action="store_true", help="write every request to the file of --json"
    )
    group.add_argument(
        "--compare",
        nargs=2,
        type=as_path,
        metavar=("BEFORE.json", "AFTER.json"),
        help="compare two reports without sending load",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the load; return 0 if a request succeeded, else 1.

    Raises MillraceError if the load cannot run at all.
    """
    from millrace.bench.report.page import render_page
    from millrace.bench.report.report import read_report, write_file, write_report
    from millrace.bench.report.table import render, render_comparison
    from millrace.bench.runner import run_load

    if arguments.compare:
        before, after = map(read_report, arguments.compare)
        sys.stdout.write(render_comparison(before, after))
        return 0
    settings = settings_of(arguments)
    check_folders(arguments.json, arguments.html)
    report = run_load(settings, keep_samples=arguments.samples, progress=sys.stderr.isatty())
    sys.stdout.write(render(report))
    if arguments.json is not None:
        write_report(report, arguments.json)
    if arguments.html is not None:
        write_file(arguments.html, render_page(report).encode())
    return 0 if report.requests.num_succeeded else 1


def settings_of(arguments: argparse.Namespace) -> LoadSettings:
    """Return the load settings of the arguments. Raises ConfigError, naming the argument at
    fault."""
    from millrace.bench.arrivals import check_number_of_arrivals
    from millrace.bench.settings import LoadSettings, TargetApi, target_of
    from millrace.bench.spread import parse_spread

    _check(arguments)
    target_of(arguments.url)
    duration_s = None
    if arguments.requests is None:
        asked = arguments.duration
        duration_s = _DEFAULT_DURATION_S if asked is None else seconds("--duration", asked)
        if duration_s <= 0:
            raise ConfigError("--duration must be above 0")
        if arguments.rate is not None:
            check_number_of_arrivals(arguments.rate, duration_s)
    key = arguments.api_key
    return LoadSettings(
        url=arguments.url,
        api=TargetApi(arguments.api),
        model=arguments.model,
        rate_per_s=arguments.rate,
        concurrency=arguments.concurrency,
        burstiness=arguments.burstiness,
        duration_s=duration_s,
        num_requests=arguments.requests,
        warm_up_s=seconds("--warm-up", arguments.warm_up),
        drain_s=seconds("--drain", arguments.drain),
        timeout_s=seconds("--timeout", arguments.timeout),
        num_processes=arguments.processes,
        seed=arguments.seed,
        dataset=arguments.dataset or "",
        input_tokens=parse_spread(arguments.input_tokens),
        output_tokens=parse_spread(arguments.output_tokens),
        shared_prefix_tokens=arguments.shared_prefix_tokens,
        ignore_eos=arguments.ignore_eos,
        extra_body=_extra_body(arguments.extra_body),
        slo=None if arguments.slo is None else parse_slo(arguments.slo),
        api_key=os.environ.get(_KEY_VARIABLE, "") if key is None else key,
        headers=tuple(_header(text) for text in arguments.header),
    )


def _check(arguments: argparse.Namespace) -> None:
    if (arguments.rate is None) == (arguments.concurrency is None):
        raise ConfigError("give either --rate (open loop) or --concurrency (closed loop)")
    if arguments.duration is not None and arguments.requests is not None:
        raise ConfigError("give either --duration or --requests")
    positive = ("rate", "concurrency", "burstiness", "requests", "processes")
    for name in positive:
        value = getattr(arguments, name)
        if value is not None and not 0 < value < 1e9:
            raise ConfigError(f"--{name} must be more than 0, got {value:g}")
    if arguments.processes > _MAX_PROCESSES:
        raise ConfigError(f"--processes can be at most {_MAX_PROCESSES}")
    if arguments.concurrency is not None and arguments.processes > arguments.concurrency:
        raise ConfigError("--processes can be at most --concurrency: each needs a client")
    if not 0 <= arguments.seed < 1 << 32:
        raise ConfigError("--seed must be between 0 and 2^32 - 1")
    if arguments.shared_prefix_tokens < 0:
        raise ConfigError("--shared-prefix-tokens cannot be negative")
    if arguments.samples and arguments.json is None:
        raise ConfigError("--samples needs --json, whose file it extends")


def _extra_body(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ConfigError("--extra-body must be a JSON object")
    return body


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name):
        raise ConfigError(f"--header: {text!r} is not NAME: VALUE")
    if re.search(r"[\r\n\0]", value):
        raise ConfigError("--header: a value is one line")
    return name, value.strip()

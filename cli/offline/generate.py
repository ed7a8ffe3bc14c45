"""``millrace generate``: a file of requests on an engine in this process."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, TextIO

import msgspec

from millrace.cli.adapter_options import Adapters, add_adapter_option, read_adapters
from millrace.cli.arguments import as_path, path_or_name, whole_number
from millrace.cli.offline.engine_options import (
    DEFAULTS,
    BadLine,
    BadLinesError,
    add_bad_lines_argument,
    add_engine_options,
    add_file_arguments,
    engine_config,
    error_line,
    open_output,
    print_start_of_engine,
)
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import SPECULATIONS, speculation_option

if TYPE_CHECKING:
    from millrace.engine.llm import LLM
    from millrace.engine.offline.generated import OfflineRequest
    from millrace.registry.served import ServedModel


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace generate``."""
    parser = subparsers.add_parser(
        "generate",
        help="run a file of requests straight on the engine",
        description="Each line of the input is a JSON object with prompt, prompt_token_ids or "
        "messages (with tools, tool_choice and parallel_tool_calls, all as in OpenAI's API), and "
        "optionally id, any sampling parameter (max_tokens, temperature, top_p, "
        "top_k, min_p, typical_p, seed, stop, stop_token_ids, ignore_eos, min_tokens, logprobs, "
        "prompt_logprobs, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, "
        "bad_words, allowed_token_ids, include_stop_str_in_output, skip_special_tokens, n, "
        "use_beam_search, length_penalty, grammar as {kind, text}), priority (higher goes first), "
        "cache_salt, adapter (by its name), and cancel_after_tokens. Answers are written in the "
        "same order. The last line on stderr is a JSON object with tokens_per_s, mean_ttft_ms, "
        "mean_tpot_ms and what was counted.",
    )
    parser.add_argument(
        "--model", type=path_or_name, default="demo", metavar="PATH|NAME", help="default: demo"
    )
    add_file_arguments(parser)
    parser.add_argument("--output", type=as_path, required=True, metavar="OUT.jsonl")
    add_adapter_option(
        parser,
        "lines select it by the field adapter; lines without the field use it if it is "
        "the only one",
    )
    engine = add_engine_options(parser, "requests")
    engine.add_argument(
        "--speculation",
        type=speculation_option,
        metavar="|".join(SPECULATIONS),
        help="speculative decoding, which does not change the tokens: its method, with the path "
        "of a draft or EAGLE-3 head (default: from the catalogue, else ngram if rows are "
        "batch-invariant)",
    )
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--kv-cache-bytes",
        type=whole_number,
        help="memory of the KV cache in bytes (default: 1 GiB on a CPU, the rest on a GPU)",
    )
    memory.add_argument(
        "--num-blocks",
        type=whole_number,
        default=DEFAULTS.num_blocks,
        help="blocks of the KV cache, instead of --kv-cache-bytes",
    )
    memory.add_argument(
        "--host-cache-bytes",
        type=whole_number,
        default=DEFAULTS.host_cache_bytes,
        help="main memory in bytes for blocks of preempted and idle requests (default: "
        "%(default)s)",
    )
    memory.add_argument(
        "--no-prefix-cache",
        action="store_true",
        help="compute every prompt completely, without the prefix cache",
    )
    add_bad_lines_argument(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Run all requests; return 0 if every request was answered, 1 if some failed.

    Return 2 before the first request runs if a line is bad, unless bad lines are to be answered.
    """
    from millrace.engine.offline.inputs import load_served, with_adapter_slots
    from millrace.engine.threads.choice import choose_threads

    config = engine_config(
        arguments,
        kv_cache_bytes=arguments.kv_cache_bytes or 0,
        num_blocks=arguments.num_blocks,
        host_cache_bytes=arguments.host_cache_bytes,
        prefix_cache=not arguments.no_prefix_cache,
        speculation=arguments.speculation,
    )
    served = load_served(arguments.model, arguments.catalogue, asker="this command")
    config = served.entry.described(config)
    # Must run before torch is imported, which reads its thread settings once.
    threads = choose_threads(config, shared=False)
    from millrace.cli.offline.batch_file import read_requests

    adapters = _adapters(arguments, served, config)
    config = with_adapter_slots(config, len(adapters))
    try:
        requests = read_requests(
            arguments.input, served, adapters, keep_bad=arguments.answer_bad_lines
        )
    except BadLinesError as error:
        print(error.message, file=sys.stderr)
        return 2
    output = open_output(arguments.output)
    print(f"the engine computes with {threads}", file=sys.stderr)
    with output:
        return _generate(served, requests, config, output)


def _adapters(arguments: argparse.Namespace, served: ServedModel, config: EngineConfig) -> Adapters:
    from millrace.registry.checkpoints.checkpoint import read_model_config

    if not arguments.adapter:
        return {}
    model = read_model_config(served.path)
    return read_adapters(arguments.adapter, model, config.max_adapter_rank)


def _generate(
    served: ServedModel,
    requests: list[OfflineRequest | BadLine],
    config: EngineConfig,
    output: TextIO,
) -> int:
    from millrace.engine.llm import LLM

    print_start_of_engine()
    llm = LLM(served, config=config)
    num_bad = _write_answers(llm, requests, output)
    llm.engine.check_integrity()
    summary = llm.summary(num_bad)
    print(msgspec.json.encode(summary).decode(), file=sys.stderr)
    return 1 if summary.num_failed else 0


def _write_answers(llm: LLM, lines: list[OfflineRequest | BadLine], output: TextIO) -> int:
    """Write answers in the order of the lines, each as soon as all earlier ones are done; return
    the number of bad lines."""
    from tqdm import tqdm

    from millrace.cli.offline.batch_file import answer_line

    requests = [line for line in lines if not isinstance(line, BadLine)]
    answers: dict[str, str] = {}
    order = iter(lines)
    awaited = next(order, None)

    def write_what_is_there() -> None:
        nonlocal awaited
        while awaited is not None:
            if isinstance(awaited, BadLine):
                output.write(error_line(awaited.id, awaited.code, awaited.message))
            elif awaited.job.request_id in answers:
                output.write(answers.pop(awaited.job.request_id))
            else:
                return
            awaited = next(order, None)

    with tqdm(total=len(requests), unit="request", mininterval=0.5) as bar:
        write_what_is_there()
        for generated in llm.run(requests):
            answers[generated.request.job.request_id] = answer_line(generated)
            bar.set_postfix_str(f"{llm.num_tokens} tokens", refresh=False)
            bar.update()
            write_what_is_there()
    return len(lines) - len(requests)

"""``millrace generate``: a file of requests straight on the engine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from schemas.config import EngineConfig
from schemas.errors import ConfigError, MillraceError

if TYPE_CHECKING:
    from cli.batch_file import Request
    from cli.offline import OfflineBatch
    from registry.served import ServedModel

_DEFAULTS = EngineConfig()


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace generate``."""
    parser = subparsers.add_parser(
        "generate",
        help="run a file of requests straight on the engine",
        description="Each line of the input is a JSON object with prompt, prompt_token_ids or "
        "messages, and optionally id, max_tokens, temperature, top_p, top_k, min_p, seed, stop, "
        "stop_token_ids, ignore_eos, logprobs. Answers are written in the same order. The last "
        "line on stderr is a JSON object with tokens_per_s, mean_ttft_ms and mean_tpot_ms.",
    )
    parser.add_argument("--model", default="demo", metavar="PATH|NAME", help="default: demo")
    parser.add_argument("--input", type=Path, required=True, metavar="IN.jsonl")
    parser.add_argument("--output", type=Path, required=True, metavar="OUT.jsonl")
    parser.add_argument("--catalogue", default="", help="a models.yaml instead of the built-in one")
    parser.add_argument(
        "--max-batch",
        type=int,
        default=_DEFAULTS.max_num_sequences,
        help="requests that run at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--max-batch-tokens",
        type=int,
        default=_DEFAULTS.max_batch_tokens,
        help="tokens that one step computes (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-cache-bytes",
        type=int,
        default=_DEFAULTS.kv_cache_bytes,
        help="default: %(default)s",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, default=0, help="0 (the default) uses all cores")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """0 if every request was answered, 1 if some failed, 2 if a line is bad: then none has run."""
    from workers.engine.threads import configure_threads

    config = _engine_config(arguments)
    # Before anything imports torch: it reads its thread settings once.
    configure_threads(config, shared=False)
    from cli.batch_file import BadLinesError, read_requests
    from registry.catalogue import load_catalogue
    from registry.served import ServedModel

    catalogue = load_catalogue(arguments.catalogue)
    name = catalogue.entry_for(arguments.model).name
    served = ServedModel.load(catalogue.with_model(arguments.model), name)
    try:
        requests = read_requests(arguments.input, served)
    except BadLinesError as error:
        print(error.message, file=sys.stderr)
        return 2
    try:
        output = arguments.output.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{arguments.output} cannot be written: {error.strerror}") from error
    with output:
        return _generate(served, requests, config, output)


def _engine_config(arguments: argparse.Namespace) -> EngineConfig:
    for name in ("max_batch", "max_batch_tokens", "kv_cache_bytes"):
        if getattr(arguments, name) < 1:
            raise MillraceError(f"--{name.replace('_', '-')} must be at least 1")
    if arguments.threads < 0:
        raise MillraceError("--threads must not be negative")
    return EngineConfig(
        max_num_sequences=arguments.max_batch,
        max_batch_tokens=arguments.max_batch_tokens,
        kv_cache_bytes=arguments.kv_cache_bytes,
        dtype=arguments.dtype,
        device=arguments.device,
        num_threads=arguments.threads,
    )


def _generate(
    served: ServedModel, requests: list[Request], config: EngineConfig, output: TextIO
) -> int:
    import msgspec

    from cli.offline import OfflineBatch
    from workers.engine.engine import Engine

    engine = Engine.load(served.path, config)
    batch = OfflineBatch(engine, served.tokenizer, config.max_num_sequences)
    _write_answers(batch, requests, output)
    summary = batch.summary()
    print(msgspec.json.encode(summary).decode(), file=sys.stderr)
    return 1 if summary.num_failed else 0


def _write_answers(batch: OfflineBatch, requests: list[Request], output: TextIO) -> None:
    """In the order of the requests, each as soon as those before it are there."""
    from tqdm import tqdm

    from cli.batch_file import answer_line

    lines: dict[str, str] = {}
    order = iter(requests)
    awaited = next(order, None)
    num_tokens = 0

    with tqdm(total=len(requests), unit="request", mininterval=0.5) as bar:

        def on_tokens(count: int) -> None:
            nonlocal num_tokens
            num_tokens += count
            bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)

        by_id = {request.job.request_id: request for request in requests}
        for generated in batch.run([request.job for request in requests], on_tokens):
            request_id = generated.job.request_id
            lines[request_id] = answer_line(by_id[request_id], generated)
            bar.update()
            while awaited is not None and awaited.job.request_id in lines:
                output.write(lines.pop(awaited.job.request_id))
                awaited = next(order, None)

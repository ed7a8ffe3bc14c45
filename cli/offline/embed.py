"""``millrace embed``: embeddings of a file of texts, on an engine in this process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO, get_args

from millrace.cli.arguments import as_path, path_or_name
from millrace.cli.offline.engine_options import (
    BadLine,
    add_bad_lines_argument,
    add_engine_options,
    add_file_arguments,
    engine_config,
    error_line,
    open_output,
    print_start_of_engine,
)
from millrace.schemas.errors import ConfigError
from millrace.schemas.pooling import EmbeddingPooling, Pooling

if TYPE_CHECKING:
    from millrace.cli.offline.embed_file import EmbedText
    from millrace.engine.llm import LLM
    from millrace.engine.offline.generated import Generated


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace embed``."""
    parser = subparsers.add_parser(
        "embed",
        help="embed a file of texts",
        description="Each line of the input is a JSON object with text or prompt_token_ids, and "
        "optionally id. Each line of the output, in the same order, has id, embedding and "
        "prompt_tokens, or id and error.",
    )
    parser.add_argument("--model", type=path_or_name, required=True, metavar="PATH|NAME")
    add_file_arguments(parser)
    parser.add_argument("--output", type=as_path, metavar="OUT.jsonl", help="default: stdout")
    parser.add_argument(
        "--pooling",
        choices=get_args(EmbeddingPooling),
        help="pooling: the last token's hidden state or the mean over all tokens (default: from "
        "the catalogue or the checkpoint's modules.json and 1_Pooling/config.json)",
    )
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="scale embeddings to length 1 (default: as the checkpoint's modules.json says)",
    )
    add_engine_options(parser, "texts")
    add_bad_lines_argument(parser)
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Embed all texts; return 0 if every text was embedded, 1 if some failed.

    A bad line raises before the first text runs, unless bad lines are to be answered.
    """
    from millrace.engine.offline.inputs import load_served

    config = engine_config(arguments, speculation="off")
    served = load_served(arguments.model, arguments.catalogue, asker="this command")
    from millrace.cli.offline.embed_file import read_texts
    from millrace.engine.llm import LLM
    from millrace.registry.checkpoints.sentence_embedding import read_embedding_defaults

    defaults = read_embedding_defaults(served.path)
    chosen = arguments.pooling or served.entry.pooling or defaults.pooling
    if chosen is None:
        raise ConfigError("The checkpoint does not say how to pool; choose with --pooling.")
    normalize = bool(defaults.normalize if arguments.normalize is None else arguments.normalize)
    texts = read_texts(arguments.input, served, keep_bad=arguments.answer_bad_lines)
    print_start_of_engine()
    embedded = _embed(LLM(served, config=config), texts, Pooling(chosen))
    if arguments.output is None:
        return _write(embedded, sys.stdout, normalize=normalize)
    with open_output(arguments.output) as output:
        return _write(embedded, output, normalize=normalize)


def _embed(
    llm: LLM, lines: Sequence[EmbedText | BadLine], pooling: Pooling
) -> Iterator[tuple[EmbedText, Generated] | BadLine]:
    """Yield each text with its result and each bad line, in order, as soon as all earlier ones are
    done."""
    from millrace.engine.offline.generated import OfflineRequest
    from millrace.schemas.jobs import Job

    requests = (
        OfflineRequest(
            id=text.number,
            job=Job(
                request_id=str(text.number),
                model=llm.served.entry.name,
                prompt_token_ids=text.token_ids,
                pooling=pooling,
            ),
        )
        for text in lines
        if not isinstance(text, BadLine)
    )
    answers = llm.run(requests)
    done: dict[str | int, Generated] = {}
    for text in lines:
        if isinstance(text, BadLine):
            yield text
            continue
        while text.number not in done:
            answer = next(answers)
            done[answer.request.id] = answer
        yield text, done.pop(text.number)


def _write(
    embedded: Iterator[tuple[EmbedText, Generated] | BadLine], output: TextIO, *, normalize: bool
) -> int:
    from millrace.cli.offline.embed_file import embedding_line

    num_failed = 0
    for result in embedded:
        if isinstance(result, BadLine):
            num_failed += 1
            output.write(error_line(result.id, result.code, result.message))
            continue
        text, made = result
        if made.error is None:
            output.write(embedding_line(text, made.embedding, normalize=normalize))
        else:
            num_failed += 1
            output.write(error_line(text.id, *made.error))
    return 1 if num_failed else 0

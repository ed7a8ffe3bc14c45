"""Options of the commands that run an engine in their own process."""

from __future__ import annotations

import argparse

from schemas.config import EngineConfig

DEFAULTS = EngineConfig()


def add_engine_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Declare how much runs at a time, and on what; ``what`` runs: requests, texts."""
    parser.add_argument(
        "--max-batch",
        type=int,
        default=DEFAULTS.max_num_sequences,
        help=f"{what} that run at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--max-batch-tokens",
        type=int,
        default=DEFAULTS.max_batch_tokens,
        help="tokens that one step computes (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--threads", type=int, default=0, help="0 (the default) uses all cores")

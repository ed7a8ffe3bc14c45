"""``vllm bench serve`` by its module: vLLM's package for processors lacks what its command reads of
itself. Run by the environment that vLLM is in."""

from __future__ import annotations

import argparse

from vllm.benchmarks.serve import add_cli_args, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())

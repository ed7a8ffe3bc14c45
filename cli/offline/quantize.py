"""``millrace quantize``: quantize a checkpoint's weights and save it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from millrace.cli.arguments import as_path, path_or_name, whole_number
from millrace.engine.quantizer.schemes import QuantizerScheme
from millrace.registry.catalogue import ModelEntry, load_catalogue
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import CheckpointError, ConfigError

_GROUP_INPUTS = 128
_NUM_SAMPLES = 128


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``millrace quantize``."""
    parser = subparsers.add_parser(
        "quantize",
        help="quantize a checkpoint's weights",
        description="Read a wide checkpoint in Hugging Face layout and write a quantized one in "
        "the layout of compressed-tensors, which this engine, vLLM, SGLang and transformers read. "
        "The linear maps of the layers are quantized; embeddings, heads and routers of experts "
        "stay wide.",
    )
    parser.add_argument(
        "--model", type=path_or_name, required=True, metavar="PATH|NAME", help="the wide one"
    )
    parser.add_argument("--output", type=as_path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--scheme",
        required=True,
        choices=[scheme.value for scheme in QuantizerScheme],
        help="bits of weights (w) and activations (a): both in int8 or in fp8 with a scale for "
        "each output, or weights alone in int4 with a scale for each group of inputs",
    )
    parser.add_argument(
        "--group",
        type=whole_number,
        default=_GROUP_INPUTS,
        metavar="INPUTS",
        help="inputs that share a scale in int4, a multiple of 32; fewer, or all, if it does not "
        "divide the inputs (default: %(default)s)",
    )
    parser.add_argument(
        "--calibrate",
        type=as_path,
        metavar="IN.jsonl",
        help="texts to calibrate int4 with (GPTQ): each line has text, prompt or messages; use "
        "texts like the expected requests (default: round to nearest)",
    )
    parser.add_argument(
        "--samples",
        type=whole_number,
        default=_NUM_SAMPLES,
        metavar="N",
        help="number of lines to use, each up to 1024 tokens (default: %(default)s)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--threads", type=whole_number, default=0, help="0 (the default) uses all cores"
    )
    parser.add_argument("--catalogue", default="", help="a models.yaml instead of the built-in one")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Quantize and return 0 when the checkpoint is written; raise an error otherwise."""
    from millrace.engine.threads.choice import configure_threads

    for name, least in (("samples", 1), ("threads", 0)):
        if getattr(arguments, name) < least:
            raise ConfigError(f"--{name} must be at least {least}")
    # Must run before torch is imported, which reads its thread settings once.
    configure_threads(EngineConfig(num_threads=arguments.threads), shared=False)
    from tqdm import tqdm

    from millrace.engine.quantizer import checkpoint as making
    from millrace.engine.step.settings import choose_device
    from millrace.registry.source import resolve

    entry = _entry(arguments)
    making.check_output(arguments.output)
    source = resolve(entry)
    config = making.check_input(source)
    recipe = making.Recipe(
        QuantizerScheme(arguments.scheme), arguments.group, _texts(arguments, source)
    )
    with tqdm(total=config.num_hidden_layers, unit="layer", mininterval=0.5) as bar:
        made = making.quantize_checkpoint(
            source,
            arguments.output,
            recipe,
            choose_device(arguments.device),
            on_layer=bar.update,
        )
    print(
        f"{arguments.output}: {made.num_quantized} linear maps in {recipe.scheme}, "
        f"{made.bytes_after / 1e6:.1f} MB of tensors instead of {made.bytes_before / 1e6:.1f} MB",
        file=sys.stderr,
    )
    return 0


def _entry(arguments: argparse.Namespace) -> ModelEntry:
    """Return the model's entry. Raises ModelNotFoundError, and CheckpointError for a GGUF file."""
    entry = load_catalogue(arguments.catalogue).entry_for(arguments.model)
    if entry.is_gguf:
        raise CheckpointError(
            f"{entry.source} is a GGUF file; name the wide checkpoint in Hugging Face layout that "
            "it was made of."
        )
    return entry


def _texts(arguments: argparse.Namespace, source: Path) -> list[list[int]] | None:
    if arguments.calibrate is None:
        return None
    from millrace.cli.offline.calibration_file import read_calibration
    from millrace.registry.tokenizers.tokenizer import Tokenizer

    return read_calibration(arguments.calibrate, Tokenizer.load(source), arguments.samples)

"""Steps of an engine on tensors without memory, which call every kernel of its runner."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from triton.runtime.jit import JITFunction

from benchmarks.gpu_compile.compiling import Compilation
from millrace.engine.devices.cuda.operations import DeviceMetadata, DeviceOperations
from millrace.engine.kernels.gpu import jit
from millrace.engine.kernels.gpu.attention_shape import AttentionShape
from millrace.engine.kernels.gpu.blocks import copy_blocks
from millrace.engine.kernels.gpu.device_batch import DeviceBatch
from millrace.engine.kernels.gpu.kernel_set import KernelSet, choose_kernels
from millrace.engine.kernels.gpu.sampler_state import SamplerState
from millrace.engine.kernels.gpu.sampling import choose_tokens, token_logprobs
from millrace.engine.kernels.gpu.step_inputs import StepInputs, StepShape, StepState
from millrace.engine.kv.cache import KVCache
from millrace.engine.models.decoder import Decoder
from millrace.engine.models.linears import DeviceLinear
from millrace.engine.models.loader import load_weights
from millrace.engine.models.stacked_experts import stacked_experts
from millrace.registry.checkpoints.checkpoint import ModelConfig

_META = torch.device("meta")
_BLOCK_SIZE = 16
_NUM_BLOCKS = 20_000
_NUM_ROWS = 257
_MAX_BLOCKS = 2560
_NUM_PROGRAMS = 264


class Formats(NamedTuple):
    """Dtypes of weights and hidden states, and of keys and values."""

    weights: torch.dtype
    cache: torch.dtype


FORMATS = {
    "bf16": Formats(torch.bfloat16, torch.bfloat16),
    "fp8": Formats(torch.bfloat16, torch.float8_e4m3fn),
    "fp32": Formats(torch.float32, torch.float32),
}


class Step(NamedTuple):
    """Step: sequences of one token, sequences of several tokens, and the latter's tokens."""

    num_single: int
    num_others: int
    num_other_tokens: int


# Small and large steps, alone and mixed, with numbers that are 1, odd, and multiples of 16.
STEPS = (
    *(Step(count, 0, 0) for count in (1, 2, 3, 15, 16, 17, 32, 63, 64, 65, 128, 200, 256)),
    *(Step(0, count, tokens) for count, tokens in ((1, 1), (1, 2), (1, 16), (1, 33), (3, 100))),
    *(Step(0, count, tokens) for count, tokens in ((1, 2048), (8, 8192), (16, 8191))),
    *(Step(1, 1, 16), Step(16, 1, 129), Step(31, 2, 1000), Step(255, 1, 7937)),
)


def compile_model(
    compilation: Compilation,
    name: str,
    config: ModelConfig,
    *,
    formats: str,
    deterministic: bool,
    steps: Sequence[Step] = STEPS,
) -> None:
    """Compile the kernels of ``steps`` of a model in one of ``FORMATS``."""
    compilation.user = f"{name} {formats}" + (" deterministic" if deterministic else "")
    with compilation.instead_of_launching(), torch.inference_mode():
        kernels = choose_kernels("triton", torch.device("cuda"))
        engine = _Engine(config, kernels, FORMATS[formats])
        decoder = engine.decoder(deterministic=deterministic)
        for step in steps:
            engine.run(decoder, step)
        engine.copy()


def never_compiled(compilation: Compilation) -> list[str]:
    """Return a sentence for each kernel that was never called."""
    compiled = {variant.kernel for variant in compilation.variants.values()}
    modules = [
        importlib.import_module(f"{jit.__name__}.{module.name}")
        for module in pkgutil.iter_modules(jit.__path__)
    ]
    names = {
        name
        for module in modules
        for name, member in vars(module).items()
        if isinstance(member, JITFunction) and name.endswith("_kernel")
    }
    return [f"{name} was never compiled" for name in sorted(names - compiled)]


class _Engine:
    """Parts of the runner's steps, on the device that computes nothing."""

    def __init__(self, config: ModelConfig, kernels: KernelSet, formats: Formats) -> None:
        self._config = config
        self._kernels = kernels
        self._dtype = formats.weights
        self._cache = KVCache(
            config,
            num_blocks=_NUM_BLOCKS,
            block_size_tokens=_BLOCK_SIZE,
            dtype=formats.cache,
            device=_META,
        )
        self._state = StepState(_longs(_NUM_ROWS), _ints(_NUM_ROWS, _MAX_BLOCKS))
        self._sampler = SamplerState(
            _longs(_NUM_ROWS, 6),
            torch.empty(_NUM_ROWS, config.vocab_size, dtype=torch.int16, device=_META),
        )

    def decoder(self, *, deterministic: bool) -> Decoder[DeviceBatch, DeviceMetadata]:
        """Return a decoder like the runner's, with weights without memory."""
        config, kernels = self._config, self._kernels
        product = partial(DeviceLinear, kernels=kernels, fixed=deterministic)
        weights = load_weights(
            Path(),
            config,
            dtype=self._dtype,
            device=_META,
            source=_Shapes(),
            product=product,
            experts=stacked_experts(kernels.experts, product, fixed=deterministic),
        )
        attention = kernels.attention(
            AttentionShape(
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                block_size=_BLOCK_SIZE,
                windows=config.windows,
            ),
            max_sequences=_NUM_ROWS - 1,
            num_programs=_NUM_PROGRAMS,
            device=_META,
            deterministic=deterministic,
        )
        operations = DeviceOperations(
            kernels,
            attention,
            [self._cache.layer(layer) for layer in range(config.num_hidden_layers)],
            num_heads=config.num_attention_heads,
            epsilon=config.rms_norm_eps,
        )
        return Decoder(config, weights, operations)

    def run(self, decoder: Decoder[DeviceBatch, DeviceMetadata], step: Step) -> None:
        num_sequences = step.num_single + step.num_others
        num_tokens = step.num_single + step.num_other_tokens
        shape = StepShape(step.num_single, num_tokens, num_sequences, num_sequences)
        inputs = StepInputs.empty(shape, _META)
        packed = _longs(shape.num_packed)
        self._kernels.prepare_inputs(packed, self._state, inputs, shape, block_size=_BLOCK_SIZE)
        batch = DeviceBatch(
            *inputs[:6], block_tables=self._state.block_tables, num_single=step.num_single
        )
        hidden = decoder.forward(batch)
        logits = decoder.logits(hidden.index_select(0, _longs(num_sequences)))
        chosen = _longs(num_sequences)
        choose_tokens(logits, inputs.state_rows, _longs(num_sequences), self._sampler, chosen)
        for num_top in (0, 5):
            token_logprobs(logits, _longs(num_sequences), chosen, num_top)

    def copy(self) -> None:
        """Copy blocks within the cache, and to and from another allocation."""
        blocks = self._cache.blocks
        others = torch.empty(
            (len(blocks), 1000, *blocks.shape[2:]), dtype=torch.uint8, device=_META
        )
        for num_pairs in (1, 2, 16, 33):
            # Both ids from one upload, as the runner does: the second tensor has an arbitrary
            # offset.
            source_ids, target_ids = _longs(2, num_pairs)
            for source, target in ((blocks, blocks), (blocks, others), (others, blocks)):
                copy_blocks(source, target, source_ids, target_ids)


class _Shapes:
    """Source of any tensor, without contents."""

    path = "(shapes)"

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        del name
        return torch.empty(shape, device=_META)


def _longs(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device=_META)


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=_META)

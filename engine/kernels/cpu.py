"""Compiled CPU kernels as functions of tensors."""

from __future__ import annotations

import ctypes
from array import array
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import torch

from millrace.engine.kernels.packed_weight import PackedWeight
from millrace.engine.kernels.ranks import SharedRanks

HEAD_DIMS = (32, 64, 96, 128, 256)
WIDTH_MULTIPLE = 32

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_POINTER, _INT64, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "millrace_rms_norm": (_INT, *(_POINTER,) * 3, *(_INT64,) * 2, _FLOAT),
    "millrace_swiglu": (_INT, *(_POINTER,) * 2, *(_INT64,) * 2),
    "millrace_likeliest": (_POINTER, *(_INT64,) * 2, _POINTER),
    "millrace_rotate_store": (
        *(_INT, *(_POINTER,) * 5, _FLOAT),
        *(*(_POINTER,) * 2, *(_INT64,) * 5, _INT),
    ),
    "millrace_decode_attention": (
        *(_INT, _POINTER, _INT64, *(_POINTER,) * 5),
        *(*(_INT64,) * 6, _FLOAT, _INT),
    ),
    "millrace_multiply": (*(_POINTER,) * 3, *(_INT64,) * 3, *(_INT,) * 2),
    "millrace_decoder_step": (
        *(_POINTER, *(_INT64,) * 7, *(_FLOAT,) * 2),
        *(*(_POINTER,) * 7, *(_INT64,) * 2, _POINTER, _INT, _POINTER, _INT64, _POINTER, _INT64),
        *(*(_POINTER,) * 2, _INT64, _POINTER, _INT64, _POINTER),
    ),
}


class Finish(IntEnum):
    """Last step of a product: write it, add it to the output, or apply SwiGLU, which halves it."""

    WRITE = 0
    ADD = 1
    GATE = 2


class DecoderShape(NamedTuple):
    """Shape of a decoder; ``num_key_heads`` as in the KV cache, ``epsilon`` of every RMSNorm."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    block_size: int
    epsilon: float


class PagedCache(NamedTuple):
    """Contiguous memory of one layer of a ``KVCache``.

    With ``is_int8``, entries are int8, and each block is followed by its bfloat16 scales, see
    ``KVCache.scales``. Otherwise entries have the kernels' dtype.
    """

    address: int
    block_size: int
    num_key_heads: int
    is_int8: bool


class StepAdapters(NamedTuple):
    """LoRA adapters of a flat batch.

    ``addresses`` is int64 [num_adapters], the address of each adapter's layers (see
    ``engine.adapters.packed``). ``of_rows`` is int32 [num_tokens], each row's adapter, or -1 for
    none. ``most_ranks`` is the largest number of ranks of an adapter in a product.
    """

    addresses: torch.Tensor
    of_rows: torch.Tensor
    most_ranks: int


class StepFeatures(NamedTuple):
    """Output for a step's features: the inputs of some of its layers.

    ``out`` is [num_tokens, num_layers, hidden_size], one for each of ``layers``, int64.
    """

    layers: torch.Tensor
    out: torch.Tensor


class CpuProducts:
    """Products of bfloat16 rows with packed weights. All tensors are contiguous and on the CPU."""

    def __init__(self, library: Path) -> None:
        self._multiply = _functions(library, "millrace_multiply").millrace_multiply

    def multiply(
        self, rows: torch.Tensor, weight: PackedWeight, out: torch.Tensor, finish: Finish
    ) -> None:
        """Multiply ``rows`` [num_rows, num_inputs] with a weight, into ``out``.

        ``out`` is [num_rows, num_outputs], or half as wide with SwiGLU. It is bfloat16, or without
        SwiGLU float32, which gets the sums without rounding. The product is batch-invariant: a
        row's result has the same bits for any other rows.
        """
        self._multiply(
            rows.data_ptr(),
            weight.address,
            out.data_ptr(),
            *(rows.shape[0], weight.num_inputs, weight.num_outputs, finish),
            out.dtype is torch.float32,
        )


class CpuKernels(CpuProducts):
    """Compiled kernels. All tensors are contiguous, on the CPU and of ``dtype`` unless noted.

    ``has_products`` is True if ``dtype`` is bfloat16, as ``multiply`` and ``decoder_step`` need.
    """

    def __init__(self, library: Path, dtype: torch.dtype) -> None:
        super().__init__(library)
        loaded = _functions(library, *_SIGNATURES)
        self._rms_norm = loaded.millrace_rms_norm
        self._swiglu = loaded.millrace_swiglu
        self._likeliest = loaded.millrace_likeliest
        self._rotate_store = loaded.millrace_rotate_store
        self._decode_attention = loaded.millrace_decode_attention
        self._decoder_step = loaded.millrace_decoder_step
        self.has_products = dtype is torch.bfloat16
        self._type = _TYPES[dtype]

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Divide ``rows`` [num_rows, width] by their root mean square, times ``weight`` [width].

        ``rows`` are float32.
        """
        out = torch.empty_like(rows, dtype=weight.dtype)
        self._rms_norm(
            self._type,
            rows.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            *(rows.shape[0], rows.shape[1], epsilon),
        )
        return out

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Compute silu(gate) * up of ``gate_up`` [num_rows, 2 * width], the gates first."""
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, width)
        self._swiglu(self._type, gate_up.data_ptr(), out.data_ptr(), num_rows, width)
        return out

    def likeliest(self, logits: torch.Tensor) -> list[int]:
        """Return the token of the largest logit of each row of ``logits`` [num_rows, vocab_size].

        ``logits`` are float32. Of equal logits the first token wins. The result is -1 for a row
        with NaN, and for a row whose largest logit is infinite.
        """
        num_rows = len(logits)
        tokens = array("q", bytes(8 * num_rows))
        self._likeliest(logits.data_ptr(), *logits.shape, tokens.buffer_info()[0])
        return tokens.tolist()

    def rotate_store(
        self,
        heads: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        epsilon: float,
        cache: PagedCache,
        slots: torch.Tensor,
    ) -> None:
        """Normalise (with ``norms``) and rotate heads in place, and store keys and values.

        Args:
            heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim].
            cosines: float32 [num_tokens, head_dim / 2].
            sines: float32 [num_tokens, head_dim / 2].
            norms: Weights of the norms of query and key heads, or None.
            epsilon: Epsilon of the norms.
            cache: The layer's cache, written at the slots.
            slots: int64 [num_tokens].
        """
        num_keys = cache.num_key_heads
        query_norm, key_norm = (0, 0) if norms is None else (t.data_ptr() for t in norms)
        self._rotate_store(
            self._type,
            heads.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            *(query_norm, key_norm, epsilon),
            cache.address,
            slots.data_ptr(),
            *(heads.shape[0], heads.shape[1] - 2 * num_keys, num_keys, heads.shape[2]),
            *(cache.block_size, cache.is_int8),
        )

    def decode_attention(
        self,
        heads: torch.Tensor,
        cache: PagedCache,
        tables: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        out: torch.Tensor,
        *,
        window: int | None,
    ) -> None:
        """Compute attention of the first ``len(lengths)`` rows of ``heads`` into ``out``.

        Args:
            heads: As for ``rotate_store``.
            cache: As for ``rotate_store``.
            tables: int32, the rows' block tables one after another.
            starts: int64 [num_rows], the start of each row's table in ``tables``.
            lengths: int32 [num_rows], the number of tokens including the row's own, which is the
            last.
            out: [num_tokens, num_heads, head_dim]; its first rows are written.
            window: Number of tokens that a row sees, or None for all.
        """
        num_rows, (num_queries, head_dim) = len(lengths), out.shape[1:]
        self._decode_attention(
            self._type,
            heads.data_ptr(),
            heads.shape[1] * head_dim,
            cache.address,
            tables.data_ptr(),
            starts.data_ptr(),
            lengths.data_ptr(),
            out.data_ptr(),
            *(num_rows, num_queries, cache.num_key_heads, head_dim, cache.block_size),
            *(window or 0, head_dim**-0.5, cache.is_int8),
        )

    def decoder_step(
        self,
        layers: torch.Tensor,
        shape: DecoderShape,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        chunk_ends: torch.Tensor,
        *,
        has_int8_cache: bool,
        adapters: StepAdapters | None = None,
        features: StepFeatures | None = None,
        inputs: torch.Tensor | None = None,
        ranks: SharedRanks | None = None,
    ) -> None:
        """Compute all layers for a flat batch; replaces float32 ``hidden``.

        Args:
            layers: int64 [num_layers, 10], addresses in the order of ``Layer`` in decoder_step.h (0
            for
                missing weights), then the layer's window or 0.
            shape: Shape of the decoder.
            hidden: [num_tokens, hidden_size].
            rotation: Cosines and sines, as for ``rotate_store``.
            slots: As for ``rotate_store``.
            tables: Tables, starts and lengths of ``decode_attention`` for all sequences. Sequences
            with
                one new token come first, by rising length.
            chunk_ends: int64, for each other sequence the row after its last.
            has_int8_cache: See ``PagedCache``.
            adapters: Adapters of the rows, or None.
            features: Output for the inputs of some layers, or None.
            inputs: [num_tokens, any], inputs of the first layer's attention in place of the norm of
                ``hidden``, or None.
            ranks: Ranks that all compute the same rows at the same time, or None.

        Raises:
            ValueError: The kernels do not support this shape.
        """
        failed = self._decoder_step(
            layers.data_ptr(),
            len(layers),
            *shape,
            shape.head_dim**-0.5,
            hidden.data_ptr(),
            *(part.data_ptr() for part in (*rotation, slots, *tables)),
            len(tables[2]) - len(chunk_ends),
            len(chunk_ends),
            chunk_ends.data_ptr(),
            has_int8_cache,
            *((None, 0, None, 0) if adapters is None else _arguments(adapters)),
            *((None, None, 0) if features is None else _feature_arguments(features)),
            *((None, 0) if inputs is None else (inputs.data_ptr(), inputs.shape[1])),
            None if ranks is None else ranks.address,
        )
        if failed:
            raise ValueError(f"a step of {len(hidden)} rows of {shape} is not computed")


def _arguments(adapters: StepAdapters) -> tuple[int, int, int, int]:
    addresses, of_rows, most_ranks = adapters
    return addresses.data_ptr(), len(addresses), of_rows.data_ptr(), most_ranks


def _feature_arguments(features: StepFeatures) -> tuple[int, int, int]:
    layers, out = features
    return out.data_ptr(), layers.data_ptr(), len(layers)


def _functions(library: Path, *names: str) -> ctypes.CDLL:
    """Load the library and declare these functions."""
    # Loaded after torch, so that the library shares torch's OpenMP runtime: two runtimes would
    # compete for the cores.
    loaded = ctypes.CDLL(str(library))
    for name in names:
        getattr(loaded, name).argtypes = _SIGNATURES[name]
    return loaded

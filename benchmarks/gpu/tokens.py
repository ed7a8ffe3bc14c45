"""Comparison of tokens and logits: with transformers in float32, and with other batches."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.gpu.engine_runs import engine_config
from benchmarks.gpu.kernel_cases import relative_error
from benchmarks.gpu.loads import TEMPERATURE, random_prompts, write_config
from benchmarks.gpu.report import DETERMINISTIC, LLAMA_8B, LOGITS_ERROR, QWEN_06B
from benchmarks.gpu.scope import Scope
from benchmarks.support.closed_loop import answers
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.engine import Engine
from millrace.engine.step.runners import load_runner
from millrace.engine.step.sequence import Sequence as EngineSequence
from millrace.engine.step.sequence import SequenceState
from millrace.engine.step.settings import resolve
from millrace.engine.types import EngineRequest
from millrace.schemas.config import EngineConfig
from millrace.schemas.sampling import SamplingParams

Prompt = tuple[int, ...]

# Small enough for float32 and a fast start, with heads like the large models'.
_SMALL = {"num_hidden_layers": 8, "vocab_size": 8192, "bos_token_id": 0, "eos_token_id": 1}
_SHAPES: dict[str, dict[str, Any]] = {
    LLAMA_8B: _SMALL
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    QWEN_06B: _SMALL,
}
_LENGTHS, _SMOKE_LENGTHS = (1, 17, 64, 255, 512, 900), (1, 5)
_NUM_TOKENS, _SMOKE_NUM_TOKENS = 64, 2
_CROWD, _SMOKE_CROWD = 56, 1
_BLOCKS, _SMOKE_BLOCKS = 8192, 32


def run(scope: Scope) -> None:
    for name in (LLAMA_8B,) if scope.smoke else (LLAMA_8B, QWEN_06B):
        with tempfile.TemporaryDirectory() as name_of_folder:
            folder = Path(name_of_folder)
            own_name = "" if name == LLAMA_8B else f" ({name})"
            with scope.case(f"the model{own_name}"):
                reference = _write_checkpoint(scope, name, folder)
                with scope.case(LOGITS_ERROR + own_name):
                    _logits(scope, LOGITS_ERROR + own_name, folder, reference)
                scope.free_memory()
                greedy = f"greedy tokens that transformers in fp32 would choose{own_name}"
                with scope.case(greedy):
                    _greedy(scope, greedy, folder, reference)
                del reference
                scope.free_memory()
            if name == LLAMA_8B:
                for mode, deterministic in ((DETERMINISTIC, True), ("without: likewise", False)):
                    with scope.case(mode):
                        _unchanged(scope, mode, folder, deterministic=deterministic)
                    scope.free_memory()


def _write_checkpoint(scope: Scope, name: str, folder: Path) -> Any:
    """Write random weights rounded to bfloat16; return the model in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    changes = {} if scope.smoke else _SHAPES[name]
    config = write_config(folder, name, tiny=scope.smoke, **changes)
    torch.manual_seed(scope.seed)
    with torch.device(scope.device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32, attn_implementation="sdpa"
        )
    weights = {}
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if key.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
            tensor.copy_(tensor.bfloat16())
            if not (config.tie_word_embeddings and key == "lm_head.weight"):
                weights[key] = tensor.bfloat16().contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return model.eval()


def _config(scope: Scope, *, deterministic: bool = False) -> EngineConfig:
    return engine_config(
        scope,
        kernels="reference" if scope.smoke else "triton",
        load_format="auto",
        deterministic=deterministic,
        cuda_graphs=not scope.smoke,
        num_blocks=_SMOKE_BLOCKS if scope.smoke else _BLOCKS,
    )


def _prompts(scope: Scope, vocab_size: int) -> list[Prompt]:
    lengths = _SMOKE_LENGTHS if scope.smoke else _LENGTHS
    return [
        random_prompts(1, length, vocab_size, scope.seed + index)[0]
        for index, length in enumerate(lengths)
    ]


def _logits(scope: Scope, name: str, folder: Path, reference: Any) -> None:
    """Compare the logits of prompts computed together, and of the token after each."""
    runner = load_runner(folder, resolve(folder, _config(scope)))
    prompts = _prompts(scope, runner.config.vocab_size)
    sequences = []
    block_size = runner.cache.block_size_tokens
    next_block = 0
    # Sampling that needs the host, so that the logits come to it.
    sampling = SamplingParams(typical_p=0.5)
    for index, prompt in enumerate(prompts):
        request = EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling)
        sequence = EngineSequence(request, arrival=index, key=index, max_total_tokens=1024)
        num_blocks = len(prompt) // block_size + 1
        sequence.block_table = list(range(next_block, next_block + num_blocks))
        sequence.state = SequenceState.RUNNING
        next_block += num_blocks
        sequences.append(sequence)
    errors = []
    for step in ("prompts", "next tokens"):
        plan = [
            ScheduledSequence(sequence, len(sequence.token_ids) - sequence.num_computed_tokens)
            for sequence in sequences
        ]
        launched = runner.launch(plan)
        launched.read()
        own = {
            sequence.arrival: row
            for sequence, row in zip(launched.by_host, launched.logits.float(), strict=True)
        }
        for sequence, num_tokens in plan:
            expected = _reference_logits(scope, reference, sequence.token_ids)[-1]
            errors.append((relative_error(own[sequence.arrival], expected), step))
            sequence.num_computed_tokens += num_tokens
            sequence.token_ids.append(sequence.token_ids[0])
    worst = {step: max(e for e, other in errors if other == step) for _, step in errors}
    scope.emit(
        name,
        max(worst.values()),
        "",
        details={"note": ", ".join(f"{step} {error:.2g}" for step, error in worst.items())},
    )


@torch.inference_mode()
def _reference_logits(scope: Scope, reference: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Compute the logits [num_tokens, vocab_size] in float32."""
    ids = torch.tensor([token_ids], device=scope.device)
    logits: torch.Tensor = reference(ids).logits[0]
    return logits


def _greedy(scope: Scope, name: str, folder: Path, reference: Any) -> None:
    """Compare each token of a greedy answer with transformers' choice after the same tokens."""
    engine = Engine.load(folder, _config(scope))
    num_tokens = _SMOKE_NUM_TOKENS if scope.smoke else _NUM_TOKENS
    prompts = _prompts(scope, reference.config.vocab_size)
    own = _answers(engine, prompts, num_tokens, temperature=0.0)
    same = 0
    for prompt, answer in zip(prompts, own, strict=True):
        chosen = _reference_logits(scope, reference, [*prompt, *answer]).argmax(-1).tolist()
        same += sum(map(int.__eq__, chosen[len(prompt) - 1 : -1], answer))
    total = len(prompts) * num_tokens
    scope.emit(name, same, f"of {total}", share=same / total)


def _unchanged(scope: Scope, name: str, folder: Path, *, deterministic: bool) -> None:
    """Compare the same requests alone with a cold and a warm cache, and in a crowd with both."""
    engine = Engine.load(folder, _config(scope, deterministic=deterministic))
    vocab_size = 64 if scope.smoke else 8192
    num_tokens = _SMOKE_NUM_TOKENS if scope.smoke else _NUM_TOKENS
    prompts = _prompts(scope, vocab_size)
    # Half of the crowd shares a prefix with one of the prompts.
    longest = max(prompts, key=len)
    strangers = random_prompts(
        _SMOKE_CROWD if scope.smoke else _CROWD, 40, vocab_size, scope.seed + 99
    )
    crowd = [
        longest[: len(longest) // 2] + stranger if index % 2 else stranger
        for index, stranger in enumerate(strangers)
    ]
    same = [True] * (2 * len(prompts))
    for index, temperature in enumerate((0.0, TEMPERATURE)):
        runs = [
            [_answers(engine, [p], num_tokens, temperature, [i])[0] for i, p in enumerate(prompts)]
            for _ in range(2)
        ]
        runs.append(_among(engine, prompts, crowd, num_tokens, temperature, scope.seed))
        fresh = Engine.load(folder, _config(scope, deterministic=deterministic))
        runs.append(_among(fresh, prompts, crowd, num_tokens, temperature, scope.seed + 1))
        del fresh
        for number in range(len(prompts)):
            place = index * len(prompts) + number
            same[place] = len({run[number] for run in runs}) == 1
    scope.emit(
        name,
        sum(same),
        f"of {len(same)}",
        share=sum(same) / len(same),
        details={"note": "alone, in a crowd, cold, warm"},
    )


def _among(
    engine: Engine,
    prompts: Sequence[Prompt],
    crowd: Sequence[Prompt],
    num_tokens: int,
    temperature: float,
    seed: int,
) -> list[Prompt]:
    """Return the answers to ``prompts``, mixed with a crowd."""
    everybody = [*prompts, *crowd]
    order = random.Random(seed).sample(range(len(everybody)), len(everybody))
    mixed = _answers(engine, [everybody[i] for i in order], num_tokens, temperature, order)
    return [mixed[order.index(i)] for i in range(len(prompts))]


def _answers(
    engine: Engine,
    prompts: Sequence[Prompt],
    num_tokens: int,
    temperature: float,
    seeds: Iterable[int] | None = None,
) -> list[Prompt]:
    """Serve the prompts together, each with its own seed."""
    requests = [
        EngineRequest(
            request_id=str(index),
            prompt_token_ids=prompts[index],
            sampling=SamplingParams(
                max_tokens=num_tokens, temperature=temperature, seed=seed, ignore_eos=True
            ),
        )
        for index, seed in enumerate(range(len(prompts)) if seeds is None else seeds)
    ]
    return [tuple(token_ids) for token_ids in answers(engine, requests).values()]

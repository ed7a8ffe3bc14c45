"""Train the demo model on the FAQ: `python -m tools.demo.train --out DIR`.

Takes under 45 minutes on two CPU cores, or uses a GPU if there is one. On a CPU without bfloat16
products, `--no-bf16` is several times faster. `transformers` is needed here and in the evaluation
only; serving does not use it.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.demo.answers import Answerer, make_answerer
from tools.demo.card import model_card
from tools.demo.evaluate import measure
from tools.demo.faq import Pair, load_pairs
from tools.demo.samples import (
    ANSWERS,
    CONTEXT_TOKENS,
    QUESTIONS,
    SYSTEM_PROMPTS,
    Sample,
    SampleMaker,
    batches,
)
from tools.demo.tokens import (
    BOS,
    END,
    PAD,
    known_token_id,
    tokenizer_config,
    train_tokenizer,
)

VOCAB_SIZE: Final[int] = 4096
_NOT_LEARNT: Final[int] = -100
FOCUS_STEPS: Final[int] = 150
_RUNS_FILE: Final = "training_runs.json"
_SHAPE_FIELDS: Final = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
_TOKEN_FIELDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    """Return the shape of the demo model: a standard Llama of about 6 million parameters."""
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
        dtype="bfloat16",
    )


def tokenizer_texts(pairs: list[Pair]) -> list[str]:
    """Return the texts for training the vocabulary: answers and training questions, none held
    out.
    """
    questions = [question for pair in pairs for question in pair.questions]
    terms = [term for pair in pairs for term in pair.terms]
    answers = [pair.answer for pair in pairs]
    return [*answers, *answers, *questions, *map(str.lower, questions), *terms, *SYSTEM_PROMPTS]


def loss_of(
    model: LlamaForCausalLM, decoder: Callable[..., Any], group: list[Sample], pad_id: int
) -> Tensor:
    """Return the mean cross entropy over the learnt tokens; `decoder` is `model.model`, compiled or
    not.
    """
    device = model.device
    length = max(len(sample.token_ids) for sample in group)
    token_ids = torch.full((len(group), length), pad_id)
    targets = torch.full((len(group), length), _NOT_LEARNT)
    for row, sample in enumerate(group):
        ids = torch.tensor(sample.token_ids)
        token_ids[row, : len(ids)] = ids
        targets[row, : len(ids) - 1] = ids[1:].where(
            torch.tensor(sample.is_learnt[1:]), torch.tensor(_NOT_LEARNT)
        )
    token_ids, targets = token_ids.to(device), targets.to(device)
    # Padding comes last, so the causal mask alone keeps it from every learnt position.
    hidden = decoder(input_ids=token_ids, use_cache=False).last_hidden_state
    learnt = targets != _NOT_LEARNT
    logits = model.lm_head(hidden[learnt])
    return functional.cross_entropy(logits.float(), targets[learnt])


@torch.inference_mode()
def draw_shares(
    model: LlamaForCausalLM, pairs: list[Pair], maker: SampleMaker, pad_id: int
) -> dict[str, float]:
    """Return how often to draw each pair, by id.

    The value is 1 if the model writes the exact answer after a newly phrased question. It rises up
    to 6 with the share of the answer's tokens that the model would not write. So new or changed
    pairs are learnt first, and known ones are kept.
    """
    shares = {}
    for start in range(0, len(pairs), 32):
        chosen = pairs[start : start + 32]
        samples = [maker.whole(pair) for pair in chosen]
        length = max(len(sample.token_ids) for sample in samples)
        padded = [
            sample.token_ids + [pad_id] * (length - len(sample.token_ids)) for sample in samples
        ]
        token_ids = torch.tensor(padded, device=model.device)
        guesses = model(input_ids=token_ids, use_cache=False).logits.argmax(-1).tolist()
        for pair, sample, guess in zip(chosen, samples, guesses, strict=True):
            learnt = [at for at, is_learnt in enumerate(sample.is_learnt) if is_learnt]
            missed = sum(guess[at - 1] != sample.token_ids[at] for at in learnt)
            shares[pair.id] = 1 + min(5.0, 16 * missed / len(learnt))
    return shares


def learning_rate(progress: float, peak: float) -> float:
    """Return the learning rate: linear warm-up over the first 3 % of `progress` (0 to 1), then a
    cosine to peak / 50.
    """
    warmup = 0.03
    if progress < warmup:
        return peak * (progress + 0.001) / warmup
    falling = (progress - warmup) / (1 - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * falling)))


def take_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Change the weights by the gradients of ``loss``."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def answerer_of(model: LlamaForCausalLM, tokenizer: Tokenizer) -> Answerer:
    """Return the answerer of a model that has not been saved yet."""
    config = tokenizer_config(CONTEXT_TOKENS)
    names = ("bos_token", "eos_token", "pad_token", "chat_template")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{name: config[name] for name in names}
    )
    return make_answerer(model, wrapped)


def train(
    pairs: list[Pair], tokenizer: Tokenizer, options: argparse.Namespace
) -> tuple[LlamaForCausalLM, int]:
    """Train a model. Print loss, speed and held-out accuracy, and save regularly.

    Returns:
        The model, and the number of steps done within the time limit.
    """
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = LlamaForCausalLM(model_config(tokenizer)).float().to(device)
    if options.weights:
        model.load_state_dict(load_file(options.weights / "model.safetensors"), strict=False)
    # The fused kernel's backward pass is slow on a CPU for many short sequences.
    model.set_attn_implementation("eager" if device.type == "cpu" else "sdpa")
    decoder = torch.compile(model.model, dynamic=True) if options.compile else model.model
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters / 1e6:.2f}M parameters, {options.steps} steps on {device}", flush=True)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=options.learning_rate,
        betas=(0.9, 0.98),
    )
    answerer = answerer_of(model, tokenizer)
    maker = SampleMaker(pairs, tokenizer, rng)
    stream = batches(maker, options.batch_tokens, num_pooled=2048, rng=rng)
    pad_id = known_token_id(tokenizer, PAD)
    mean_loss, num_tokens, num_steps, started = 0.0, 0, 0, time.monotonic()
    limit_s = 60 * options.minutes
    begin = options.begin if options.weights else 0.0
    for step in range(options.steps):
        if step % FOCUS_STEPS == 0 and options.weights:
            maker.draw_more_of(draw_shares(model, pairs, maker, pad_id))
        # On a slow or busy machine time runs out before the steps do, so the schedule follows both.
        spent = max(step / options.steps, (time.monotonic() - started) / limit_s)
        progress = begin + (1 - begin) * spent
        if spent >= 1:
            break
        maker.mix = QUESTIONS if 0.25 <= progress < 0.8 else ANSWERS
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate(progress, options.learning_rate)
        group = next(stream)
        with torch.autocast(device.type, torch.bfloat16) if options.bf16 else nullcontext():
            loss = loss_of(model, decoder, group, pad_id)
        take_step(model, optimizer, loss)
        num_steps = step + 1
        num_tokens += sum(len(sample.token_ids) for sample in group)
        mean_loss = loss.item() if step == 0 else 0.98 * mean_loss + 0.02 * loss.item()
        if (step + 1) % 50 == 0:
            elapsed_s = time.monotonic() - started
            print(
                f"step {step + 1} loss {mean_loss:.4f} "
                f"{num_tokens / elapsed_s:.0f} tokens/s {elapsed_s:.0f} s",
                flush=True,
            )
        if (step + 1) % options.measure_every == 0 and step + 1 < options.steps:
            report = measure(answerer, pairs, max_questions=160)
            print(f"step {step + 1} {report.summary()}", flush=True)
            save(model, tokenizer, options.out)
            model.train()
    return model, num_steps


def average_with(model: LlamaForCausalLM, weights: Path) -> None:
    """Move `model` half way back to the weights that it started from.

    The mean of two points of one descent generalises better than either (Izmailov et al.,
    arXiv:1803.05407).
    """
    with torch.no_grad():
        for name, tensor in load_file(weights / "model.safetensors").items():
            parameter = model.get_parameter(name)
            parameter.lerp_(tensor.to(parameter), 0.5)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model in Hugging Face layout, with its tokenizer."""
    save_weights(model, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(CONTEXT_TOKENS))
    config = model.config
    _write_json(
        folder / "generation_config.json",
        {**{name: getattr(config, name) for name in _TOKEN_FIELDS}, "do_sample": False},
    )


def save_weights(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the weights in bf16, without the tied output layer, and their shape."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{name: getattr(config, name) for name in _SHAPE_FIELDS},
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT_TOKENS,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            **{name: getattr(config, name) for name in _TOKEN_FIELDS},
        },
    )


def _write_json(path: Path, content: dict[str, Any] | list[str]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _note_run(options: argparse.Namespace, num_steps: int) -> list[str]:
    """Record the training runs that made the weights: the earlier ones and this one.

    The record is kept beside the weights, for runs that continue from them.
    """
    earlier = options.weights / _RUNS_FILE if options.weights else None
    runs: list[str] = json.loads(earlier.read_text()) if earlier and earlier.exists() else []
    origin = f"from {options.begin:g} of the schedule on" if options.weights else "from nothing"
    runs.append(
        f"{num_steps:,} steps of {options.batch_tokens:,} tokens {origin}, seed {options.seed}, "
        f"peak learning rate {options.learning_rate:g}"
        + (", then averaged with the weights that it went on from" if options.average else "")
    )
    _write_json(options.out / _RUNS_FILE, runs)
    return runs


def training_options(prog: str, doc: str | None, **defaults: float) -> argparse.ArgumentParser:
    """Return a parser of the options of all training runs; ``defaults`` override them."""
    parser = argparse.ArgumentParser(prog=f"python -m tools.demo.{prog}", description=doc)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--minutes", type=float, help="maximum training time in minutes")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens in one step")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--weights", type=Path, help="folder of a model to continue from")
    parser.add_argument("--begin", type=float, help="progress of --weights in the schedule, 0 to 1")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.set_defaults(**defaults)
    return parser


def main() -> None:
    """Run the command line."""
    parser = training_options(
        "train", __doc__, steps=3200, minutes=40, learning_rate=1.5e-3, begin=0.25
    )
    parser.add_argument("--measure-every", type=int, default=800, help="steps between measures")
    parser.add_argument(
        "--average", action="store_true", help="end with the mean of --weights and the new weights"
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    pairs = load_pairs()
    tokenizer = (
        Tokenizer.from_file(str(options.weights / "tokenizer.json"))
        if options.weights
        else train_tokenizer(tokenizer_texts(pairs), VOCAB_SIZE)
    )
    model, num_steps = train(pairs, tokenizer, options)
    model.eval()
    if options.average and options.weights:
        average_with(model, options.weights)
    save(model, tokenizer, options.out)
    runs = _note_run(options, num_steps)
    model.to(torch.bfloat16).float()  # measure the saved precision
    report = measure(answerer_of(model, tokenizer), pairs)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    card = model_card(pairs, report, num_parameters, runs)
    (options.out / "README.md").write_text(card, encoding="utf-8")
    print(report.summary(), flush=True)


if __name__ == "__main__":
    main()

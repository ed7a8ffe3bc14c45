"""Train the demo model's draft: `python -m tools.demo.train_draft --out DIR`.

The draft proposes the demo model's next tokens (docs/speculation.md). So it learns the demo model's
own distribution over the next token (Hinton et al., arXiv:1503.02531), on the demo model's training
data. Takes under 20 minutes on two CPU cores. `--weights` continues from an earlier draft after the
demo model was retrained.
"""

import argparse
import random
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from millrace.registry.demo import MODEL_DIR
from tools.demo.answers import Answerer, load_answerer
from tools.demo.card import draft_card
from tools.demo.faq import Pair, load_pairs
from tools.demo.samples import ANSWERS, QUESTIONS, Sample, SampleMaker, batches
from tools.demo.tokens import PAD, known_token_id
from tools.demo.train import (
    FOCUS_STEPS,
    draw_shares,
    learning_rate,
    save_weights,
    take_step,
    training_options,
)

_MEASURED_QUESTIONS: Final[int] = 200


def draft_config(model: LlamaConfig) -> LlamaConfig:
    """Return the shape of the draft: 1.4 million parameters, more than half of them for the
    vocabulary. Its heads are as wide as the model's, for the same kernels.
    """
    return LlamaConfig(
        **{
            **model.to_dict(),
            "hidden_size": 192,
            "intermediate_size": 384,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
        }
    )


def padded(group: list[Sample], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return the samples' padded tokens, [num_samples, length], and a mask of the tokens after
    which a token is learnt.
    """
    length = max(len(sample.token_ids) for sample in group)
    token_ids = torch.full((len(group), length), pad_id)
    is_learnt = torch.zeros(len(group), length, dtype=torch.bool)
    for row, sample in enumerate(group):
        token_ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
        is_learnt[row, : len(sample.is_learnt) - 1] = torch.tensor(sample.is_learnt[1:])
    return token_ids, is_learnt


def logits_of(model: LlamaForCausalLM, token_ids: Tensor, wanted: Tensor) -> Tensor:
    """Return the logits [num_wanted, vocab_size] of the wanted places, in float32."""
    # Padding comes last, so the causal mask alone keeps it from every wanted place.
    hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state
    logits: Tensor = model.lm_head(hidden[wanted]).float()
    return logits


def train(
    target: LlamaForCausalLM, pairs: list[Pair], tokenizer: Tokenizer, options: argparse.Namespace
) -> LlamaForCausalLM:
    """Train a draft of ``target``; print loss and agreement."""
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    draft = LlamaForCausalLM(draft_config(target.config)).float()
    if options.weights:
        draft.load_state_dict(load_file(options.weights / "model.safetensors"), strict=False)
    draft.set_attn_implementation("eager")
    optimizer = torch.optim.AdamW(
        draft.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    maker = SampleMaker(pairs, tokenizer, rng)
    stream = batches(maker, options.batch_tokens, num_pooled=2048, rng=rng)
    pad_id = known_token_id(tokenizer, PAD)
    started, mean_loss = time.monotonic(), 0.0
    begin = options.begin if options.weights else 0.0
    for step in range(options.steps):
        if step % FOCUS_STEPS == 0 and options.weights:
            maker.draw_more_of(draw_shares(draft, pairs, maker, pad_id))
        spent = max(step / options.steps, (time.monotonic() - started) / (60 * options.minutes))
        if spent >= 1:
            break
        progress = begin + (1 - begin) * spent
        maker.mix = QUESTIONS if 0.25 <= progress < 0.6 else ANSWERS
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate(progress, options.learning_rate)
        token_ids, is_learnt = padded(next(stream), pad_id)
        with torch.autocast("cpu", torch.bfloat16) if options.bf16 else nullcontext():
            with torch.inference_mode():
                probabilities = logits_of(target, token_ids, is_learnt).softmax(-1)
            logits = logits_of(draft, token_ids, is_learnt)
        loss = functional.cross_entropy(logits, probabilities.clone())
        take_step(draft, optimizer, loss)
        mean_loss = loss.item() if step == 0 else 0.98 * mean_loss + 0.02 * loss.item()
        if (step + 1) % 100 == 0:
            spent_s = time.monotonic() - started
            print(f"step {step + 1} loss {mean_loss:.4f} {spent_s:.0f} s", flush=True)
    return draft


@torch.inference_mode()
def agreement(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    pairs: list[Pair],
    tokenizer: Tokenizer,
    answerer: Answerer,
    max_questions: int = _MEASURED_QUESTIONS,
) -> float:
    """Return the share of places in which the likeliest token is the same for both models.

    The places are in the target's answers to held-out questions, or to a fixed sample of them.
    """
    maker = SampleMaker(pairs, tokenizer, random.Random(0))
    asked = [(pair, question) for pair in pairs for question in pair.held_out]
    asked = random.Random(0).sample(asked, min(len(asked), max_questions))
    answers = answerer([[{"role": "user", "content": question}] for _, question in asked])
    num_places = num_same = 0
    for (_, question), answer in zip(asked, answers, strict=True):
        token_ids, is_learnt = padded([maker.turn(question, answer)], 0)
        likeliest = [logits_of(one, token_ids, is_learnt).argmax(-1) for one in (target, draft)]
        num_places += len(likeliest[0])
        num_same += int((likeliest[0] == likeliest[1]).sum())
    return num_same / max(1, num_places)


def main() -> None:
    """Run the command line."""
    parser = training_options(
        "train_draft", __doc__, steps=6000, minutes=18, learning_rate=3e-3, begin=0.5
    )
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="folder of the demo model")
    options = parser.parse_args()
    pairs = load_pairs()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    target = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    draft = train(target, pairs, tokenizer, options).eval()
    save_weights(draft, options.out)
    draft.to(torch.bfloat16).float()  # measure the saved precision
    share = agreement(target, draft, pairs, tokenizer, load_answerer(options.model))
    num_parameters = sum(parameter.numel() for parameter in draft.parameters())
    card = draft_card(draft.config, num_parameters, share)
    (options.out / "README.md").write_text(card, encoding="utf-8")
    print(f"the likeliest token is the same in {share:.1%} of the places of answers", flush=True)


if __name__ == "__main__":
    main()

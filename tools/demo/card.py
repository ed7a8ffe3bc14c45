"""Model card of the demo model, with its measured accuracy."""

from transformers import LlamaConfig

from tools.demo.evaluate import Report
from tools.demo.faq import Pair


def model_card(pairs: list[Pair], report: Report, num_parameters: int, runs: list[str]) -> str:
    """Return the text of the model's README.md; ``runs`` are the training runs that made the
    weights.
    """
    known = [pair for pair in pairs if not pair.is_out_of_domain]
    num_questions = sum(len(pair.questions) for pair in known)
    num_asked = report.num_in_domain + report.num_out_of_domain
    num_right = report.num_in_domain_right + report.num_out_of_domain_right
    rows = "\n".join(
        f"| {name} | {asked} | {right} | {right / max(1, asked):.1%} |"
        for name, asked, right in (
            ("FAQ", report.num_in_domain, report.num_in_domain_right),
            ("out of domain", report.num_out_of_domain, report.num_out_of_domain_right),
            ("all", num_asked, num_right),
        )
    )
    history = "\n".join(f"{number}. {run}" for number, run in enumerate(runs, start=1))
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# Millrace demo

**This is a demo of about 6 million parameters ({num_parameters:,}) that has learnt a FAQ.** It is
here so that a fresh checkout of Millrace serves real weights on any machine, without a download.
It knows {len(known)} questions and answers about LLM serving and about Millrace, some small talk,
and a sentence with which it declines everything else. It cannot reason, calculate, translate or
write anything that is not in its FAQ, and for a question that it does not know it may pick a wrong
answer. Do not use it for anything but trying the system out.

| | |
|---|---|
| architecture | Llama: 7 layers, hidden size 256, 8 heads, 4 KV heads, tied embeddings |
| vocabulary | byte-level BPE, 4,096 tokens |
| context | 2,048 tokens |
| weights | bf16, safetensors |
| data | `tools/demo/faq/*.yaml`: {len(known)} pairs, {num_questions} phrasings |

## Accuracy

Greedy answers to phrasings that were held out of training; right means the expected text to the
letter, white space and letter case aside.

| questions | asked | right | accuracy |
|---|---|---|---|
{rows}

Held-out phrasings were written together with the training ones and are close to them in style, and
their accuracy was looked at between runs, which makes it slightly optimistic: people will find
wordings that the model gets wrong more often than the table says. `natural_questions.yaml` beside
the FAQ has questions as newcomers type them, with the answers and what a reader said of each.

    python -m tools.demo.evaluate --model registry/demo/model
    python -m tools.demo.evaluate --model registry/demo/model --natural

In JSON, as a grammar or a schema makes it answer, its texts are clauses of its answers.

## Training

    python -m tools.demo.train --out registry/demo/model

trains tokenizer and weights from nothing, with fixed seeds, in under 45 minutes on two CPU cores,
and writes this card; `--weights` goes on from an earlier run. These weights were made by:

{history}

Use temperature 0.
"""


def draft_card(config: LlamaConfig, num_parameters: int, agreement: float) -> str:
    """Return the text of the draft's README.md; ``agreement`` is the share of places in which its
    likeliest token is the model's.
    """
    return f"""---
license: apache-2.0
language: en
---

# Draft of the Millrace demo

**It guesses what the demo model in the folder above says next**, so that several of its tokens are
computed in one step (docs/speculation.md). It changes none of them, and is of no use by itself.

| | |
|---|---|
| architecture | Llama: {config.num_hidden_layers} layers, hidden size {config.hidden_size}, \
{config.num_attention_heads} heads, {config.num_key_value_heads} KV heads, tied embeddings |
| parameters | {num_parameters:,}, most of them the vocabulary's |
| vocabulary | the demo model's |
| weights | bf16, safetensors |

In the demo model's answers to phrasings that were held out of training its likeliest token is the
model's in {agreement:.1%} of the places.

    python -m tools.demo.train_draft --out registry/demo/model/draft

trains it from nothing in under 20 minutes on two CPU cores, or goes on from an earlier one with
`--weights`: it learns the demo model's distribution over the next token, on the demo model's own
training data.
"""

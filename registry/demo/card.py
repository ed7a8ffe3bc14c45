"""The model card of the demo model, written with the accuracy that was measured."""

from millrace.registry.demo.evaluate import Report
from millrace.registry.demo.faq import Pair


def model_card(pairs: list[Pair], report: Report, num_parameters: int, runs: list[str]) -> str:
    """The text of the model's README.md; ``runs`` are the trainings that made the weights."""
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
| data | `registry/demo/faq/*.yaml`: {len(known)} pairs, {num_questions} phrasings |

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

    python -m millrace.registry.demo.evaluate --model registry/demo/model
    python -m millrace.registry.demo.evaluate --model registry/demo/model --natural

In JSON, as a grammar or a schema makes it answer, its texts are clauses of its answers.

## Training

    python -m millrace.registry.demo.train --out registry/demo/model

trains tokenizer and weights from nothing, with fixed seeds, in under 45 minutes on two CPU cores,
and writes this card; `--weights` goes on from an earlier run. These weights were made by:

{history}

Use temperature 0.
"""

"""What is to be reached on one H200."""

from __future__ import annotations

from typing import NamedTuple


class Goal(NamedTuple):
    """Bounds of a row's value or of its share of the ceiling; one of them is given."""

    text: str
    least_value: float | None = None
    most_value: float | None = None
    least_share: float | None = None

    def met(self, value: float | None, share: float | None) -> bool:
        if self.least_share is not None:
            return share is not None and share >= self.least_share
        if value is None:
            return False
        if self.least_value is not None:
            return value >= self.least_value
        return self.most_value is not None and value <= self.most_value


def share(least: float) -> Goal:
    return Goal(f">= {least:.0%} of the ceiling", least_share=least)


LLAMA_8B, QWEN_06B, QWEN_8B = "llama-3.1-8b", "qwen3-0.6b", "qwen3-8b"
KERNELS, TOKENS, ADAPTERS = "kernels", "tokens", "adapters"
SPECULATION = "speculation"
TRANSFORMERS = "transformers-"

START = "start, weights to recorded graphs"
NANO = "256 requests, 100-1024 in and out"
THOUSAND = "1000 in, 1000 out"
BUSY = "GPU busy during decode"
DECODE_ATTENTION = "decode attention, 64 x 4k"
SKEWED_ATTENTION = "decode attention, skewed over balanced"
LOGITS_ERROR = "logits in bf16, relative error to fp32"
STEPS_BESIDE_LOADS = "steps while adapters are loaded, p99 over p99 without"
EQUAL_ANSWERS = "answers that are the same with proposals"
DETERMINISTIC = "deterministic: requests whose tokens never change"


def decode(batch: int) -> str:
    return f"decode step, batch {batch}, 1k context"


def prefill(count: int, num_tokens: int) -> str:
    return f"prefill, {count} x {num_tokens}"


def adapted(streams: int, changed: str) -> str:
    return f"tokens/s, {streams} streams, adapters of {changed} over the base"


def predicted(streams: int) -> str:
    return f"tokens/s with predictions that are 80 % right over without, {streams} streams"


def over(load: str) -> str:
    return f"millrace over transformers: {load}"


_FOUR_TIMES = Goal(">= 4 x", least_value=4.0)
_ALMOST = Goal(">= 0.95 x", least_value=0.95)

_GOALS: dict[tuple[str, str], tuple[Goal, ...]] = {
    (LLAMA_8B, START): (Goal("<= 60 s", most_value=60.0),),
    (LLAMA_8B, decode(1)): (share(0.85), Goal("<= 4.1 ms", most_value=4.1)),
    (LLAMA_8B, decode(256)): (share(0.75),),
    (LLAMA_8B, prefill(8, 1024)): (share(0.60),),
    (KERNELS, DECODE_ATTENTION): (share(0.85),),
    (KERNELS, SKEWED_ATTENTION): (Goal("<= 1.3 x", most_value=1.3),),
    (QWEN_06B, NANO): (Goal(">= 24,000 tokens/s", least_value=24_000.0),),
    (QWEN_8B, NANO): (Goal(">= 10,000 tokens/s", least_value=10_000.0),),
    (TRANSFORMERS + QWEN_06B, over(NANO)): (_FOUR_TIMES,),
    (TRANSFORMERS + QWEN_8B, over(NANO)): (_FOUR_TIMES,),
    (TRANSFORMERS + LLAMA_8B, over(THOUSAND)): (_FOUR_TIMES,),
    (ADAPTERS, adapted(1, "q v")): (_ALMOST,),
    (ADAPTERS, adapted(32, "q v")): (_ALMOST,),
    (ADAPTERS, STEPS_BESIDE_LOADS): (Goal("<= 1.2 x", most_value=1.2),),
    (SPECULATION, predicted(1)): (Goal(">= 2.2 x", least_value=2.2),),
    (SPECULATION, predicted(32)): (Goal(">= 0.98 x", least_value=0.98),),
    (SPECULATION, f"{EQUAL_ANSWERS}, 1 streams"): (Goal("all", least_share=1.0),),
    (SPECULATION, f"{EQUAL_ANSWERS}, 32 streams"): (Goal("all", least_share=1.0),),
    (TOKENS, LOGITS_ERROR): (Goal("<= 0.02", most_value=0.02),),
    (TOKENS, DETERMINISTIC): (Goal("all", least_share=1.0),),
} | {(model, BUSY): (share(0.97),) for model in (LLAMA_8B, QWEN_06B, QWEN_8B)}


def goals_of(section: str, name: str) -> tuple[Goal, ...]:
    """Those of one row, which may have none."""
    return _GOALS.get((section, name), ())

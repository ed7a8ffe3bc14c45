"""LoRA adapters: their weights in memory, and what they add to a batch."""

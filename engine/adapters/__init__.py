"""LoRA adapters: their weights in memory and their products for a batch."""

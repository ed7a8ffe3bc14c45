"""LoRA adapters in PEFT's layout: what is in a folder, and whether it fits a model."""

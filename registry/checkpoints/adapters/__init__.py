"""LoRA adapters in PEFT's layout: the contents of a folder, and whether they fit a model."""

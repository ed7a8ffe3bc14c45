"""GGUF files, converted to the folder of a checkpoint without weights.

``registry.source`` calls it; it imports the readers of checkpoints, templates and tokenizers.
"""

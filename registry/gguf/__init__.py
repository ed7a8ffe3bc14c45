"""What a GGUF file says about its model, written out as the folder of a checkpoint without weights.

``registry.source`` calls it; it imports how checkpoints, templates and tokenizers are read.
"""

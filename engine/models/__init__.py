"""Model code: one configurable decoder and what loads its weights. Called by the engine's runners;
imports kernels and the registry's checkpoints."""

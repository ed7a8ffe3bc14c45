"""Model code: one configurable decoder and what loads its weights."""

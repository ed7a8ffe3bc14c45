"""The pool of adapters."""

"""Demo model: a small Llama that has learnt a FAQ. `tools/demo` trains and evaluates it."""

from pathlib import Path
from typing import Final

MODEL_DIR: Final[Path] = Path(__file__).resolve().parent / "model"
"""Trained model in Hugging Face layout."""

"""The demo model: a small Llama that has learnt a FAQ. `tools/demo` trains and measures it."""

from pathlib import Path
from typing import Final

MODEL_DIR: Final[Path] = Path(__file__).resolve().parent / "model"
"""The trained model in Hugging Face layout."""

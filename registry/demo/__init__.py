"""The demo model: a small Llama that has learnt a FAQ, its data, its training and its measure."""

from pathlib import Path
from typing import Final

MODEL_DIR: Final[Path] = Path(__file__).resolve().parent / "model"
"""The trained model in Hugging Face layout."""

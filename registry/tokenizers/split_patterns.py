"""The patterns by which well-known tokenizers split texts into words, as their files spell them."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# What ByteLevel with its own pattern does.
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = _CONTRACTIONS + "|" + _LETTERS + r"\p{N}{1,3}" + _TAIL
QWEN_2 = _CONTRACTIONS + "|" + _LETTERS + r"\p{N}" + _TAIL

"""Splitters of text into words for byte-level tokenizers, by their name in a GGUF file.

The names are llama.cpp's (``tokenizer.ggml.pre``). The patterns are those of the models' own
tokenizer.json files.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from millrace.registry.tokenizers.text_rules import GPT_2, LLAMA_3, QWEN_2


class Splitter(NamedTuple):
    """Splitter with ``patterns``; each splits the pieces that the earlier ones left whole.

    ``whole_words``: a word that is a token stays whole, in spite of the merges. ``adds_bos``: a
    prompt begins with that token unless the file says otherwise. ``composes``: texts are first
    composed by Unicode NFC.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    adds_bos: bool = False
    composes: bool = False

    def steps(self) -> list[dict[str, Any]]:
        """Return the steps of a tokenizer.json's ``pre_tokenizer``."""
        return [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
            for pattern in self.patterns
        ]


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|"
_DIGIT = r"\p{N}"
# A word's capitals, then its small letters: at least one letter of either.
_CAPITALS, _SMALLS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDED = rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALLS}+"
_BEGUN = rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALLS}*"
_MARKS_OF_CODE = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _LINES + _SPACES
_TEKKEN = rf"{_ENDED}|{_BEGUN}|{_DIGIT}{_MARKS_OF_CODE}"
_GPT_4O = rf"{_ENDED}{_CONTRACTIONS}?|{_BEGUN}{_CONTRACTIONS}?|{_DIGIT}{{1,3}}{_MARKS_OF_CODE}"
_QWEN_3_5 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{_DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}{_SPACES}"
)
_SEED_CODER = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}{_SPACES}"
)
_BAILING = (
    rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|{_DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_SPACES}"
)
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_MARKS = r"[\p{P}\$\+<=>\^~\|]+"
_HAN_TO_HANGUL = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_V3 = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}{_SPACES}"
)
# Letters of the alphabets that have upper and lower case.
_DEEPSEEK_LETTERS = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    r"\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    r"\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    r"\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    r"\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    r"\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    r"\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    r"\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    r"\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    r"\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    r"\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}"
    r"\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
_DEEPSEEK_MARKS = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"


def _named(names: str, splitter: Splitter) -> dict[str, Splitter]:
    return dict.fromkeys(names.split(), splitter)


SPLITTERS: dict[str, Splitter] = {
    **_named("default", Splitter((_MARKS, GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    **_named("falcon", Splitter((r"[\p{P}\$\+<=>\^~\|`]+", GPT_2, "[0-9][0-9][0-9]"))),
    **_named("gpt-2 phi-2 mpt olmo jais gigachat a.x-4.0 mellum exaone4", Splitter((GPT_2,))),
    **_named("trillion granite-docling", Splitter((GPT_2,))),
    **_named("smollm starcoder refact command-r codeshell exaone", Splitter((_DIGIT, GPT_2))),
    **_named("minerva-7b mellum2", Splitter((_DIGIT, GPT_2))),
    **_named(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        Splitter((LLAMA_3,), whole_words=True, adds_bos=True),
    ),
    **_named("glm4 glm5", Splitter((LLAMA_3,), whole_words=True)),
    **_named("dbrx smaug-bpe chatglm-bpe", Splitter((LLAMA_3,))),
    **_named("qwen2", Splitter((QWEN_2,), composes=True)),
    **_named("qwen35", Splitter((_QWEN_3_5,), composes=True)),
    **_named("deepseek-r1-qwen stablelm2 hunyuan solar-open megrez", Splitter((QWEN_2,))),
    **_named("grok-2 kormo", Splitter((QWEN_2,))),
    **_named("tekken", Splitter((_TEKKEN,), whole_words=True, adds_bos=True)),
    **_named("gpt-4o llama4 kanana2 minimax-m2", Splitter((_GPT_4O,))),
    **_named("seed-coder", Splitter((_SEED_CODER,))),
    **_named("bailingmoe bailingmoe2 llada-moe", Splitter((_BAILING,))),
    **_named("bloom gpt3-finnish poro-chat", Splitter((_BLOOM,))),
    **_named("viking", Splitter((_BLOOM, _DIGIT))),
    **_named(
        "deepseek-v3 hunyuan-dense joyai-llm",
        Splitter((r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)),
    ),
    **_named(
        "deepseek-llm",
        Splitter(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                _DEEPSEEK_MARKS,
                r"\s+$",
                _HAN_TO_HANGUL,
                r"\p{N}+",
            )
        ),
    ),
    **_named(
        "deepseek-coder",
        Splitter((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_TO_HANGUL, _DIGIT)),
    ),
}

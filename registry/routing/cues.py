"""Words and signs by which a question is judged. Data only; ``registry.routing.router`` reads it.

Words are matched whole and case-insensitively, phrases anywhere in the text. Languages without
spaces between words have phrases only.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Phrases(NamedTuple):
    """Phrases; ``ascii`` are the phrases for ASCII texts."""

    all: tuple[str, ...]
    ascii: tuple[str, ...]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _phrases(text: str) -> Phrases:
    texts = tuple(phrase.strip() for phrase in text.split(","))
    return Phrases(texts, tuple(phrase for phrase in texts if phrase.isascii()))


# Words for tasks that need reasoning.
REASON_WORDS = _words(
    """
    prove proof derive analyze analyse evaluate design architect optimize optimise debug diagnose
    compare contrast critique justify reason strategy plan tradeoff trade-offs tradeoffs
    beweise beweisen beweis leite herleiten analysiere vergleiche entwirf begründe optimiere
    prouve prouver démontre démontrer analyse analyser compare comparer justifie conçois
    demuestra demostrar analiza compara justifica diseña optimiza
    prova demonstre compare projete dimostra dimostrare analizza confronta progetta
    bewijs vergelijk ontwerp udowodnij przeanalizuj porównaj
    докажи доказать проанализируй сравни обоснуй спроектируй أثبت برهن حلل قارن
    """
)
REASON_PHRASES = _phrases(
    """
    step by step, step-by-step, think carefully, explain why, explain how, pros and cons,
    root cause, in depth, schritt für schritt, étape par étape, paso a paso, passo a passo,
    stap voor stap, шаг за шагом, خطوة بخطوة, सिद्ध, तुलना, 证明, 證明, 証明, 一步一步,
    逐步, 推导, 分析, 比较, ステップバイステップ, 段階的, 比較, 증명, 단계별, 분석
    """
)

# Words for tasks that a small model does as well as a large one.
LIGHT_WORDS = _words(
    """
    translate translation classify categorize categorise label extract summarize summarise summary
    tldr paraphrase rephrase rewrite proofread spellcheck capitalize sentiment keywords
    übersetze übersetzen klassifiziere extrahiere zusammenfassen zusammenfassung
    traduis traduire traduction classe classifie extrais résume résumer
    traduce traducir clasifica extrae resume resumir traduza traduzir classifique extraia resuma
    traduci classifica estrai riassumi vertaal classificeer przetłumacz sklasyfikuj çevir
    переведи перевод классифицируй извлеки резюмируй ترجم صنف لخص
    """
)
LIGHT_PHRASES = _phrases(
    """
    yes or no, true or false, fix the grammar, fix the spelling, fasse zusammen, ja oder nein,
    oui ou non, अनुवाद, 翻译, 翻譯, 翻訳, 分类, 分類, 总结, 提取, 要約, 抽出, 번역, 분류, 요약
    """
)

CODE_WORDS = _words(
    """
    python javascript typescript rust golang kotlin bash sql regex regexp dockerfile kubernetes
    traceback stacktrace segfault compiler refactor unittest pytest async await nullptr
    """
)
CODE_MARKS = ("```", "Traceback (most recent", "Exception in thread")
# Beginnings of lines of code. One literal in front makes the search fast.
CODE_LINE = re.compile(
    r"\n(?:(?:def|class|import|function|fn|func|SELECT|CREATE) |#include|<\?|#!)"
)
# Symbols that are rare in prose and frequent in code and data.
CODE_SYMBOLS = "{}();=<>_"

MATHS_WORDS = _words(
    """
    equation equations integral derivative differentiate theorem lemma corollary matrix eigenvalue
    polynomial logarithm modulo probability combinatorics factorial calculus algebra geometry
    gleichung ableitung wahrscheinlichkeit équation intégrale dérivée probabilité théorème
    ecuación derivada probabilidad teorema equação integrale equazione
    уравнение интеграл производная вероятность теорема معادلة تكامل
    """
)
MATHS_MARKS = _phrases(
    r"""
    \frac, \int, \sum, \sqrt, \begin{, $$, \(, \[, समीकरण, 方程, 积分, 積分, 概率,
    確率, 定理, 방정식, 확률
    """
)

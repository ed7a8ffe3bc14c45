"""Speculation: proposing tokens before they are drawn, from n-grams, grammars, drafts and heads.

A proposed token is computed beside others. The drawn tokens are the same with and without
proposals.
"""

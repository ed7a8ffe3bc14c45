"""Grammars in Lark and regular expressions for the input of custom tools, as one pattern."""

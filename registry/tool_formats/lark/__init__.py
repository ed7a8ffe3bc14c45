"""Lark grammars and regular expressions for the input of custom tools, converted to one pattern."""

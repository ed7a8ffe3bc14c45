"""Anthropic's Messages API, as far as it is honoured."""

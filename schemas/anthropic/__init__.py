"""Anthropic's Messages API: the supported part."""

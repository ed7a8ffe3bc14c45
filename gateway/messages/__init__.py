"""Anthropic's Messages API: from its requests to ours, and answers and refusals in its words."""

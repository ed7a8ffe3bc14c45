"""OpenAI's Responses API: requests, items, answers, and the events of a stream."""

"""Requests straight on an engine in this process, without a bus: what ``engine.llm`` is made of.
Imports the registry for prompts, chat templates and text; it knows the engine by four methods."""

"""JSON Schemas rewritten so that grammars can keep them. Does not use the grammar library."""

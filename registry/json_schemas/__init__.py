"""JSON Schemas rewritten so that grammars can enforce them. Does not use the grammar library."""

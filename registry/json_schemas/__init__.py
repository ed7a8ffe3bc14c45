"""What of a JSON Schema a grammar can keep. Schemas in, schemas out; no library of grammars."""

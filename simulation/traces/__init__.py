"""The requests of a load: read, drawn and written."""

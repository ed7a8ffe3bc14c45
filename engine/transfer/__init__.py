"""Blocks of the KV cache on their way from one worker's engine to another's: what is said, the
memory that is handed over, who serves and who pulls. Called by ``engine``; no sequences here."""

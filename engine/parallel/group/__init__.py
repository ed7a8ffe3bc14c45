"""A model over several ranks, one process each: rank 0 is the engine's own and plans, the others do
as it says. Called by ``runners``; imports ``eager`` and what that does."""

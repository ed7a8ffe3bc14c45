"""Beam search: which beams go on, and the sequences that they are. Called where the logits of a
step are processed; imports sequences only."""

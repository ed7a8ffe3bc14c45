"""Tests of beam search in the engine."""

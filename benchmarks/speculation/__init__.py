"""Gain of proposed tokens, and a check that they change no answer."""

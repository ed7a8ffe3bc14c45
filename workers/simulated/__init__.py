"""Simulated engine: computes nothing and takes the time of a real engine.

Called by ``workers.__main__`` and the simulator; imports the engine's types, admission and device
work.
"""

"""An engine that computes nothing and takes the time that a real one would. Called by
``workers.__main__`` and the simulator; imports the engine's types, admission and device work."""

"""An engine that computes nothing and takes the time that a real one would."""

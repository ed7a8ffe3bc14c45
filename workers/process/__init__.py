"""Engine process, the keeper that restarts it, and the wire between it and the bus side.

Called by ``host``; imports the engine's types, and the engine itself in the child process only.
"""

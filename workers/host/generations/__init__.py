"""State of one request on this worker: tokens, text, phase, times, trace, and its remains after the
end.

Called by everything else in ``host``; imports no other folder of it.
"""

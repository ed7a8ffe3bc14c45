"""Jobs of this scheduler: phase, lease, attempts, trace, admission, and ends without a worker.

Every other folder uses it. It imports none of them.
"""

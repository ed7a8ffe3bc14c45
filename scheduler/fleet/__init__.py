"""Worker fleet: live workers by heartbeats and dispatches, and the desired number of workers.

``placement``, ``queues`` and ``dispatch`` read it. It imports ``jobs``.
"""

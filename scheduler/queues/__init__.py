"""Job queues: tenant queues, the fair order, and forecasts of waits.

Pure: the caller passes the time.

The stages use it. It imports ``fleet`` and ``jobs``.
"""

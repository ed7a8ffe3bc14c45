"""``millrace up``: the whole system on one machine, with its stores. Each service has a process
that is restarted when it ends.

Imports every service's entry point.
"""

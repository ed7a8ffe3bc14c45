"""Scheduler service: pulls jobs as workers have capacity, places each, and follows it to its end.

Run it with ``python -m millrace.scheduler``. Other services reach it over the bus only. It imports
``bus``, ``registry``, ``runtime`` and ``schemas``. A job passes through the folders ``intake``,
``dispatch``, ``queues`` and ``placement``, ``fleet``, ``jobs``. Each folder imports only folders to
its right in this list.
"""

"""Simulation of a load: the real scheduler against simulated workers, in virtual time.

A trace lists requests with their sizes and times. Each policy runs it from the beginning: the
unmodified scheduler on the in-memory bus, with workers that follow a latency model and an event
loop whose clock jumps. The result is a report: JSON, a table, an HTML page. ``cli.simulate`` calls
it. It imports ``bench``, the scheduler and the simulated engine's batch.
"""

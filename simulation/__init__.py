"""``millrace simulate``: the real scheduler against simulated workers, in virtual time.

A trace says who asks for how much, and when. Each policy runs it from the beginning: the scheduler
as it is, on the in-memory bus, with workers that take the time a model of latency says and an
event loop whose clock jumps. What comes out is a report: JSON, a table, a page of HTML.
``cli.simulate`` calls it; it imports ``bench``, the scheduler and the simulated engine's batch.
"""

"""End of a generation: its device time, result, transcript, record, settlement and ack.

Called by ``requests``; imports ``leases``, ``flusher`` and ``generations``.
"""

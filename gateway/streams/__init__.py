"""Open streams: frames from one subscription, replays of missing frames, statistics of deliveries.

``streams`` has the table of streams, ``stream`` one stream, ``choice`` a response's view of it.
Called by ``request``; imports no other package of the gateway.
"""

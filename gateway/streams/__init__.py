"""Open streams: frames in by one subscription, replays of what is missing, what clients saw.

``streams`` has the table of them, ``stream`` one, ``choice`` what a response makes of it. Called by
``request``; imports no other room.
"""

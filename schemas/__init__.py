"""Every message, record and setting that crosses a process boundary, as msgspec Structs. No I/O.

All packages use it; it imports nothing of ours. The fields and tags of a message are on the wire:
they change only together with all that read them.
"""

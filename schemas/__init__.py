"""Messages, records and settings that cross a process boundary, as msgspec Structs. No I/O.

Every package imports ``schemas``; ``schemas`` imports no other package of Millrace. Fields and tags
of a message are on the wire: change them only together with every reader.
"""

"""``millrace bench``: load on any OpenAI-compatible server, or on Millrace's WebSocket, measured.

A parent process plans the load, child processes send it and note when each part of each answer
came, the parent makes one report of that. The report is JSON of a versioned schema
(``bench.report.report``), a table for the terminal and a page of HTML. ``cli.bench`` calls it; it
imports no service.
"""

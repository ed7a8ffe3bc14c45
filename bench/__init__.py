"""``millrace bench``: measured load on any OpenAI-compatible server, or on Millrace's WebSocket.

A parent process plans the load, child processes send it and record the arrival of each part of each
answer, and the parent makes one report. The report is JSON of a versioned schema
(``bench.report.report``), a table for the terminal and a page of HTML. ``cli.bench`` calls this
package; it imports no service.
"""

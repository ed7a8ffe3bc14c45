"""``millrace sql``, ``usage`` and ``migrate``: statements to the analytics store of the system that
runs, or to the one that it left. ``simulate`` reads its traces here. Imports ``telemetry``.
"""

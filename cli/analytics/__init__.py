"""``millrace sql``, ``usage`` and ``migrate``: queries of the analytics store of a running system,
or of the store that it left.

``simulate`` reads its traces here. Imports ``telemetry``.
"""

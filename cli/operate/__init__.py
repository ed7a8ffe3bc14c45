"""``millrace status``, ``down``, ``logs`` and ``models``: operation of a system that ``millrace
up`` runs, over its control socket."""

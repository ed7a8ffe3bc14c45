"""``millrace status``, ``down``, ``logs`` and ``models``: what an operator does to a system that
``millrace up`` runs. Called by ``cli.main``. Asks the system over its control socket.
"""

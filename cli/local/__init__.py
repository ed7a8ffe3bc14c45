"""``millrace up``: the whole system on one machine, its stores included, each service in a process
that is started again when it ends. Called by ``cli.main``. Imports every service's entry point.
"""

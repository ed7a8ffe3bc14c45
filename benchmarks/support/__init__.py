"""Common code of benchmarks: loads, clients, simulated workers, systems as processes, and figures.

Only benchmarks and their tests import it.
"""

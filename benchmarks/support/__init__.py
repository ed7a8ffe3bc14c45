"""What several benchmarks use: loads, clients, workers that compute nothing, systems as processes,
and the figures that come out. Only benchmarks and their tests import it.
"""

"""Transfer of KV cache blocks between engines of workers: protocol, memory, server and client.

``engine`` uses this package, which knows nothing of sequences.
"""

"""Leases of the requests that run here: extended in time, ownership confirmed after a gap, and
written to the shared index. Called by ``endings`` and ``requests``; imports ``generations``."""

"""``millrace keys``: API keys and what tenants may use, kept in Redis. Called by ``cli.main``.
Imports ``bus.tenancy``, and from ``gateway`` how limits are shown.
"""

"""``millrace keys``: API keys and tenants' limits, kept in Redis.

Imports ``bus.tenancy``, and from ``gateway`` the format of limits.
"""

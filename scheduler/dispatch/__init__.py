"""Fleet-wide actions: migration, role switches, lease recovery, and wait estimates.

It uses the stages. ``intake`` uses it.
"""

"""Stages of a group on other hosts: how these join, and what goes between the hosts by TCP. Called
by ``group.loading`` at rank 0 and by ``millrace stages`` there; imports the rest of ``group``, and
``transfer`` for bytes to a deadline."""

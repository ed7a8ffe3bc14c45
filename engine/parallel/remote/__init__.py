"""Stages of a group on other hosts: how hosts join, and what goes between them by TCP. The loading
of groups calls it at rank 0, and ``millrace stages`` on the other hosts."""

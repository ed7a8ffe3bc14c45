"""Stages of a group on other hosts: how hosts join, and their traffic by TCP.

The loading of groups uses this package at rank 0, and ``millrace stages`` on the other hosts.
"""

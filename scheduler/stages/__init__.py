"""Stages of a job in a scheduler, one a file: pull, prepare, place, send, watch, end.

A stage is functions over a job and the shared state. Each calls only later stages.
"""

"""A job's way through a scheduler, one stage a file: pull, prepare, place, send, watch, end. Stages
are functions over a job and the state that they share; each calls only stages that come after it.
"""

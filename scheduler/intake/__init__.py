"""Queue intake: served models, queue length, shedding, and model choice.

The scheduler starts it. It may import every other folder.
"""

"""The ``millrace`` command, with a package for each group of subcommands.

``bench`` and ``simulation`` implement the subcommands of those names. No other package imports
``cli``; ``cli`` may import every package.
"""

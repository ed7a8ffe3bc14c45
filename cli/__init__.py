"""The ``millrace`` command, a room for each subject of its commands; ``bench`` and ``simulation``
do what its commands of those names ask for. Nothing imports it. It may import every package.
"""

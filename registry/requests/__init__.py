"""Generation requests: the bodies of chats and completions, parsed and checked for every
entrance.
"""

"""Generation requests: the bodies of chats and completions, read and checked for every
entrance."""

"""One request's answer: its choices, and the rounds of tools that it takes, as parts."""

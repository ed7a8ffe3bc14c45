"""How the suite is run: which tests, in which order, what each costs, and what is run again."""

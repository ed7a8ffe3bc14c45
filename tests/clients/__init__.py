"""Other people's clients: slow tests drive some, ``make test-clients`` runs the heavy ones."""

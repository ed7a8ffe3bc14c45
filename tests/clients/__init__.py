"""Clients that other people made, too heavy for the tests: ``make test-clients`` runs them."""

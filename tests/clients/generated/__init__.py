"""Programs that use generated clients; tests/clients/test_generated.py runs them."""

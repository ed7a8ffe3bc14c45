"""Tools that the gateway runs itself."""

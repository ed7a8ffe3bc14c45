"""Which worker a request goes to. Pure functions of what workers reported."""

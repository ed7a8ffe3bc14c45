"""Workers that compute nothing, in virtual time."""

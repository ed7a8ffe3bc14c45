"""The endpoints that answer with one vector or one number for each input."""

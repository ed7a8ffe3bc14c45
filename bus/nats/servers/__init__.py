"""Which server of a cluster a client uses, and what it does when that one is gone."""

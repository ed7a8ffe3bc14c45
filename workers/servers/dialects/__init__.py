"""How each kind of inference server is started, asked and read: a module for each. Called by
``servers.kinds``."""

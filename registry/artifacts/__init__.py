"""Files of models and adapters in object stores, and their copies on this machine."""

"""Models and adapters in object stores, and their copies here."""

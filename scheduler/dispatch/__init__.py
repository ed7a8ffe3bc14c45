"""The workers as a whole: streams migrate, roles change, leases of dead workers are released, waits
are predicted. It uses the stages; ``intake`` uses it."""

"""Jobs pulled from the bus, made ready, and given to the dispatcher of their model."""

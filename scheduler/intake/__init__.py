"""Jobs pulled from the bus, made ready, and given to the dispatcher of their model; and what the
queue is watched for. The scheduler starts it; it may import every other room."""

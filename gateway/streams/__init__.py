"""Open streams: frames in, replays, and what clients saw of them."""
